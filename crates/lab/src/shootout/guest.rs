//! A contender's guest: its image on the medium, the words that serve it, and a load measured in it.

use super::contender::{Contender, FileSystem, Served};
use super::kinds::Load;
use super::{Measured, OPERATIONS, ShootOut};
use crate::counters::{flattened, is_sum};
use crate::error::{Error, FileContext, Result};
use crate::journal_server::JournalServer;
use crate::load::is_idle;
use crate::machine::process_tree_cpu_seconds;
use crate::rig::{NVM_BANDWIDTH_MB, NVM_LATENCY_NS};
use crate::samples::{counted_so_far, levels_since, marks_of_the_load};
use guest_kit::image::{self, ExtRecipe, Journal};
use guest_kit::scratch::{self, Scratch, Use};
use guest_kit::{Accelerator, Drive, Guest, GuestSpec, Reported, program};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use test_storage::TestStorage;

/// The image; its journal; and as much of fast memory as anybody gets: an external journal, a region of NVM.
pub(super) const IMAGE_MIB: u32 = 1024;
pub(super) const JOURNAL_MIB: u32 = 64;
pub(super) const GUEST_MIB: u32 = 384;
const BLOCK_BYTES: u32 = 4096;
/// The guest's only device of the device mapper, by the name that the kernel gives it: no udev is there to give it another.
const CACHED: &str = "/dev/dm-0";
/// Of each phase: a boot, a preparation, a load, an end. The slowest load of the slowest contender takes a twelfth of it on a machine that is slow.
const LIMIT: Duration = Duration::from_secs(1200);
/// An emulated guest may take so many times as long.
const EMULATED: u32 = 4;

/// What a phase of a contender's guest may take.
pub(super) fn limit(contender: &Contender) -> Duration {
    match contender.platform.accelerator {
        Accelerator::Kvm => LIMIT,
        Accelerator::Tcg => LIMIT * EMULATED,
    }
}

/// All that a contender's guest stands on, from boot to boot.
pub(super) struct Stand {
    /// Where the backing file is.
    pub(super) directory: Scratch,
    /// The host's memory: areas, external journals.
    pub(super) memory: Scratch,
    /// What stands for persistent memory; on the host's memory too, but it outlives a loss of power.
    pub(super) persistent: Scratch,
    pub(super) server: Option<JournalServer>,
    pub(super) storage: Option<TestStorage>,
    /// More words of the disk's option, where what is to be seen would not happen by the contender's own.
    pub(super) more: &'static str,
    flush_us: u64,
}

impl Stand {
    /// A fresh file system on the medium.
    pub(super) fn new(options: &ShootOut, contender: &Contender) -> Result<Self> {
        let parent = options.images.clone().unwrap_or_else(std::env::temp_dir);
        let directory = Scratch::new_in(&parent, Use::Lab)?;
        let fast = || Scratch::new_in(scratch::memory(), Use::Lab);
        let mut stand = Stand {
            memory: fast()?,
            persistent: fast()?,
            server: None,
            storage: None,
            more: "",
            flush_us: options.flush_us,
            directory,
        };
        if matches!(contender.served.placement(), Some(("remote", _))) {
            stand.server = Some(JournalServer::start(&stand.directory.path().join("journals"))?);
        }
        stand.make(contender)?;
        stand.mount_medium()?;
        Ok(stand)
    }

    pub(super) fn backing(&self) -> PathBuf {
        self.directory.path().join("disk.img")
    }

    pub(super) fn journal(&self) -> PathBuf {
        self.memory.path().join("journal.img")
    }

    /// The medium anew: nothing of it is cached.
    pub(super) fn mount_medium(&mut self) -> Result<()> {
        self.storage = None;
        let backing = self.backing();
        let storage = TestStorage::new(&backing).at("mount", &backing)?;
        storage.set_flush_us(self.flush_us);
        self.storage = Some(storage);
        Ok(())
    }

