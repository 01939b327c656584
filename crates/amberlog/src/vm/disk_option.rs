//! The values of `--disk` and `--journal-disk`: `IMAGE[,key=value]...`, a comma in a path written twice.

use super::model::ModelChoice;
use command_line::remote_options::RemoteName;
use nvm_journal::medium::{DelayModel, RegionChoice};
use placement::{HotPages, ManyAppends, NvmOptions, PlacementKind};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use throttle::{Bound, Limits};

/// One `--disk IMAGE[,placement=P][,name=NAME][,readonly][,serial=S][,queues=N][,flush=honour|skip][,format=raw][,model=M][,log-writes=FILE][,hot-pages=RULE]`,
/// `[,durable-within=SECONDS|never]`,
/// `[,iops=N][,iops-burst=N][,bytes-per-second=N][,bytes-burst=N][,throttle-group=NAME]`, and with `placement=nvm=PATH` the options `nvm-...` of its region ([`nvm_option`]).
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
    /// Its region, for placement `nvm`.
    pub nvm: Option<NvmOptions>,
    /// The modelled disk whose time it takes.
    pub model: Option<ModelChoice>,
    /// The server of its journals, for placement `remote`.
    pub remote: Option<RemoteName>,
    /// It is raw, whatever it looks like.
    pub is_raw: bool,
    /// The file in which everything that is sent to the image is written down.
    pub log_writes: Option<PathBuf>,
    /// How old what its guests commit may be before it is durable on storage; nothing: however old.
    pub durable_within: Option<Duration>,
    /// Which blocks its VM's logs copy though they could be retained; for experiments.
    pub hot_pages: Option<HotPages>,
    /// Bounds on what the guest may ask of it.
    pub limits: Limits,
    /// The disks with this name share one bound.
    pub throttle_group: Option<String>,
}

/// One `--journal-disk IMAGE[,for=NAME][,name=NAME][,log-writes=FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalDiskOption {
    /// The image or block device.
    pub path: PathBuf,
    /// Its name, if given.
    pub name: Option<String>,
    /// The disk whose journal it is; found by UUID if not given.
    pub of: Option<String>,
    /// The modelled disk whose time it takes.
    pub model: Option<ModelChoice>,
    /// It is raw, whatever it looks like.
    pub is_raw: bool,
    /// The file in which everything that is sent to the image is written down.
    pub log_writes: Option<PathBuf>,
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

/// `format=raw`.
fn format(key: &str, value: Option<&str>) -> Result<bool, String> {
    match text(key, value)?.as_str() {
        "raw" => Ok(true),
        other => Err(format!(
            "format={other} is not served, only raw disks are: convert the image (qemu-img convert -f {other} -O raw IMAGE NEW)"
        )),
    }
}

/// `hot-pages=RULE`.
fn hot_pages(text: &str) -> Result<HotPages, String> {
    match text {
        "never" => Ok(HotPages::Never),
        "faulted" => Ok(HotPages::Faulted),
        "foreseen" => Ok(HotPages::Foreseen),
        "lone" => Ok(HotPages::Lone),
        other => Err(format!("hot-pages is never, faulted, foreseen or lone, not '{other}'")),
    }
}

fn number(key: &str, value: Option<&str>, least: u64) -> Result<u64, String> {
    let text = text(key, value)?;
    text.parse()
        .ok()
        .filter(|number| *number >= least)
        .ok_or_else(|| format!("{key} is a number from {least} on, not '{text}'"))
}

