//! Several traces or disks on one device: merging by time, and where each disk lies.

use crate::{Names, Notes, Record, Result, Source};

/// Where each disk of a trace lies on the one device it is replayed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One after another where every disk's size is known, else all from address 0 on (see [`Placer::overlaid`]).
    Auto,
    /// All disks from address 0 on, over one another.
    Overlay,
    /// One after another in the order of their numbers; every size must be known.
    Stack,
    /// Disk `n` (counted from 0, in the order of first use) at `n` × this many bytes.
    Stride(u64),
}

impl std::str::FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Layout, String> {
        match text {
            "auto" => Ok(Layout::Auto),
            "overlay" => Ok(Layout::Overlay),
            "stack" => Ok(Layout::Stack),
            other => {
                let bytes = other.strip_prefix("stride:").and_then(|n| n.parse().ok()).filter(|&n| n > 0);
                bytes
                    .map(Layout::Stride)
                    .ok_or_else(|| format!("`{other}` is no layout; there are auto, overlay, stack and stride:BYTES"))
            }
        }
    }
}

/// Turns a record's address on its disk into an address on the one device.
#[derive(Clone, Debug)]
pub struct Placer {
    layout: Layout,
    // Start of each disk, by number; computed when first needed.
    starts: Vec<u64>,
    capacities: Vec<u64>,
    end: u64,
    overlaid: bool,
}

impl Placer {
    /// A placer for one trace.
    pub fn new(layout: Layout) -> Placer {
        Placer { layout, starts: Vec::new(), capacities: Vec::new(), end: 0, overlaid: false }
    }

    /// Whether disks of unknown size were laid over one another without that having been asked for.
    pub fn overlaid(&self) -> bool {
        self.overlaid
    }

    /// The record's address on the device; `Err` says why it has none.
    #[inline]
    pub fn place(&mut self, record: &Record, names: &Names) -> std::result::Result<u64, String> {
        let disk = usize::from(record.disk);
        while disk >= self.starts.len() {
            self.add_disk(names)?;
        }
        let capacity = self.capacities[disk];
        if capacity != u64::MAX && record.end().is_none_or(|end| end > capacity) {
            return Err(format!(
                "a request of {} bytes at byte {} lies beyond the {capacity} bytes of its disk {}",
                record.length,
                record.address,
                names.disk_name(record.disk)
            ));
        }
        self.starts[disk].checked_add(record.address).ok_or_else(|| "an address lies beyond 64 bits".to_owned())
    }

    #[cold]
    fn add_disk(&mut self, names: &Names) -> std::result::Result<(), String> {
        let number = self.starts.len();
        let capacity = names.disks().get(number).map_or(0, |d| d.capacity_bytes);
        let known = capacity > 0;
        let (start, bound) = match self.layout {
            Layout::Overlay => (0, u64::MAX),
            Layout::Stride(stride) => {
                let start = stride.checked_mul(number as u64).ok_or("the stride is too large for so many disks")?;
                (start, stride)
            }
            Layout::Auto if !known || self.overlaid => {
                self.overlaid |= number > 0;
                (0, u64::MAX)
            }
            Layout::Stack if !known => {
                return Err(format!(
                    "the size of disk {} is unknown, so nothing can be stacked on it: use --layout stride:BYTES or overlay",
                    names.disk_name(number as u16)
                ));
            }
            Layout::Auto | Layout::Stack => {
                let start = self.end;
                self.end = start.checked_add(capacity).ok_or("the disks together are larger than 64 bits of bytes")?;
                (start, capacity)
            }
        };
        self.starts.push(start);
        self.capacities.push(bound);
        Ok(())
    }
}

struct Input<S> {
    source: S,
    label: String,
    delay_ns: u64,
    head: Option<Record>,
    // Numbers in the merged trace by numbers in this one.
    vms: Vec<u16>,
    disks: Vec<u16>,
}