    fn make(&self, contender: &Contender) -> Result<()> {
        let image = self.backing();
        match contender.file_system {
            FileSystem::Ext4 { features } => {
                ExtRecipe::ext4(IMAGE_MIB, JOURNAL_MIB).make(&image)?;
                if !features.is_empty() {
                    program::run(program::command("tune2fs")?.args(["-O", features]).arg(&image), &[0])?;
                }
            }
            FileSystem::Ext4TmpfsJournal => {
                image::journal_device(&self.journal(), JOURNAL_MIB, BLOCK_BYTES)?;
                let mut recipe = ExtRecipe::ext4(IMAGE_MIB, JOURNAL_MIB);
                recipe.journal = Journal::External(self.journal());
                recipe.make(&image)?;
            }
            FileSystem::Ext4Writecache => {
                self.make_cache()?;
                ExtRecipe::ext4(IMAGE_MIB, JOURNAL_MIB).make(&image)?;
            }
            FileSystem::Other(kind) => {
                image::create_sparse(&image, u64::from(IMAGE_MIB) << 20)?;
                program::run(program::command(&format!("mkfs.{kind}"))?.arg("-q").arg(&image), &[0])?;
            }
        }
        let file = std::fs::File::open(&image).at("open", &image)?;
        file.sync_all().at("make durable", &image)
    }

    /// What dm-writecache takes for a cache that nobody has used yet.
    pub(super) fn make_cache(&self) -> Result<()> {
        Ok(image::create_sparse(&self.journal(), u64::from(JOURNAL_MIB) << 20)?)
    }

    /// A guest of a contender on this stand, with a script.
    pub(super) fn spec(&self, contender: &Contender, name: &str, script: String) -> Result<GuestSpec> {
        let image = self
            .storage
            .as_ref()
            .map(TestStorage::image)
            .ok_or_else(|| Error::Told("the medium is not mounted".to_owned()))?;
        let mut spec = GuestSpec::new(format!("{}, {name}", contender.name), script);
        spec.memory_mib = GUEST_MIB;
        spec.boot_timeout = limit(contender);
        if contender.is_stock {
            // It has modules, which is how a guest gets the stock kernel.
            spec.modules.push(match contender.file_system {
                FileSystem::Other(kind) => kind.to_owned(),
                FileSystem::Ext4Writecache => "dm-writecache".to_owned(),
                _ => "brd rd_nr=1 rd_size=64".to_owned(),
            });
        }
        if contender.file_system == FileSystem::Ext4Writecache {
            spec.programs.push("dmsetup");
        }
        Ok(match contender.served {
            Served::Qemu(cache) => spec.drives(vec![Drive::new(image, cache)]),
            Served::QemuIothread(cache) => {
                let mut drive = Drive::new(image, cache);
                drive.has_iothread = true;
                spec.drives(vec![drive])
            }
            Served::QemuCached(cache) => spec.drives(vec![Drive::new(self.backing(), cache)]),
            Served::Amberlog(placement) => {
                let mut disk: OsString = image.into();
                let (name, options) = contender.served.placement().unwrap_or((placement, ""));
                disk.push(format!(",name=data,placement={name}"));
                if name == "nvm" {
                    disk.push("=");
                    disk.push(self.persistent.path().join("region"));
                    // As slow as the memory of NJS, on a medium that is as slow as it is.
                    disk.push(format!(
                        ",nvm-size={JOURNAL_MIB},nvm-latency={NVM_LATENCY_NS},nvm-bandwidth={NVM_BANDWIDTH_MB}"
                    ));
                }
                let mut words: Vec<OsString> = vec![program::workspace_binary("amberlog")?.into(), "run".into()];
                if let Some(server) = &self.server {
                    disk.push(format!("={}/data", server.address()));
                    words.push("--remote-insecure".into());
                }
                disk.push(options);
                disk.push(self.more);
                words.extend(["--disk".into(), disk]);
                if contender.file_system.has_memory_disk() {
                    let mut memory = self.journal().into_os_string();
                    let (option, rest) = match contender.file_system {
                        FileSystem::Ext4TmpfsJournal => ("--journal-disk", ",for=data,name=journal"),
                        _ => ("--disk", ",placement=storage,name=cache"),
                    };
                    memory.push(rest);
                    words.extend([option.into(), memory]);
                }
                words.extend(["--shm".into(), self.memory.path().into(), "--report".into(), self.report().into()]);
                words.extend(["--samples".into(), self.samples().into()]);
                spec.wrapper(words)
            }
        })
    }

