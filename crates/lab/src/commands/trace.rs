//! `amberlog trace`: what is in a block trace, and the same trace in another form.
//!
//! Traces stream through: memory does not grow with them. Damaged input is exit code 3 and nothing is left
//! behind at the output's name but what was written before (`convert` writes beside it and renames at the end).
//! Ctrl-C ends `summary` with what was read so far, and `convert` without an output; the exit code is then 1.

use super::progress::{Part, Progress};
use clap::{Args, Subcommand};
use io_trace::summary::{Summariser, Summary};
use io_trace::{
    BoxedSource, Filter, Filtered, Format, Layout, Merge, Names, Notes, Options, Placer, Record, Source, Split,
};
use io_trace::{TextWriter, Writer, WriterOptions};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Summarises and converts block traces.
#[derive(Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Subcommand)]
enum TraceCommand {
    /// Counts, bytes, sequentiality, footprint and the journal's share.
    Summary(SummaryArgs),
    /// Writes traces in another format, filtered or merged.
    Convert(ConvertArgs),
}

/// How traces are read; shared by every command that reads some.
#[derive(Args, Clone)]
pub struct ReadArgs {
    /// Format of the traces: amber, msr, spc, disksim (ms), ssdsim or mqsim (ns), blkparse, fio; auto knows amber and fio
    #[arg(long, default_value = "auto", value_name = "FORMAT")]
    pub format: Format,
    /// Count and skip unreadable lines and frames instead of stopping at the first
    #[arg(long)]
    pub lenient: bool,
    /// blkparse: the action that stands for the request, such as Q or D [default: whichever of the two comes first]
    #[arg(long, value_name = "LETTER")]
    pub blkparse_action: Option<char>,
    /// Only requests for which this holds: kind=journal,home · vm=NAME · disk=NAME · time=FROM..TO (s) · address=FROM..TO
    #[arg(long, value_name = "KEY=VALUE")]
    pub filter: Vec<String>,
}

impl ReadArgs {
    /// The reader's options, or what is wrong with them.
    pub fn options(&self) -> Result<Options, String> {
        let blkparse_action = match self.blkparse_action {
            None => None,
            Some(letter) if letter.is_ascii_uppercase() => Some(letter as u8),
            Some(other) => return Err(format!("--blkparse-action {other} is not a capital letter such as Q or D")),
        };
        Ok(Options { format: self.format, lenient: self.lenient, blkparse_action })
    }
}

#[derive(Args)]
struct SummaryArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The traces; `-` is standard input
    #[arg(required = true)]
    files: Vec<String>,
}

#[derive(Args)]
struct ConvertArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// Format to write: amber, msr, spc, disksim, ssdsim, mqsim, fio
    #[arg(long, default_value = "amber", value_name = "FORMAT")]
    to: Format,
    /// Compress an amber trace's frames with zstd at this level
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(i32).range(1..=22))]
    zstd: Option<i32>,
    /// Merge the traces by time, their VMs kept apart by file name
    #[arg(long)]
    merge: bool,
    /// With --merge: put all disks on one, laid out as overlay, stack or stride:BYTES
    #[arg(long, value_name = "LAYOUT", requires = "merge")]
    onto_one_disk: Option<Layout>,
    /// With --merge: each trace begins this many seconds after the one named before it
    #[arg(long, value_name = "SECONDS", requires = "merge", default_value_t = 0.0)]
    stagger: f64,
    /// Cut longer requests into pieces of this many bytes
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(512..))]
    split: Option<u64>,
    /// Where to write; `-` is standard output
    #[arg(long, short, value_name = "FILE")]
    output: String,
    /// The traces; `-` is standard input
    #[arg(required = true)]
    files: Vec<String>,
}

/// Why a command ended without doing its work.
enum Failure {
    Usage(String),
    Input(String),
    Other(String),
    Interrupted,
}

impl From<io_trace::Error> for Failure {
    fn from(error: io_trace::Error) -> Failure {
        if error.is_damaged_input() { Failure::Input(error.to_string()) } else { Failure::Other(error.to_string()) }
    }
}

