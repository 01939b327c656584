//! A part of an experiment's cells, by mode, workload, disk and number of guests, so that what is long is measured in several sessions into
//! the same directory. What of an experiment there is to measure, and what its claims are about, stays what it is.

use crate::cell::Mode;
use crate::flash;
use crate::workload::Workload;

/// Which cells are measured: of what is not named, all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    /// In these modes.
    pub modes: Vec<Mode>,
    /// Of these workloads.
    pub workloads: Vec<Workload>,
    /// On these disks.
    pub disks: Vec<String>,
    /// With so many guests at once.
    pub guests: Vec<u32>,
}

/// Whether a list that names something, or nothing, has this.
pub(crate) fn has<T: PartialEq>(list: &[T], one: &T) -> bool {
    list.is_empty() || list.contains(one)
}

/// A mode of that name.
///
/// # Errors
/// A sentence, when there is none.
pub fn mode(name: &str) -> Result<Mode, String> {
    Mode::by_name(name)
        .ok_or_else(|| format!("there is no mode '{name}'; there are {}", Mode::ALL.map(Mode::name).join(", ")))
}

/// A workload of that name.
///
/// # Errors
/// A sentence, when there is none.
pub fn workload(name: &str) -> Result<Workload, String> {
    Workload::by_name(name)
        .ok_or_else(|| format!("there is no workload '{name}'; 'amberlog lab show ID' says which an experiment has"))
}

/// A modelled disk of that name, or a flash translation layer.
///
/// # Errors
/// A sentence, when there is none.
pub fn disk(name: &str) -> Result<String, String> {
    let is_known = flash::LAYERS.contains(&name) || name.parse::<disk_model::Profile>().is_ok();
    is_known
        .then(|| name.to_owned())
        .ok_or_else(|| format!("there is no disk '{name}'; 'amberlog lab show ID' says which an experiment has"))
}

/// How many guests at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guests {
    /// Any number up to this one.
    AtMost(u32),
    /// These numbers alone: a list.
    Only(Vec<u32>),
}

impl Guests {
    /// The most.
    pub fn max(&self) -> u32 {
        match self {
            Self::AtMost(most) => *most,
            Self::Only(numbers) => numbers.iter().copied().max().unwrap_or(1),
        }
    }

    /// Those that are named.
    pub fn only(&self) -> &[u32] {
        match self {
            Self::AtMost(_) => &[],
            Self::Only(numbers) => numbers,
        }
    }

    /// A list as it is written on the command line: of one number with a comma behind it.
    pub(crate) fn list(numbers: &[u32]) -> String {
        match numbers {
            [one] => format!("{one},"),
            _ => joined(numbers.iter().map(u32::to_string)),
        }
    }
}

impl std::str::FromStr for Guests {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |word: &str| {
            let number = word.parse().ok().filter(|number| *number > 0);
            number.ok_or_else(|| {
                format!(
                    "'{text}' is no number of guests: 4 is at most so many, 1,4 are these two, and '4,' is four alone"
                )
            })
        };
        match text.strip_suffix(',').unwrap_or(text) {
            alone if alone == text && !text.contains(',') => Ok(Self::AtMost(number(text)?)),
            list => Ok(Self::Only(list.split(',').map(number).collect::<Result<_, _>>()?)),
        }
    }
}

impl std::fmt::Display for Guests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "{most}"),
            Self::Only(numbers) => f.write_str(&Self::list(numbers)),
        }
    }
}

fn joined(names: impl Iterator<Item = String>) -> String {
    names.collect::<Vec<_>>().join(",")
}

impl Only {
    /// The options that say so, with a space before each; of guests, `--guests` says it.
    pub fn options(&self) -> String {
        let lists = [
            ("--modes", joined(self.modes.iter().map(Mode::to_string))),
            ("--workloads", joined(self.workloads.iter().map(|one| one.name().to_owned()))),
            ("--disks", self.disks.join(",")),
        ];
        let named = lists.into_iter().filter(|(_, list)| !list.is_empty());
        named.map(|(name, list)| format!(" {name} {list}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_guests_is_the_most_and_a_list_is_what_it_names() {
        let of = |text: &str| text.parse::<Guests>();
        assert_eq!(of("8"), Ok(Guests::AtMost(8)));
        assert_eq!(of("1,8"), Ok(Guests::Only(vec![1, 8])));
        assert_eq!(of("8,"), Ok(Guests::Only(vec![8])));
        for wrong in ["", ",", "0", "1,,8", "many"] {
            assert!(of(wrong).unwrap_err().contains("is no number of guests"), "{wrong}");
        }
        for text in ["8", "1,8", "8,"] {
            assert_eq!(of(text).unwrap().to_string(), text);
        }
        assert!(mode("floppy").unwrap_err().contains("vma-published") && mode("vma") == Ok(Mode::Vma));
        assert!(disk("floppy").is_err() && disk("hdd-7200").is_ok() && disk("dftl").is_ok());
        assert!(workload("tar").is_err() && workload("untar") == Ok(Workload::Untar));
    }
}