    pub(super) fn report(&self) -> PathBuf {
        self.directory.path().join("report.json")
    }

    pub(super) fn samples(&self) -> PathBuf {
        self.directory.path().join("samples.jsonl")
    }

    /// Shell lines that mount the file system.
    pub(super) fn mount(contender: &Contender) -> String {
        let kind = match contender.file_system {
            FileSystem::Other(kind) => kind,
            _ => "ext4",
        };
        let device = match contender.file_system {
            FileSystem::Ext4Writecache => CACHED,
            _ => "/dev/vda",
        };
        let [attach, _] = Self::cache_lines(contender);
        format!("{attach}mount -t {kind} -o {} {device} /mnt || fail mount", contender.mount)
    }

    /// The same after a death, for whom nobody could look after before.
    pub(super) fn mount_as_a_boot_does(contender: &Contender) -> String {
        let [attach, _] = Self::cache_lines(contender);
        let mount = Self::mount(contender);
        if attach.is_empty() {
            return mount;
        }
        // What it repairs is an error that it mended.
        let check = format!("e2fsck -fy {CACHED} >/dev/null || [ $? -le 2 ] || fail e2fsck");
        mount.replacen(&attach, &format!("{attach}{check}\n"), 1)
    }

    /// Shell lines that bring home what the file system has, and unmount it.
    pub(super) fn unmount(contender: &Contender) -> String {
        let [_, detach] = Self::cache_lines(contender);
        format!("umount /mnt || fail umount{detach}")
    }

    /// Where the contender has dm-writecache: lines before its mount, and behind its unmount.
    fn cache_lines(contender: &Contender) -> [String; 2] {
        if contender.file_system != FileSystem::Ext4Writecache {
            return Default::default();
        }
        // Nobody of udev is in the guest.
        let dmsetup = |words: &str| format!("dmsetup --noudevrules --noudevsync {words} || fail dmsetup");
        let table = "0 $(cat /sys/block/vda/size) writecache s /dev/vda /dev/vdb 4096 0";
        let attach = dmsetup(&format!("create cached --table \"{table}\""));
        // So it writes back all that it has.
        let flush = dmsetup("message cached 0 flush");
        [format!("{attach}\n"), format!("\n{flush}\n{}", dmsetup("remove cached"))]
    }

    /// Bytes to each kind of fast memory, and over the network, by amberlog's report, without what it had counted `before` the load; and what an
    /// external journal takes. Who has no amberlog has no report, and nobody knows what of the host's memory it takes.
    fn media(
        &self,
        contender: &Contender,
        before: &BTreeMap<String, f64>,
        levels: &BTreeMap<String, f64>,
    ) -> Result<BTreeMap<String, f64>> {
        if !matches!(contender.served, Served::Amberlog(_)) {
            return Ok(BTreeMap::new());
        }
        let path = self.report();
        let text = std::fs::read(&path).at("read", &path)?;
        let report: Value = serde_json::from_slice(&text)
            .map_err(|error| Error::Told(format!("amberlog's report cannot be read: {error}")))?;
        if !report["disks"][0].is_object() {
            return Err(Error::Told("amberlog's report has no disk".to_owned()));
        }
        be_in_force(&report["disks"][0], "report")?;
        let external = std::fs::metadata(self.journal()).map_or(0.0, |file| file.blocks() as f64 * 512.0);
        Ok(media_of_the_load(flattened(&report), before, levels, external))
    }

