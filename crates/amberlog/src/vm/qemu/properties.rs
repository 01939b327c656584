//! The value of one of QEMU's options: `driver,id=a,share=on`, or the same as JSON.
//!
//! Both of QEMU's syntaxes come to one thing here, a list of keys and texts: nested JSON has its keys joined with dots, as QEMU
//! itself writes them (`file.filename`). The rules are QEMU's (`util/qemu-option.c`, `util/keyval.c`): a comma in a value
//! is written twice; the first part may leave out its key; a key alone is `on`, and with `no` before it `off`; the last of two counts.
//!
//! Must never: take a value for less than QEMU does. What QEMU itself would refuse is left to QEMU.

use std::ffi::OsStr;

/// Levels of nested JSON.
const DEPTH_MAX: u32 = 16;

/// Keys and values, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties(Vec<(String, String)>);

impl Properties {
    /// Reads a value. `implied` is the key of the first part, if that is without one.
    ///
    /// # Errors
    /// A sentence when it begins as JSON and is none.
    pub fn parse(value: &OsStr, implied: Option<&str>) -> Result<Self, String> {
        let text = value.to_string_lossy();
        let mut properties = Properties::default();
        if text.trim_start().starts_with('{') {
            let json = serde_json::from_str(&text).map_err(|error| format!("'{text}' is no JSON: {error}"))?;
            properties.add_json("", &json, 0);
        } else {
            properties.add_pairs(&text, implied);
        }
        Ok(properties)
    }

    fn add_pairs(&mut self, text: &str, implied: Option<&str>) {
        let mut rest = text;
        let mut is_first = true;
        while !rest.is_empty() {
            let name_end = rest.find(['=', ',']).unwrap_or(rest.len());
            let has_value = rest[name_end..].starts_with('=');
            match implied {
                Some(key) if is_first && !has_value => {
                    let (value, after) = value(rest);
                    self.0.push((key.to_owned(), value));
                    rest = after;
                }
                _ if has_value => {
                    let key = &rest[..name_end];
                    let (value, after) = value(&rest[name_end + 1..]);
                    self.0.push((key.to_owned(), value));
                    rest = after;
                }
                _ => {
                    let flag = &rest[..name_end];
                    let (key, value) = match flag.strip_prefix("no") {
                        Some(key) if !key.is_empty() => (key, "off"),
                        _ => (flag, "on"),
                    };
                    self.0.push((key.to_owned(), value.to_owned()));
                    rest = rest[name_end..].strip_prefix(',').unwrap_or_default();
                }
            }
            is_first = false;
        }
    }

    fn add_json(&mut self, prefix: &str, value: &serde_json::Value, depth: u32) {
        use serde_json::Value;
        let key = |name: &str| if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        match value {
            _ if depth > DEPTH_MAX => {}
            Value::Object(members) => {
                members.iter().for_each(|(name, member)| self.add_json(&key(name), member, depth + 1));
            }
            Value::Array(members) => {
                let numbered = members.iter().enumerate();
                numbered.for_each(|(number, member)| self.add_json(&key(&number.to_string()), member, depth + 1));
            }
            Value::Bool(flag) => self.0.push((prefix.to_owned(), if *flag { "on" } else { "off" }.to_owned())),
            Value::String(text) => self.0.push((prefix.to_owned(), text.clone())),
            Value::Number(number) => self.0.push((prefix.to_owned(), number.to_string())),
            Value::Null => {}
        }
    }

    /// Adds what another value of the same option says: its keys count.
    pub fn merge(&mut self, later: Properties) {
        self.0.extend(later.0);
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Whether a key is on. None if it is not there, or neither on nor off.
    pub fn is_on(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            "on" | "yes" | "true" | "y" => Some(true),
            "off" | "no" | "false" | "n" => Some(false),
            _ => None,
        }
    }

    /// All keys and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

/// A value up to a single comma, and what comes after that.
fn value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(',') {
        value.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.strip_prefix(',') {
            Some(after) => {
                value.push(',');
                rest = after;
            }
            None => return (value, rest),
        }
    }
    value.push_str(rest);
    (value, "")
}

