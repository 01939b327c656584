//! The values of `--disk` and `--journal-disk`: `IMAGE[,key=value]...`, a comma in a path written twice.

use placement::PlacementKind;
use std::path::PathBuf;
use std::str::FromStr;

/// One `--disk IMAGE[,placement=P][,name=NAME][,readonly][,serial=S][,queues=N][,flush=honour|skip]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOption {
    /// The image or block device.
    pub path: PathBuf,
    /// Where its journals live.
    pub placement: PlacementKind,
    /// Its name, if given.
    pub name: Option<String>,
    /// Serial number shown to the guest; the name if not given.
    pub serial: Option<String>,
    /// The guest cannot write to it.
    pub read_only: bool,
    /// Flushes always reach storage.
    pub honour_flush: bool,
    /// Number of request queues.
    pub queues: u16,
}

/// One `--journal-disk IMAGE[,for=NAME][,name=NAME]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalDiskOption {
    /// The image or block device.
    pub path: PathBuf,
    /// Its name, if given.
    pub name: Option<String>,
    /// The disk whose journal it is; found by UUID if not given.
    pub of: Option<String>,
}

/// Splits at single commas; a doubled comma is one comma of the text.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let last = parts.last_mut().expect("never empty");
        match character {
            ',' if characters.peek() == Some(&',') => {
                characters.next();
                last.push(',');
            }
            ',' => parts.push(String::new()),
            other => last.push(other),
        }
    }
    parts
}

fn switch(key: &str, value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(other) => Err(format!("{key} is on or off, not '{other}'")),
    }
}

fn text(key: &str, value: Option<&str>) -> Result<String, String> {
    value.filter(|value| !value.is_empty()).map(str::to_owned).ok_or_else(|| format!("{key} needs a value: {key}=..."))
}

impl FromStr for DiskOption {
    type Err = String;

    fn from_str(argument: &str) -> Result<Self, String> {
        let mut parts = split(argument).into_iter();
        let path = parts.next().filter(|path| !path.is_empty()).ok_or("an image or block device is missing")?;
        let mut disk = DiskOption {
            path: PathBuf::from(path),
            placement: PlacementKind::Retain,
            name: None,
            serial: None,
            read_only: false,
            honour_flush: false,
            queues: 1,
        };
        for part in parts {
            let (key, value) = part.split_once('=').map_or((part.as_str(), None), |(key, value)| (key, Some(value)));
            match key {
                "placement" => disk.placement = text(key, value)?.parse()?,
                "name" => disk.name = Some(text(key, value)?),
                "serial" => {
                    let serial = text(key, value)?;
                    if serial.len() > 20 {
                        return Err(format!("the serial number '{serial}' is longer than 20 bytes"));
                    }
                    disk.serial = Some(serial);
                }
                "readonly" => disk.read_only = switch(key, value)?,
                "flush" => {
                    disk.honour_flush = match text(key, value)?.as_str() {
                        "honour" => true,
                        "skip" => false,
                        other => return Err(format!("flush is honour or skip, not '{other}'")),
                    }
                }
                "queues" => {
                    let queues = text(key, value)?;
                    disk.queues = queues
                        .parse()
                        .ok()
                        .filter(|count| (1..=64).contains(count))
                        .ok_or_else(|| format!("queues is a number from 1 to 64, not '{queues}'"))?;
                }
                other => {
                    return Err(format!(
                        "'{other}' is no option of a disk; there are placement, name, serial, readonly, flush, queues"
                    ));
                }
            }
        }
        Ok(disk)
    }
}

impl FromStr for JournalDiskOption {
    type Err = String;

    fn from_str(argument: &str) -> Result<Self, String> {
        let mut parts = split(argument).into_iter();
        let path = parts.next().filter(|path| !path.is_empty()).ok_or("an image or block device is missing")?;
        let mut disk = JournalDiskOption { path: PathBuf::from(path), name: None, of: None };
        for part in parts {
            let (key, value) = part.split_once('=').map_or((part.as_str(), None), |(key, value)| (key, Some(value)));
            match key {
                "for" => disk.of = Some(text(key, value)?),
                "name" => disk.name = Some(text(key, value)?),
                other => return Err(format!("'{other}' is no option of a journal disk; there are for and name")),
            }
        }
        Ok(disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        let disk: DiskOption = "/a,,b.img,placement=copy,name=x,readonly,flush=honour,queues=4".parse().expect("valid");
        assert_eq!(disk.path, PathBuf::from("/a,b.img"));
        assert_eq!(disk.placement, PlacementKind::Copy);
        assert_eq!(disk.name.as_deref(), Some("x"));
        assert!(disk.read_only && disk.honour_flush);
        assert_eq!(disk.queues, 4);
        let plain: DiskOption = "a.img".parse().expect("valid");
        assert_eq!(plain.placement, PlacementKind::Retain);
        let journal: JournalDiskOption = "j.img,for=x".parse().expect("valid");
        assert_eq!(journal.of.as_deref(), Some("x"));
    }

    #[test]
    fn nonsense_is_refused_with_a_sentence() {
        for argument in ["", "a,placement=tape", "a,size=3", "a,queues=0", "a,readonly=maybe", "a,name="] {
            assert!(argument.parse::<DiskOption>().is_err(), "{argument}");
        }
    }
}