    /// The same of this moment: of the last sample, where there is one.
    pub(super) fn is_in_force_now(&self, contender: &Contender) -> Result<()> {
        let text = std::fs::read_to_string(self.samples()).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        match whole.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok()) {
            Some(sample) => be_in_force(&sample["disks"][0], "samples"),
            None if matches!(contender.served, Served::Amberlog(_)) => {
                Err(Error::Told("amberlog has written no samples".to_owned()))
            }
            None => Ok(()),
        }
    }

    /// How far the file of samples has come.
    pub(super) fn sampled_bytes(&self) -> u64 {
        std::fs::metadata(self.samples()).map_or(0, |file| file.len())
    }

    /// An error where a contender was not what its name says at a moment that amberlog sampled since so many seconds, within so many bytes of samples.
    /// Of those that amberlog does not serve nothing is known.
    pub(super) fn was_in_force(&self, contender: &Contender, since_seconds: f64, sampled_bytes: u64) -> Result<()> {
        if !matches!(contender.served, Served::Amberlog(_)) {
            return Ok(());
        }
        let path = self.samples();
        let text = std::fs::read_to_string(&path).at("read", &path)?;
        let text = text.get(..usize::try_from(sampled_bytes).unwrap_or(usize::MAX)).unwrap_or(&text);
        // What is behind the last end of a line was still being written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let samples = whole.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        for sample in samples.filter(|sample| sample["seconds"].as_f64().is_some_and(|at| at >= since_seconds)) {
            be_in_force(&sample["disks"][0], "samples")?;
        }
        Ok(())
    }
}

/// An error where amberlog says of a disk that it is not served as it was asked for: what was measured is not what the contender's name says.
fn be_in_force(disk: &Value, whose: &str) -> Result<()> {
    let remote = |name: &str| disk["remote"][name].as_u64().unwrap_or(0);
    if remote("fall_backs") > 0 {
        return Err(Error::Told(format!("amberlog's {whose} of the disk: its journal server was lost for a time")));
    }
    // Where nothing is to be held, it is no news that nothing is: XFS has no journal that could be.
    let placement = Some(&disk["placement_reason"]).filter(|_| disk["placement"] != "storage");
    let said = [Some(&disk["fault"]), placement, Some(&disk["durability"]["reason"])];
    match said.into_iter().flatten().filter_map(Value::as_str).find(|reason| !is_idle(disk, reason)) {
        Some(reason) => Err(Error::Told(format!("amberlog's {whose} of the disk: {reason}"))),
        None => Ok(()),
    }
}

/// What a load took of fast memory and of the network, of all that amberlog's report has.
fn media_of_the_load(
    mut fields: BTreeMap<String, f64>,
    before: &BTreeMap<String, f64>,
    levels: &BTreeMap<String, f64>,
    external: f64,
) -> BTreeMap<String, f64> {
    // Tables that preparation left larger than the load needed are memory that is taken all the same.
    let tables = fields.get("area_bytes_max").copied().unwrap_or(0.0);
    marks_of_the_load(&mut fields, before, levels);
    for (name, value) in fields.iter_mut().filter(|(name, _)| is_sum(name)) {
        *value -= before.get(name).copied().unwrap_or(0.0);
    }
    let number = |name: &str| fields.get(name).copied().unwrap_or(0.0);
    let mut media = BTreeMap::from([
        ("memory_bytes".to_owned(), external + number("pool_bytes_max") + tables),
        ("nvm_bytes".to_owned(), number("nvm_bytes_to_nvm")),
        ("network_bytes".to_owned(), number("remote_wire_bytes")),
    ]);
    // Where committed blocks are held.
    let [committed, copied, faults] = ["blocks_committed", "pages_copied", "cow_faults"].map(number);
    if committed > 0.0 {
        // Of those that were written and not committed some may have been copied, too.
        media.insert("copied_percent".to_owned(), (copied / committed * 100.0).min(100.0));
        media.insert("write_faults".to_owned(), faults);
    }
    media
}

/// What a load's guest does: prepares, waits to be told, runs the load, brings everything home, and tells its times.
fn script(quick: bool, rounds: u32, contender: &Contender, load: Load) -> String {
    let (prepare, work) = load.lines(quick, rounds);
    // What is durable by age owes something of its preparation for so long.
    let wait = contender.served.durable_within().map_or_else(String::new, |age| format!("sleep {}", age + 1));
    // A journal's log is open from its first commit on. Under a load that changes nothing that is journaled that would come when the kernel's timer
    // does, in the midst of it, and until then a held journal is none.
    format!(
        "set -e
         {mount}
         mkdir -p /mnt/work
         {prepare}
         {unmount}
         {mount}
         touch /mnt/begun
         sync
         echo 3 >/proc/sys/vm/drop_caches
         {wait}
         exec 5</dev/ttyS1
         mark ready
         read -r go <&5
         read -r begin rest </proc/uptime
         {work} >/tmp/result
         read -r loaded rest </proc/uptime
         mark loaded
         read -r go <&5
         {unmount}
         read -r ended rest </proc/uptime
         mark home
         read -r go <&5
         {check}
         mark times $begin $loaded $ended
         grep -e phase= /tmp/result | sed 's/^/mark result /' >/dev/ttyS1 || true",
        mount = Stand::mount(contender),
        unmount = Stand::unmount(contender),
        check = load.check(),
    )
}