/// Runs `amberlog trace`.
pub fn run(args: TraceArgs) -> ExitCode {
    let result = match args.command {
        TraceCommand::Summary(args) => summary(&args),
        TraceCommand::Convert(args) => convert(&args),
    };
    let (message, code) = match result {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Usage(message)) => (message, 2),
        Err(Failure::Input(message)) => (message, 3),
        Err(Failure::Other(message)) => (message, 1),
        Err(Failure::Interrupted) => ("interrupted".to_owned(), 1),
    };
    eprintln!("amberlog trace: {message}");
    ExitCode::from(code)
}

/// A trace under the command's bar: ends, without being an error, when the command is to stop.
struct Watched<'a> {
    source: Filtered<BoxedSource>,
    part: Part<'a>,
    progress: &'a Progress,
    requests: u64,
}

/// How many requests are read between two looks at the bar.
const WATCH_EVERY: u64 = 4096;

impl Source for Watched<'_> {
    fn next_record(&mut self) -> io_trace::Result<Option<Record>> {
        self.requests += 1;
        if self.requests.is_multiple_of(WATCH_EVERY) {
            self.part.note(self.requests);
            if self.progress.should_stop() {
                return Ok(None);
            }
        }
        match self.source.next_record() {
            // Whoever stops a command may have cut its input off, too.
            Err(_) if self.progress.should_stop() => Ok(None),
            other => other,
        }
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

fn progress(files: &[String]) -> Result<Progress, Failure> {
    Progress::new(files.iter().map(String::as_str)).map_err(Failure::Other)
}

fn open<'a>(file: &str, read: &ReadArgs, progress: &'a Progress) -> Result<Watched<'a>, Failure> {
    let options = read.options().map_err(Failure::Usage)?;
    let filter = Filter::parse(&read.filter).map_err(Failure::Usage)?;
    progress.say(file.to_owned());
    match progress.open(file, &options) {
        Ok((source, part)) => Ok(Watched { source: Filtered::new(source, filter), part, progress, requests: 0 }),
        Err(_) if progress.should_stop() => Err(Failure::Interrupted),
        Err(error) => Err(error.into()),
    }
}

/// Says on standard error what a reader skipped or missed.
pub fn tell_notes(name: &str, notes: &Notes) {
    if let Some(first) = &notes.first_skipped {
        eprintln!("{name}: {} unreadable lines or frames were skipped, the first: {first}", notes.skipped);
    }
    if let Some(tail) = &notes.tail {
        eprintln!("{name}: {tail}");
    }
}

fn summary(args: &SummaryArgs) -> Result<(), Failure> {
    let mut all = Vec::new();
    let progress = progress(&args.files)?;
    for file in args.files.iter().take_while(|_| !progress.should_stop()) {
        let mut source = open(file, &args.read, &progress)?;
        let mut summariser = Summariser::new();
        while let Some(record) = source.next_record()? {
            summariser.add(&record);
        }
        source.part.done();
        let notes = source.notes();
        tell_notes(file, &notes);
        let summary = summariser.summary(source.names());
        if args.json {
            let mut value = serde_json::to_value(&summary).map_err(|e| Failure::Other(e.to_string()))?;
            value["trace"] = file.as_str().into();
            value["format"] = source.format().into();
            value["skipped"] = notes.skipped.into();
            value["ignored"] = notes.ignored.into();
            value["tail"] = notes.tail.into();
            all.push(value);
        } else {
            progress.aside(|| print(&summary_text(file, source.format(), &summary)))?;
        }
    }
    progress.finish();
    let interrupted = progress.should_stop();
    if args.json {
        print(&format!("{:#}\n", serde_json::json!({ "schema": 1, "traces": all, "interrupted": interrupted })))?;
    }
    if interrupted { Err(Failure::Interrupted) } else { Ok(()) }
}