/// One of the options `nvm-...`, which say how a region is used. False when there is no such option.
fn nvm_option(options: &mut NvmOptions, key: &str, value: Option<&str>) -> Result<bool, String> {
    let model =
        |options: &NvmOptions| options.delay.unwrap_or(DelayModel { write_latency_ns: 0, bytes_per_second: u64::MAX });
    match key {
        "nvm-region" => {
            let mut choices = RegionChoice::several(&text(key, value)?)?;
            options.region = choices.remove(0);
            options.more_regions = choices;
        }
        "nvm-size" => options.create_bytes = number(key, value, 1)?.saturating_mul(1 << 20),
        "nvm-latency" => {
            options.delay = Some(DelayModel { write_latency_ns: number(key, value, 0)?, ..model(options) });
        }
        "nvm-bandwidth" => {
            let bytes_per_second = number(key, value, 1)?.saturating_mul(1_000_000);
            options.delay = Some(DelayModel { bytes_per_second, ..model(options) });
        }
        "nvm-checkpoint" => {
            options.checkpoint_interval = Duration::from_secs(number(key, value, 1)?);
        }
        "nvm-byte-level" => options.byte_level = switch(key, value)?,
        "nvm-delayed-checkpoint" => options.delayed_checkpoint = switch(key, value)?,
        "nvm-append-home" => {
            options.many_appends = if value == Some("auto") { ManyAppends::ByCost } else { ManyAppends::Home };
            if options.many_appends == ManyAppends::Home {
                options.append_home_bytes_min = number(key, value, 0)?.saturating_mul(1 << 10);
            }
        }
        "nvm-early-runs" => options.early_run_bytes = number(key, value, 0)?.saturating_mul(1 << 10),
        "nvm-pipelined" => options.pipelined = switch(key, value)?,
        "nvm-log-everything" => options.log_everything = switch(key, value)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// A number with K, M, G or T for powers of 1024, as qemu-img and truncate read them.
///
/// # Errors
/// When it is none, or too large.
pub fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        Some((at, 't' | 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is no size: a number, and K, M, G or T behind it"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too large"))
}

/// The most that `durable-within` can be, in seconds.
const WITHIN_MAX_S: u64 = 3600;

/// What `durable-within` says: nothing for `never`.
///
/// # Errors
/// When it is neither that nor a number of seconds.
pub fn durable_within(text: &str) -> Result<Option<Duration>, String> {
    if text == "never" {
        return Ok(None);
    }
    let seconds = text.parse().ok().filter(|seconds| *seconds <= WITHIN_MAX_S);
    let seconds = seconds.ok_or_else(|| {
        format!("durable-within is never, or a number of seconds from 0 to {WITHIN_MAX_S}, not '{text}'")
    })?;
    Ok(Some(Duration::from_secs(seconds)))
}

fn amount(key: &str, value: Option<&str>) -> Result<u64, String> {
    let text = text(key, value)?;
    let amount = size(&text).map_err(|error| format!("{key}: {error}"))?;
    if (1..=throttle::RATE_MAX).contains(&amount) {
        Ok(amount)
    } else {
        Err(format!("{key} is a number from 1 to 1024T, not {text}"))
    }
}

/// Bounds as they are given: a burst is a tenth of a second's, unless it is said.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bounds {
    /// A second.
    pub operations: Option<u64>,
    /// At once.
    pub operations_burst: Option<u64>,
    /// A second.
    pub bytes: Option<u64>,
    /// At once.
    pub bytes_burst: Option<u64>,
}