/// Runs a load to its end.
pub(super) fn measure(options: &ShootOut, contender: &Contender, load: Load, rounds: u32) -> Result<Measured> {
    let stand = Stand::new(options, contender)?;
    let mut spec = stand.spec(contender, load.name(), script(options.quick, rounds, contender, load))?;
    spec.programs.extend(load.programs());
    let (started, limit) = (Instant::now(), limit(contender));
    let mut guest = Guest::start(spec)?;
    guest.wait_mark("ready", limit)?;
    let before = match contender.served {
        Served::Amberlog(_) => counted_so_far(&stand.samples(), &contender.name)?,
        Served::Qemu(_) | Served::QemuIothread(_) | Served::QemuCached(_) => BTreeMap::new(),
    };
    let begun = Instant::now();
    let storage = stand.storage.as_ref().ok_or_else(|| Error::Told("the medium is not mounted".to_owned()))?;
    let (bytes, flushes) = (storage.bytes_written(), storage.flushes());
    // A journal server is a host's work, too, be it another host's. The VMM must still run: its time can be read.
    let process = guest.process_id();
    let cpu_now = || (process_tree_cpu_seconds(process), stand.server.as_ref().map_or(0.0, JournalServer::cpu_seconds));
    let cpu_before = cpu_now();
    guest.tell("go")?;
    guest.wait_mark("loaded", limit * rounds)?;
    let cpu_loaded = cpu_now();
    // What amberlog says of itself from here on is of the end.
    let sampled_bytes = stand.sampled_bytes();
    guest.tell("go")?;
    guest.wait_mark("home", limit)?;
    let cpu_home = cpu_now();
    guest.tell("go")?;
    let code = guest.wait_exit_code(limit)?;
    if code != 0 {
        return Err(guest.failure(&format!("its script ended with {code}")).into());
    }
    let status = guest.wait_end(limit)?;
    if !status.success() {
        return Err(guest.failure(&format!("QEMU or amberlog ended with {status}")).into());
    }
    stand.was_in_force(contender, begun.saturating_duration_since(started).as_secs_f64(), sampled_bytes)?;
    let mut measured = told(&guest.final_report(), load)?;
    let operations = load.operations(options.quick, rounds);
    measured.fields.extend(operations.map(|count| (OPERATIONS.to_owned(), count as f64)));
    let (until_loaded, server) = (cpu_loaded.0 - cpu_before.0, cpu_loaded.1 - cpu_before.1);
    let all = (cpu_home.0 - cpu_before.0) + (cpu_home.1 - cpu_before.1);
    measured.fields.extend([
        ("host_cpu_seconds".to_owned(), until_loaded + server),
        ("host_cpu_seconds_until_home".to_owned(), all),
    ]);
    if contender.served.is_on_medium() {
        measured.fields.extend([
            ("storage_bytes".to_owned(), (storage.bytes_written() - bytes) as f64),
            ("storage_flushes".to_owned(), (storage.flushes() - flushes) as f64),
        ]);
    }
    measured.fields.extend(stand.server.is_some().then(|| ("server_cpu_seconds".to_owned(), server)));
    measured.fields.extend(stand.media(contender, &before, &levels_since(&stand.samples(), started, begun))?);
    Ok(measured)
}

