//! The command line of a guest tool: `--name value` pairs and `--flag`s, nothing positional.

use crate::Result;
use std::collections::BTreeMap;

/// Options as given; each is taken once, and what is left over is an error.
pub struct Options {
    values: BTreeMap<String, String>,
}

impl Options {
    /// Reads the words after the subcommand. A word that follows `--name` and does not begin with
    /// `--` is its value; otherwise the option is a flag.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut values = BTreeMap::new();
        let mut words = words.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(name) = word.strip_prefix("--") else {
                return Err(format!("'{word}' is not an option; all options begin with --"));
            };
            let value = words.next_if(|next| !next.starts_with("--")).unwrap_or_default();
            if values.insert(name.to_owned(), value).is_some() {
                return Err(format!("--{name} is given twice"));
            }
        }
        Ok(Self { values })
    }

    /// The text of an option, if given.
    pub fn text(&mut self, name: &str) -> Option<String> {
        self.values.remove(name)
    }

    /// The text of an option that must be given.
    pub fn required(&mut self, name: &str) -> Result<String> {
        self.text(name).filter(|text| !text.is_empty()).ok_or_else(|| format!("--{name} is missing"))
    }

    /// A whole number within bounds, or `default`.
    pub fn number(&mut self, name: &str, default: u64, bounds: std::ops::RangeInclusive<u64>) -> Result<u64> {
        let Some(text) = self.text(name) else { return Ok(default) };
        text.parse().ok().filter(|number| bounds.contains(number)).ok_or_else(|| {
            format!("--{name} is '{text}'; it must be a number from {} to {}", bounds.start(), bounds.end())
        })
    }

    /// Whether a flag is given.
    pub fn flag(&mut self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// Fails if an option is left that nobody asked for.
    pub fn finish(self) -> Result<()> {
        match self.values.into_keys().next() {
            None => Ok(()),
            Some(name) => Err(format!("--{name} is not an option of this tool")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Options {
        Options::parse(text.split_whitespace().map(str::to_owned)).unwrap()
    }

    #[test]
    fn options_are_taken_and_leftovers_refused() {
        let mut options = parse("--count 5 --forever --mode append");
        assert_eq!(options.number("count", 1, 0..=10), Ok(5));
        assert!(options.flag("forever"));
        assert_eq!(options.number("size", 7, 0..=10), Ok(7));
        assert!(options.finish().unwrap_err().contains("--mode"));
        assert!(parse("--count 50").number("count", 1, 0..=10).is_err());
        assert!(parse("").required("directory").is_err());
    }
}