impl Bounds {
    /// What they come to.
    ///
    /// # Errors
    /// When there is a burst of nothing, or nothing is let through.
    pub fn limits(self) -> Result<Limits, String> {
        let bound = |key: &str, per_second: Option<u64>, burst: Option<u64>| match (per_second, burst) {
            (Some(0), _) => {
                Err(format!("with {key} 0 the disk would stand still for good; without it, it is not bounded"))
            }
            (Some(per_second), burst) => Ok(Some(Bound { per_second, burst: burst.unwrap_or(per_second / 10).max(1) })),
            (None, None) => Ok(None),
            (None, Some(_)) => {
                Err(format!("a burst says how far {key} may be passed for a moment, and {key} is not given"))
            }
        };
        let operations = bound("iops", self.operations, self.operations_burst)?;
        let bytes = bound("bytes-per-second", self.bytes, self.bytes_burst)?;
        Ok(Limits { operations, bytes })
    }
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
            nvm: None,
            model: None,
            remote: None,
            is_raw: false,
            log_writes: None,
            durable_within: None,
            hot_pages: None,
            limits: Limits::default(),
            throttle_group: None,
        };
        let mut bounds = Bounds::default();
        let mut nvm_options = NvmOptions::new("");
        let mut nvm_key = None;
        for part in parts {
            let (key, value) = part.split_once('=').map_or((part.as_str(), None), |(key, value)| (key, Some(value)));
            match key {
                "placement" => match text(key, value)?.split_once('=') {
                    Some(("nvm", path)) if !path.is_empty() => {
                        disk.placement = PlacementKind::Nvm;
                        nvm_options.path = PathBuf::from(path);
                    }
                    Some(("remote", server)) => {
                        disk.placement = PlacementKind::Remote;
                        disk.remote = Some(server.parse()?);
                    }
                    Some((name, _)) => {
                        return Err(format!(
                            "placement={name}=... has no meaning; nvm=PATH and remote=HOST:PORT/NAME have"
                        ));
                    }
                    None => disk.placement = text(key, value)?.parse()?,
                },
                "name" => disk.name = Some(text(key, value)?),
                "serial" => {
                    let serial = text(key, value)?;
                    if serial.len() > 20 {
                        return Err(format!("the serial number '{serial}' is longer than 20 bytes"));
                    }
                    disk.serial = Some(serial);
                }
                "model" => disk.model = Some(text(key, value)?.parse()?),
                "format" => disk.is_raw = format(key, value)?,
                "log-writes" => disk.log_writes = Some(PathBuf::from(text(key, value)?)),
                "durable-within" => disk.durable_within = durable_within(&text(key, value)?)?,
                "hot-pages" => disk.hot_pages = Some(hot_pages(&text(key, value)?)?),
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
                "iops" => bounds.operations = Some(amount(key, value)?),
                "iops-burst" => bounds.operations_burst = Some(amount(key, value)?),
                "bytes-per-second" => bounds.bytes = Some(amount(key, value)?),
                "bytes-burst" => bounds.bytes_burst = Some(amount(key, value)?),
                "throttle-group" => disk.throttle_group = Some(text(key, value)?),
                other if nvm_option(&mut nvm_options, other, value)? => nvm_key = Some(other.to_owned()),
                other => {
                    return Err(format!(
                        "'{other}' is no option of a disk; there are placement, durable-within, name, serial, readonly, flush, queues, format, model, \
                         iops, iops-burst, bytes-per-second, bytes-burst, throttle-group, \
                         log-writes, hot-pages, and those of a region of NVM (nvm-region, nvm-size, nvm-latency, nvm-bandwidth, nvm-checkpoint, \
                         nvm-append-home, nvm-pipelined, nvm-early-runs, nvm-byte-level, nvm-delayed-checkpoint, nvm-log-everything)"
                    ));
                }
            }
        }
        disk.limits = bounds.limits()?;
        if disk.throttle_group.is_some() && disk.limits.is_empty() {
            return Err(
                "throttle-group says which disks share a bound, and there is none (iops, bytes-per-second)".to_owned()
            );
        }
        if disk.durable_within.is_some() && (disk.read_only || !disk.placement.is_held()) {
            return Err(format!(
                "durable-within is for disks that are written to, with placement retain or copy, and this one has placement {}{}",
                disk.placement.name(),
                if disk.read_only { " and is only read" } else { "" }
            ));
        }
        if disk.placement != PlacementKind::Remote {
            disk.remote = None;
        } else if disk.read_only {
            return Err("a disk that is only read has no use for placement=remote".to_owned());
        }
        if disk.placement == PlacementKind::Nvm {
            if disk.read_only {
                return Err("a disk that is only read has no use for placement=nvm".to_owned());
            }
            disk.nvm = Some(nvm_options);
        } else if let Some(key) = nvm_key {
            return Err(format!("{key} says how a region of NVM is used, and the placement is not nvm=PATH"));
        }
        Ok(disk)
    }
}

impl FromStr for JournalDiskOption {
    type Err = String;