/// Prints; a closed pipe is the reader's choice, not a failure.
fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Other(format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

fn summary_text(file: &str, format: &str, s: &Summary) -> String {
    use ssd_sim::report::table::{bytes, columns, grouped};
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let mut rows = vec![["kind", "requests", "bytes"].map(str::to_owned).to_vec()];
    for (name, count) in [
        ("read", s.read),
        ("home write", s.home),
        ("journal write", s.journal),
        ("write zeroes", s.write_zeroes),
        ("discard", s.discard),
        ("flush", s.flush),
    ] {
        if count.requests > 0 {
            rows.push(vec![name.into(), grouped(count.requests), bytes(count.bytes as f64)]);
        }
    }
    let at_least = if s.footprint_is_lower_bound { "at least " } else { "" };
    let mut text =
        format!("{file} ({format}): {} requests in {:.3} s\n{}", grouped(s.requests), s.seconds, columns(&rows));
    text += &format!(
        "writes {} of reads and writes, journal {} of written bytes\n\
         sequential: reads {}, writes {}\n\
         footprint: {at_least}{} touched, {at_least}{} written, addresses up to {}\n",
        percent(s.write_ratio),
        percent(s.journal_share),
        percent(s.sequential_reads),
        percent(s.sequential_writes),
        bytes(s.footprint_bytes as f64),
        bytes(s.written_footprint_bytes as f64),
        bytes(s.end_of_addresses as f64),
    );
    if s.steps_back_in_time > 0 {
        text += &format!("{} requests are earlier than the one before them\n", grouped(s.steps_back_in_time));
    }
    let mut rows = vec![["VM", "disk", "read", "written"].map(str::to_owned).to_vec()];
    for disk in &s.disks {
        rows.push(vec![
            disk.vm.clone(),
            disk.disk.clone(),
            bytes(disk.read.bytes as f64),
            bytes(disk.write.bytes as f64),
        ]);
    }
    text + &columns(&rows)
}

enum Output {
    Amber { writer: Box<Writer<Box<dyn Write>>>, vms: usize, disks: usize },
    Text(TextWriter<Box<dyn Write>>),
}

impl Output {
    fn new(output: Box<dyn Write>, args: &ConvertArgs) -> std::io::Result<Output> {
        Ok(match args.to {
            Format::Amber | Format::Auto => {
                let options =
                    WriterOptions { zstd_level: args.zstd, frame_span_ns: u64::MAX, ..WriterOptions::default() };
                Output::Amber { writer: Box::new(Writer::new(output, Names::new(), options)?), vms: 0, disks: 0 }
            }
            other => {
                let buffered: Box<dyn Write> = Box::new(BufWriter::new(output));
                Output::Text(TextWriter::new(buffered, other)?)
            }
        })
    }

    fn record(&mut self, record: &Record, names: &Names) -> std::io::Result<()> {
        match self {
            Output::Text(writer) => writer.record(record, names),
            Output::Amber { writer, vms, disks } => {
                // Text formats name hosts and disks as they go: each is added before its first record.
                for vm in &names.vms()[*vms..] {
                    writer.add_vm(&vm.name)?;
                }
                for disk in &names.disks()[*disks..] {
                    writer.add_disk(disk.vm, &disk.name, disk.capacity_bytes)?;
                }
                (*vms, *disks) = (names.vms().len(), names.disks().len());
                writer.record(record)
            }
        }
    }

    fn finish(self) -> std::io::Result<()> {
        match self {
            Output::Amber { writer, .. } => writer.finish().map(drop),
            Output::Text(writer) => {
                if writer.widened() > 0 {
                    eprintln!("{} requests were rounded out to whole sectors", writer.widened());
                }
                if writer.dropped() > 0 {
                    eprintln!(
                        "{} flushes and discards were left out: the format has no word for them",
                        writer.dropped()
                    );
                }
                writer.finish().map(drop)
            }
        }
    }
}

/// Ten years.
const STAGGER_SECONDS_MAX: f64 = 315_360_000.0;

fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    if args.to == Format::Blkparse {
        return Err(Failure::Usage("--to blkparse: that format is only read".into()));
    }
    if args.zstd.is_some() && args.to != Format::Amber {
        return Err(Failure::Usage("--zstd goes with --to amber only; pipe text through zstd".into()));
    }
    if !(0.0..=STAGGER_SECONDS_MAX).contains(&args.stagger) {
        return Err(Failure::Usage(format!(
            "--stagger {} is not from 0 to {STAGGER_SECONDS_MAX} seconds",
            args.stagger
        )));
    }
    if args.files.len() > 1 && !args.merge {
        return Err(Failure::Usage("several traces are written as one with --merge only".into()));
    }
    let progress = progress(&args.files)?;
    let mut source: Box<dyn Source + '_> = if args.merge {
        let mut sources = Vec::new();
        for (label, file) in labels(&args.files).into_iter().zip(&args.files) {
            sources.push((label, open(file, &args.read, &progress)?));
        }
        Box::new(Merge::staggered(sources, (args.stagger * 1e9) as u64))
    } else {
        Box::new(open(&args.files[0], &args.read, &progress)?)
    };
    if let Some(length_max) = args.split {
        source = Box::new(Split::new(source, length_max));
    }
    let failed = |e: std::io::Error| Failure::Other(format!("cannot write {}: {e}", args.output));
    // Beside the output, so that a failure leaves what was there before.
    let partial = (args.output != "-").then(|| PathBuf::from(format!("{}.partial", args.output)));
    let file: Box<dyn Write> = match &partial {
        Some(path) => Box::new(File::create(path).map_err(failed)?),
        None => Box::new(std::io::stdout()),
    };
    let result = copy(&mut *source, file, args);
    let result = if progress.should_stop() { result.and(Err(Failure::Interrupted)) } else { result };
    progress.finish();
    match (&result, &partial) {
        (Ok(()), Some(path)) => std::fs::rename(path, &args.output).map_err(failed)?,
        (Err(_), Some(path)) => drop(std::fs::remove_file(path)),
        _ => {}
    }
    result?;
    tell_notes(&args.files.join(", "), &source.notes());
    Ok(())
}

