//! Chooses records: by kind, VM, disk, time and address.

use crate::{Kind, Names, Notes, Record, Result, Source};

/// A conjunction of conditions, each of the form `key=value[,value…]`.
///
/// # Examples
/// ```
/// use io_trace::{Filter, Kind, Names, Record};
///
/// let filter = Filter::parse(&["kind=write".to_owned(), "time=1..60".to_owned()])?;
/// let names = Names::single("vda");
/// let write = Record { time_ns: 2_000_000_000, address: 0, length: 4096, vm: 0, disk: 0, kind: Kind::Journal };
/// assert!(filter.accepts(&write, &names));
/// assert!(!filter.accepts(&Record { kind: Kind::Read, ..write }, &names));
/// assert!(!filter.accepts(&Record { time_ns: 0, ..write }, &names), "before the first second");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Filter {
    kinds: Option<Vec<Kind>>,
    vms: Option<Vec<String>>,
    disks: Option<Vec<String>>,
    time_ns: Option<(u64, u64)>,
    address: Option<(u64, u64)>,
}

impl Filter {
    /// Reads conditions such as `kind=journal,home`, `vm=web`, `disk=vda`, `time=1.5..60` (seconds) and
    /// `address=0..1073741824` (bytes); either end of a range may be missing. Several conditions must all hold.
    pub fn parse(conditions: &[String]) -> std::result::Result<Filter, String> {
        let mut filter = Filter::default();
        for condition in conditions {
            let (key, value) = condition
                .split_once('=')
                .ok_or_else(|| format!("the filter `{condition}` is not of the form key=value"))?;
            let words = || value.split(',').map(str::to_owned).collect::<Vec<_>>();
            match key {
                "kind" => {
                    let mut kinds = Vec::new();
                    for word in value.split(',') {
                        match word {
                            "write" => kinds.extend([Kind::Home, Kind::Journal, Kind::WriteZeroes]),
                            word => kinds.push(Kind::ALL.into_iter().find(|k| k.name() == word).ok_or_else(|| {
                                format!("no kind is called `{word}`; there are read, home, journal, write, flush, discard, write-zeroes")
                            })?),
                        }
                    }
                    filter.kinds = Some(kinds);
                }
                "vm" => filter.vms = Some(words()),
                "disk" => filter.disks = Some(words()),
                "time" => filter.time_ns = Some(range(value, |t| crate::text::time_ns(t, 1_000_000_000))?),
                "address" => filter.address = Some(range(value, |t| crate::text::number("address", t))?),
                other => {
                    return Err(format!(
                        "nothing can be filtered by `{other}`; there are kind, vm, disk, time and address"
                    ));
                }
            }
        }
        Ok(filter)
    }

    /// Whether the record passes.
    pub fn accepts(&self, record: &Record, names: &Names) -> bool {
        let is_in = |range: Option<(u64, u64)>, value| range.is_none_or(|(from, to)| from <= value && value < to);
        self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&record.kind))
            && is_in(self.time_ns, record.time_ns)
            && is_in(self.address, record.address)
            && self.vms.as_ref().is_none_or(|vms| vms.contains(&names.vm_name(record.vm)))
            && self.disks.as_ref().is_none_or(|disks| disks.contains(&names.disk_name(record.disk)))
    }
}

type Parse<'a> = &'a dyn Fn(&str) -> std::result::Result<u64, String>;

fn range(
    text: &str,
    parse: impl Fn(&str) -> std::result::Result<u64, String>,
) -> std::result::Result<(u64, u64), String> {
    let parse: Parse = &parse;
    let (from, to) = text.split_once("..").ok_or_else(|| format!("the range `{text}` is not of the form from..to"))?;
    let from = if from.is_empty() { 0 } else { parse(from)? };
    let to = if to.is_empty() { u64::MAX } else { parse(to)? };
    if from >= to {
        return Err(format!("the range `{text}` is empty"));
    }
    Ok((from, to))
}

/// A source of which only some records pass.
pub struct Filtered<S> {
    source: S,
    filter: Filter,
}

impl<S: Source> Filtered<S> {
    /// Passes what `filter` accepts.
    pub fn new(source: S, filter: Filter) -> Filtered<S> {
        Filtered { source, filter }
    }
}

impl<S: Source> Source for Filtered<S> {
    fn next_record(&mut self) -> Result<Option<Record>> {
        while let Some(record) = self.source.next_record()? {
            if self.filter.accepts(&record, self.source.names()) {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }
    fn names(&self) -> &Names {
        self.source.names()
    }
    fn notes(&self) -> Notes {
        self.source.notes()
    }
    fn units(&self) -> u64 {
        self.source.units()
    }

    fn format(&self) -> &'static str {
        self.source.format()
    }
}