    fn from_str(argument: &str) -> Result<Self, String> {
        let mut parts = split(argument).into_iter();
        let path = parts.next().filter(|path| !path.is_empty()).ok_or("an image or block device is missing")?;
        let mut disk = JournalDiskOption {
            path: PathBuf::from(path),
            name: None,
            of: None,
            model: None,
            is_raw: false,
            log_writes: None,
        };
        for part in parts {
            let (key, value) = part.split_once('=').map_or((part.as_str(), None), |(key, value)| (key, Some(value)));
            match key {
                "for" => disk.of = Some(text(key, value)?),
                "model" => disk.model = Some(text(key, value)?.parse()?),
                "name" => disk.name = Some(text(key, value)?),
                "format" => disk.is_raw = format(key, value)?,
                "log-writes" => disk.log_writes = Some(PathBuf::from(text(key, value)?)),
                other => {
                    return Err(format!(
                        "'{other}' is no option of a journal disk; there are for, name, format, log-writes and model"
                    ));
                }
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
        let disk: DiskOption =
            "/a,,b.img,placement=copy,name=x,readonly,flush=honour,queues=4,model=nvme,format=raw,log-writes=/l,,og,hot-pages=faulted"
                .parse()
                .expect("valid");
        assert_eq!(disk.path, PathBuf::from("/a,b.img"));
        assert_eq!(disk.placement, PlacementKind::Copy);
        assert_eq!(disk.name.as_deref(), Some("x"));
        assert!(disk.read_only && disk.honour_flush && disk.is_raw);
        assert_eq!(disk.queues, 4);
        assert_eq!(disk.log_writes, Some(PathBuf::from("/l,og")));
        assert_eq!(disk.model, Some(ModelChoice::Own(disk_model_client::Profile::Nvme)));
        let plain: DiskOption = "a.img".parse().expect("valid");
        assert_eq!((disk.hot_pages, plain.hot_pages), (Some(HotPages::Faulted), None));
        assert_eq!(plain.log_writes, None);
        assert_eq!((plain.placement, plain.model, plain.is_raw), (PlacementKind::Retain, None, false));
        let shared: DiskOption = "a.img,model=./socket".parse().expect("valid");
        assert_eq!(shared.model, Some(ModelChoice::Shared("./socket".into())));
        let nvm: DiskOption =
            "a,placement=nvm=/dev/shm/r,nvm-region=1/2,nvm-latency=300,nvm-bandwidth=1000,nvm-byte-level=off,nvm-pipelined=on"
                .parse()
                .expect("valid");
        let options = nvm.nvm.expect("a region");
        assert_eq!((nvm.placement, options.path), (PlacementKind::Nvm, PathBuf::from("/dev/shm/r")));
        assert_eq!(options.delay, Some(DelayModel::PAPER));
        assert_eq!(options.region, RegionChoice { index: 1, count: 2 });
        assert!(!options.byte_level && options.delayed_checkpoint && !options.log_everything && options.pipelined);
        assert!(!NvmOptions::new("r").pipelined, "nobody has it unasked");
        let remote: DiskOption = "a,placement=remote=host:7070/db".parse().expect("valid");
        let server = remote.remote.expect("a server");
        assert_eq!((remote.placement, server.address.as_str()), (PlacementKind::Remote, "host:7070"));
        assert_eq!(server.name.as_deref(), Some("db"));
        let journal: JournalDiskOption = "j.img,for=x".parse().expect("valid");
        assert_eq!(journal.of.as_deref(), Some("x"));
    }

    #[test]
    fn bounds_are_read_with_their_bursts() {
        let disk: DiskOption =
            "a,iops=500,bytes-per-second=10M,bytes-burst=64M,throttle-group=slow".parse().expect("valid");
        assert_eq!(disk.limits.operations, Some(Bound { per_second: 500, burst: 50 }));
        assert_eq!(disk.limits.bytes, Some(Bound { per_second: 10 << 20, burst: 64 << 20 }));
        assert_eq!(disk.throttle_group.as_deref(), Some("slow"));
        assert!("a.img".parse::<DiskOption>().expect("valid").limits.is_empty());
        assert_eq!((size("3G"), size("512"), size("1t")), (Ok(3 << 30), Ok(512), Ok(1 << 40)));
        assert!(size("").is_err() && size("G").is_err() && size("99999999999T").is_err() && size("1.5G").is_err());
    }

    #[test]
    fn nothing_a_second_is_no_bound() {
        for bounds in
            [Bounds { operations: Some(0), ..Bounds::default() }, Bounds { bytes: Some(0), ..Bounds::default() }]
        {
            let refused = bounds.limits();
            assert!(refused.as_ref().is_err_and(|said| said.contains("stand still for good")), "{refused:?}");
        }
        assert!(Bounds { operations: Some(1), bytes: Some(1), ..Bounds::default() }.limits().is_ok());
    }

    #[test]
    fn nonsense_is_refused_with_a_sentence() {
        for argument in [
            "",
            "a,placement=tape",
            "a,size=3",
            "a,queues=0",
            "a,readonly=maybe",
            "a,format",
            "a,format=qcow2",
            "a,iops=0",
            "a,bytes-per-second=0",
            "a,iops=fast",
            "a,iops-burst=7",
            "a,bytes-burst=7,iops=7",
            "a,throttle-group=x",
            "a,throttle-group=,iops=7",
            "a,name=",
            "a,model=floppy",
            "a,placement=nvm",
            "a,placement=nvm=",
            "a,placement=tape=x",
            "a,placement=nvm=x,nvm-region=2/2",
            "a,nvm-size=3",
            "a,placement=nvm=x,readonly",
            "a,placement=remote=host",
            "a,placement=remote=:70/x",
            "a,placement=remote=host:70/a b",
            "a,placement=remote=host:70/x,readonly",
        ] {
            assert!(argument.parse::<DiskOption>().is_err(), "{argument}");
        }
    }
}
