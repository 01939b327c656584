//! Which part of a device a region is. One device may have been cut in several ways, one after the other.

use std::collections::BTreeSet;

/// Parts that a device can be cut into.
const PARTS_MAX: u32 = 64;
/// A devdax mapping begins at a multiple of its huge pages.
const LARGE_ALIGNMENT: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// Which part of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionChoice {
    /// Number of the part, from 0.
    pub index: u32,
    /// Into how many equal parts the device is cut.
    pub count: u32,
}

impl Default for RegionChoice {
    fn default() -> Self {
        RegionChoice { index: 0, count: 1 }
    }
}

impl RegionChoice {
    /// Several parts of one device, as `0+1/4`: the first two of four.
    ///
    /// # Errors
    /// A sentence when that names no parts, or one twice.
    pub fn several(text: &str) -> Result<Vec<Self>, String> {
        let wrong = || format!("regions are INDEX+INDEX/COUNT, as 0+1/4, not '{text}'");
        let (indices, count) = text.split_once('/').ok_or_else(wrong)?;
        let mut choices: Vec<Self> = Vec::new();
        for index in indices.split('+') {
            let choice: Self = format!("{index}/{count}").parse()?;
            if choices.contains(&choice) {
                return Err(wrong());
            }
            choices.push(choice);
        }
        Ok(choices)
    }

    /// Where the part is in a device of `device_bytes`: first byte and length. Nothing for a part that is none.
    pub fn place(&self, device_bytes: u64) -> Option<(u64, u64)> {
        if self.index >= self.count || self.count > PARTS_MAX {
            return None;
        }
        let share = device_bytes / u64::from(self.count);
        let alignment = if share >= 2 * LARGE_ALIGNMENT { LARGE_ALIGNMENT } else { PAGE };
        let len = if self.count == 1 { share / PAGE * PAGE } else { share / alignment * alignment };
        (len > 0).then_some((u64::from(self.index) * len, len))
    }

    /// Which part of a device begins there and is so long, however it is cut.
    pub(super) fn at(device_bytes: u64, place: (u64, u64)) -> Option<Self> {
        every_choice().find(|choice| choice.place(device_bytes) == Some(place))
    }
}

impl std::str::FromStr for RegionChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("a region is INDEX/COUNT, as 0/2, with at most {PARTS_MAX} regions; not '{text}'");
        let (index, count) = text.split_once('/').ok_or_else(wrong)?;
        let choice =
            RegionChoice { index: index.parse().map_err(|_| wrong())?, count: count.parse().map_err(|_| wrong())? };
        if choice.index >= choice.count || choice.count > PARTS_MAX { Err(wrong()) } else { Ok(choice) }
    }
}

impl std::fmt::Display for RegionChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

fn every_choice() -> impl Iterator<Item = RegionChoice> {
    (1..=PARTS_MAX).flat_map(|count| (0..count).map(move |index| RegionChoice { index, count }))
}

/// Where a region of a device of `device_bytes` can begin, however it is cut: in bytes, ascending.
pub(super) fn beginnings(device_bytes: u64) -> BTreeSet<u64> {
    every_choice().filter_map(|choice| choice.place(device_bytes)).map(|(begin, _)| begin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_equal_parts_and_apart() {
        for device in [1 << 20, 64 << 20, 100_000_000] {
            for count in [1, 2, 3, 7, 64] {
                let mut end = 0;
                for index in 0..count {
                    let Some((offset, len)) = (RegionChoice { index, count }).place(device) else {
                        panic!("{count} parts of {device}")
                    };
                    assert_eq!((offset, offset % PAGE, len % PAGE), (end, 0, 0));
                    end = offset + len;
                }
                assert!(end <= device);
            }
        }
        assert_eq!(RegionChoice { index: 1, count: 1 }.place(1 << 20), None);
        assert_eq!(RegionChoice { index: 0, count: 2 }.place(4096), None, "half a page is no region");
        assert!("0/65".parse::<RegionChoice>().is_err() && "2/2".parse::<RegionChoice>().is_err());
        assert_eq!("1/2".parse::<RegionChoice>().map(|choice| choice.to_string()), Ok("1/2".to_owned()));
    }

    #[test]
    fn every_part_of_every_cut_begins_where_one_is_looked_for() {
        for device in [1 << 20, 100_000_000, 1 << 30] {
            let beginnings = beginnings(device);
            for choice in every_choice() {
                let Some(place) = choice.place(device) else { continue };
                assert!(beginnings.contains(&place.0), "{choice} of {device}");
                let named = RegionChoice::at(device, place).and_then(|choice| choice.place(device));
                assert_eq!(named, Some(place), "{choice} of {device}");
            }
        }
        assert_eq!(RegionChoice::at(8 << 20, (4096, 4096)), None);
    }
}