/// Several traces as one, in the order of time. Each keeps its own clock's zero, or begins later than the one before.
///
/// # Examples
/// ```
/// use io_trace::{Format, Merge, Options, Source, open_reader};
///
/// let options = Options { format: Format::SsdSim, ..Options::default() };
/// let web = open_reader("0 0 8 8 0\n2000 0 16 8 0\n".as_bytes(), "web", &options)?;
/// let mail = open_reader("1000 0 8 8 1\n".as_bytes(), "mail", &options)?;
/// let mut merged = Merge::new(vec![("web".to_owned(), web), ("mail".to_owned(), mail)]);
/// let mut order = Vec::new();
/// while let Some(record) = merged.next_record()? {
///     order.push(format!("{} {}", record.time_ns, merged.names().vm_name(record.vm)));
/// }
/// assert_eq!(order, ["0 web", "1000 mail", "2000 web"]);
/// # Ok::<(), io_trace::Error>(())
/// ```
pub struct Merge<S> {
    inputs: Vec<Input<S>>,
    names: Names,
    started: bool,
}

impl<S: Source> Merge<S> {
    /// Merges the labelled traces. VMs are told apart by label: `label/vm`, or the label alone for a trace that names only one.
    pub fn new(sources: Vec<(String, S)>) -> Merge<S> {
        Merge::staggered(sources, 0)
    }

    /// The same, each trace beginning `stagger_ns` after the one named before it: several recordings of one workload,
    /// or the same one several times, then do not run in step.
    pub fn staggered(sources: Vec<(String, S)>, stagger_ns: u64) -> Merge<S> {
        let input = |(index, (label, source))| {
            let delay_ns = stagger_ns.saturating_mul(index as u64);
            Input { source, label, delay_ns, head: None, vms: Vec::new(), disks: Vec::new() }
        };
        Merge { inputs: sources.into_iter().enumerate().map(input).collect(), names: Names::new(), started: false }
    }
}

impl<S: Source> Input<S> {
    fn advance(&mut self, names: &mut Names) -> Result<()> {
        self.head = self.source.next_record()?;
        let own = self.source.names();
        let single = own.vms().len() <= 1;
        let too_many = || crate::Error::Format {
            name: self.label.clone(),
            reason: "the merged traces have more than 65536 VMs or disks".into(),
        };
        while self.vms.len() < own.vms().len() {
            let name = &own.vms()[self.vms.len()].name;
            let name = if single { self.label.clone() } else { format!("{}/{name}", self.label) };
            self.vms.push(names.vm(&name).ok_or_else(too_many)?);
        }
        while self.disks.len() < own.disks().len() {
            let disk = &own.disks()[self.disks.len()];
            let vm = self.vms.get(usize::from(disk.vm)).copied().unwrap_or(0);
            self.disks.push(names.disk(vm, &disk.name, disk.capacity_bytes).ok_or_else(too_many)?);
        }
        if let Some(head) = &mut self.head {
            head.time_ns = head.time_ns.saturating_add(self.delay_ns);
            // A number without a name is the trace's fault; it is kept apart as far as possible.
            head.vm = self.vms.get(usize::from(head.vm)).copied().unwrap_or(head.vm);
            head.disk = self.disks.get(usize::from(head.disk)).copied().unwrap_or(head.disk);
        }
        Ok(())
    }
}

impl<S: Source> Source for Merge<S> {
    fn next_record(&mut self) -> Result<Option<Record>> {
        if !self.started {
            self.started = true;
            for input in &mut self.inputs {
                input.advance(&mut self.names)?;
            }
        }
        // A handful of inputs: looking at each head is faster than a heap. Ties go to the input named first.
        let next = self.inputs.iter_mut().filter(|i| i.head.is_some()).min_by_key(|i| i.head.map(|h| h.time_ns));
        let Some(input) = next else { return Ok(None) };
        let record = input.head;
        input.advance(&mut self.names)?;
        Ok(record)
    }

    fn names(&self) -> &Names {
        &self.names
    }

    fn notes(&self) -> Notes {
        let mut all = Notes::default();
        for input in &self.inputs {
            let notes = input.source.notes();
            let of = |text: String| format!("{}: {text}", input.label);
            all.units += notes.units;
            all.skipped += notes.skipped;
            all.ignored += notes.ignored;
            all.first_skipped = all.first_skipped.or(notes.first_skipped.map(of));
            all.tail = all.tail.or(notes.tail.map(of));
        }
        all
    }

    fn units(&self) -> u64 {
        self.inputs.iter().map(|i| i.source.units()).sum()
    }

    fn format(&self) -> &'static str {
        self.inputs.first().map_or("none", |i| i.source.format())
    }
}