/// A size as QEMU reads it (`qemu_strtosz`): a number, perhaps with a fraction, and one letter; `unit` where there is none.
pub fn size_bytes(text: &str, unit: char) -> Option<u64> {
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits_end);
    let mut letters = suffix.chars();
    let letter = letters.next().unwrap_or(unit).to_ascii_uppercase();
    if letters.next().is_some() {
        return None;
    }
    let shift = match letter {
        'B' => 0,
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        'P' => 50,
        'E' => 60,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let whole: u64 = whole.parse().ok()?;
    let fraction: f64 = if fraction.is_empty() { 0.0 } else { format!("0.{fraction}").parse().ok()? };
    let part = (fraction * (1u64 << shift) as f64) as u64;
    whole.checked_mul(1 << shift)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str, implied: Option<&str>) -> Vec<(String, String)> {
        Properties::parse(OsStr::new(text), implied).expect("understood").0
    }

    fn list(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn text_is_read_as_qemu_reads_it() {
        let object = Some("qom-type");
        for (text, expected) in [
            ("memory-backend-ram", &[("qom-type", "memory-backend-ram")][..]),
            ("a,id=b,share", &[("qom-type", "a"), ("id", "b"), ("share", "on")]),
            ("a,noshare", &[("qom-type", "a"), ("share", "off")]),
            ("id=b,qom-type=a", &[("id", "b"), ("qom-type", "a")]),
            ("a,mem-path=/x,,y,share=on", &[("qom-type", "a"), ("mem-path", "/x,y"), ("share", "on")]),
            ("a,,b,c=,,", &[("qom-type", "a,b"), ("c", ",")]),
            ("a,b=c=d,e=", &[("qom-type", "a"), ("b", "c=d"), ("e", "")]),
            ("a,no", &[("qom-type", "a"), ("no", "on")]),
            ("", &[]),
            ("a,", &[("qom-type", "a")]),
        ] {
            assert_eq!(pairs(text, object), list(expected), "{text}");
        }
        assert_eq!(pairs("memory-backend=m", Some("type")), list(&[("memory-backend", "m")]));
        assert_eq!(pairs("flag", None), list(&[("flag", "on")]));
    }

    #[test]
    fn json_is_read_as_the_same() {
        let json = r#"{"qom-type":"memory-backend-file","share":true,"size":1024,"host-nodes":[0,2],"file":{"filename":"a,b"},"x":null}"#;
        let expected = list(&[
            ("qom-type", "memory-backend-file"),
            ("share", "on"),
            ("size", "1024"),
            ("host-nodes.0", "0"),
            ("host-nodes.1", "2"),
            ("file.filename", "a,b"),
        ]);
        let mut found = pairs(json, Some("qom-type"));
        let mut sorted = expected.clone();
        found.sort();
        sorted.sort();
        assert_eq!(found, sorted);
        assert!(Properties::parse(OsStr::new("{\"a\":"), None).is_err());
        let deep = "{\"a\":".repeat(100) + "1" + &"}".repeat(100);
        assert_eq!(pairs(&deep, None), []);
    }

    #[test]
    fn the_last_one_counts() {
        let mut machine = Properties::parse(OsStr::new("q35,memory-backend=a,x=on"), Some("type")).expect("understood");
        machine.merge(Properties::parse(OsStr::new("memory-backend=b,x=off"), Some("type")).expect("understood"));
        assert_eq!((machine.get("type"), machine.get("memory-backend")), (Some("q35"), Some("b")));
        assert_eq!((machine.is_on("x"), machine.is_on("type"), machine.is_on("none")), (Some(false), None, None));
    }

    #[test]
    fn sizes() {
        for (text, unit, bytes) in [
            ("512", 'M', Some(512 << 20)),
            ("512", 'B', Some(512)),
            ("1.5G", 'M', Some(3 << 29)),
            ("2g", 'M', Some(2 << 30)),
            ("100000B", 'M', Some(100_000)),
            ("128MiB", 'M', None),
            ("lots", 'M', None),
            ("3X", 'M', None),
            ("", 'M', None),
            ("99999999999E", 'M', None),
        ] {
            assert_eq!(size_bytes(text, unit), bytes, "{text}");
        }
    }
}