/// What the VMs of each merged trace are called: its file name without its ending, numbered where several are alike, so
/// that no two traces become one VM.
fn labels(files: &[String]) -> Vec<String> {
    let mut labels: Vec<String> = Vec::new();
    for file in files {
        let stem = Path::new(file).file_stem().map_or(file.to_owned(), |s| s.to_string_lossy().into_owned());
        let numbered = (2..).map(|number| format!("{stem}-{number}"));
        labels.extend(std::iter::once(stem.clone()).chain(numbered).find(|label| !labels.contains(label)));
    }
    labels
}

fn copy(source: &mut dyn Source, file: Box<dyn Write>, args: &ConvertArgs) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::Other(format!("cannot write {}: {e}", args.output));
    let mut output = Output::new(file, args).map_err(failed)?;
    let mut placer = args.onto_one_disk.map(Placer::new);
    let mut merged = Names::new();
    while let Some(mut record) = source.next_record()? {
        let Some(placer) = &mut placer else {
            output.record(&record, source.names()).map_err(failed)?;
            continue;
        };
        if record.kind != io_trace::Kind::Flush {
            record.address = placer.place(&record, source.names()).map_err(Failure::Input)?;
        }
        // The VMs keep their names; the one disk belongs to the first.
        for vm in &source.names().vms()[merged.vms().len()..] {
            merged.vm(&vm.name);
        }
        merged.disk(0, "merged", 0);
        record.disk = 0;
        output.record(&record, &merged).map_err(failed)?;
    }
    output.finish().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_traces_of_the_same_name_stay_apart() {
        let files = ["a/untar.amber", "b/untar.amber", "untar-2.amber", "-", "c/untar.amber"].map(str::to_owned);
        assert_eq!(labels(&files), ["untar", "untar-2", "untar-2-2", "-", "untar-3"]);
    }
}