fn told(reported: &Reported, load: Load) -> Result<Measured> {
    let find = |name: &str| reported.marks.iter().find_map(|mark| mark.strip_prefix(name));
    let times: Vec<f64> = find("times ").unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect();
    let [begin, loaded, ended] = times[..] else {
        return Err(Error::Told("a guest did not tell its times".to_owned()));
    };
    let result = find("result ").ok_or_else(|| Error::Told(format!("{} told no result", load.name())))?;
    let mut measured = Measured::default();
    measured.fields.insert("seconds".to_owned(), loaded - begin);
    measured.fields.insert("seconds_until_home".to_owned(), ended - begin);
    for (name, value) in result.split_whitespace().filter_map(|word| word.split_once('=')) {
        if name == format!("{}_distribution_us", load.operation()) {
            let pairs = value.split(',').filter_map(|pair| pair.split_once(':'));
            measured.distribution =
                pairs.filter_map(|(share, us)| Some((share.parse().ok()?, us.parse().ok()?))).collect();
        } else if let (Some(rest), Ok(value)) = (name.strip_prefix(&format!("{}_", load.operation())), value.parse()) {
            measured.fields.insert(rest.to_owned(), value);
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shootout::contender;

    /// A load of 98 s on a slow machine had 300.
    #[test]
    fn a_phase_has_many_times_what_it_takes() {
        let contender = |accelerator| contender::all_for_tests(accelerator).remove(0);
        assert_eq!(limit(&contender(Accelerator::Kvm)), Duration::from_secs(1200));
        assert_eq!(limit(&contender(Accelerator::Tcg)), Duration::from_secs(4800));
    }

    /// With data=ordered nothing of `fsync` is journaled: its log was not open for the first five seconds, half of the run.
    #[test]
    fn every_log_is_open_before_the_clock_begins() {
        for contender in contender::all_for_tests(Accelerator::Kvm) {
            for load in Load::ALL {
                let script = script(true, 1, &contender, load);
                let (before, after) = script.split_once("mark ready").unwrap();
                let last_mount = before.rsplit("fail mount").next().unwrap();
                let commit = last_mount.find("touch /mnt/begun\n").unwrap();
                assert!(last_mount[commit..].trim_start().contains("sync\n"), "{script}");
                assert!(after.contains("read -r begin"), "{script}");
            }
        }
    }

    #[test]
    fn a_disk_that_is_not_served_as_it_was_asked_for_is_an_error() {
        let of = |text: &str| be_in_force(&serde_json::from_str(text).unwrap(), "report");
        assert!(of(r#"{"fault": null, "placement_reason": null, "durability": {"reason": null}}"#).is_ok());
        assert!(of(r#"{"durability": null}"#).is_ok(), "it is not asked for");
        assert!(of(r#"{"placement": "storage", "placement_reason": "no journal was found"}"#).is_ok());
        assert!(of(r#"{"placement": "retain", "placement_reason": "no journal was found"}"#).is_err());
        let idle = r#""placement_reason": "nothing of the journal is on its server at", "remote": {"connects": 1, "fall_backs""#;
        assert!(of(&format!("{{{idle}: 0}}}}")).is_ok() && of(&format!("{{{idle}: 1}}}}")).is_err());
        assert!(of(r#"{"placement_reason": "x", "remote": {"connects": 1, "fall_backs": 0}}"#).is_err());
        for not in
            [r#"{"fault": "x"}"#, r#"{"placement_reason": "x"}"#, r#"{"durability": {"within_s": 5, "reason": "x"}}"#]
        {
            assert!(of(not).is_err(), "{not}");
        }
    }

    /// A referee found what was made before a load in its bytes to NVM and over the network.
    #[test]
    fn what_was_made_before_a_load_is_in_none_of_its_media() {
        let of = |values: &[(&str, f64)]| -> BTreeMap<String, f64> {
            values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        };
        let before = of(&[
            ("nvm_bytes_to_nvm", 64e6),
            ("remote_wire_bytes", 70e6),
            ("blocks_committed", 1000.0),
            ("pool_bytes_max", 9e6),
            ("area_bytes_max", 3e5),
        ]);
        let report = of(&[
            ("nvm_bytes_to_nvm", 65e6),
            ("remote_wire_bytes", 72e6),
            ("blocks_committed", 1020.0),
            ("pages_copied", 10.0),
            ("pool_bytes_max", 9e6),
            ("area_bytes_max", 3e5),
        ]);
        let media = media_of_the_load(report, &before, &of(&[("pool_bytes_now", 2e6)]), 5e6);
        assert_eq!((media["nvm_bytes"], media["network_bytes"], media["memory_bytes"]), (1e6, 2e6, 7.3e6));
        assert_eq!(media["copied_percent"], 50.0);
    }
}
