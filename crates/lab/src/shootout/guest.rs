//! A contender's guest: its image on the medium, the words that serve it, and a load measured in it.

use super::contender::{Contender, FileSystem, Served};
use super::kinds::Load;
use super::{Conditions, Measured, ShootOut};
use crate::error::{Error, FileContext, Result};
use crate::journal_server::JournalServer;
use crate::machine::process_tree_cpu_seconds;
use guest_kit::image::{self, ExtRecipe, Journal};
use guest_kit::{Drive, Guest, GuestSpec, Reported, program};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use test_storage::TestStorage;

/// The image; its journal; and as much of fast memory as anybody gets: an external journal, a region of NVM.
const IMAGE_MIB: u32 = 1024;
const JOURNAL_MIB: u32 = 64;
const GUEST_MIB: u32 = 384;
const BLOCK_BYTES: u32 = 4096;
pub(super) const LIMIT: Duration = Duration::from_secs(1800);

/// All that a contender's guest stands on, from boot to boot.
pub(super) struct Stand {
    /// Where the backing file is.
    pub(super) directory: TempDir,
    /// The host's memory: areas, external journals.
    pub(super) memory: TempDir,
    /// What stands for persistent memory; on the host's memory too, but it outlives a loss of power.
    pub(super) persistent: TempDir,
    pub(super) server: Option<JournalServer>,
    pub(super) storage: Option<TestStorage>,
    flush_us: u64,
}

impl Stand {
    /// A fresh file system on the medium.
    pub(super) fn new(options: &ShootOut, contender: &Contender) -> Result<Self> {
        let parent = options.images.clone().unwrap_or_else(std::env::temp_dir);
        let directory =
            tempfile::Builder::new().prefix("amberlog-shoot-").tempdir_in(&parent).at("write in", &parent)?;
        let shm = Path::new("/dev/shm");
        let fast = || tempfile::Builder::new().prefix("amberlog-shoot-").tempdir_in(shm).at("write in", shm);
        let mut stand = Stand {
            memory: fast()?,
            persistent: fast()?,
            server: None,
            storage: None,
            flush_us: options.flush_us,
            directory,
        };
        if contender.served == Served::Amberlog("remote") {
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
            FileSystem::Other(kind) => {
                image::create_sparse(&image, u64::from(IMAGE_MIB) << 20)?;
                program::run(program::command(&format!("mkfs.{kind}"))?.arg("-q").arg(&image), &[0])?;
            }
        }
        let file = std::fs::File::open(&image).at("open", &image)?;
        file.sync_all().at("make durable", &image)
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
        spec.boot_timeout = Duration::from_secs(300);
        if contender.is_stock {
            // It has modules, which is how a guest gets the stock kernel.
            spec.modules.push(match contender.file_system {
                FileSystem::Other(kind) => kind.to_owned(),
                _ => "brd rd_nr=1 rd_size=64".to_owned(),
            });
        }
        let has_journal_disk = contender.file_system == FileSystem::Ext4TmpfsJournal;
        Ok(match contender.served {
            Served::Qemu(cache) => spec.drives(vec![Drive::new(image, cache)]),
            Served::Amberlog(placement) => {
                let mut disk: OsString = image.into();
                disk.push(format!(",name=data,placement={placement}"));
                if placement == "nvm" {
                    disk.push("=");
                    disk.push(self.persistent.path().join("region"));
                    disk.push(format!(",nvm-size={JOURNAL_MIB}"));
                }
                let mut words: Vec<OsString> = vec![program::workspace_binary("amberlog")?.into(), "run".into()];
                if let Some(server) = &self.server {
                    disk.push(format!("={}/data", server.address()));
                    words.push("--remote-insecure".into());
                }
                words.extend(["--disk".into(), disk]);
                if has_journal_disk {
                    let mut journal = self.journal().into_os_string();
                    journal.push(",for=data,name=journal");
                    words.extend(["--journal-disk".into(), journal]);
                }
                words.extend(["--shm".into(), self.memory.path().into(), "--report".into(), self.report().into()]);
                spec.wrapper(words)
            }
        })
    }

    pub(super) fn report(&self) -> PathBuf {
        self.directory.path().join("report.json")
    }

    /// Shell lines that mount the file system.
    pub(super) fn mount(contender: &Contender) -> String {
        let kind = match contender.file_system {
            FileSystem::Other(kind) => kind,
            _ => "ext4",
        };
        format!("mount -t {kind} -o {} /dev/vda /mnt || fail mount", contender.mount)
    }

    /// Bytes to each kind of fast memory, and over the network, by amberlog's report; and what an external journal takes. Who has no amberlog
    /// has no report.
    fn media(&self) -> Result<BTreeMap<String, f64>> {
        let report: Value = std::fs::read(self.report())
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or(Value::Null);
        let disk = &report["disks"][0];
        if let Some(fault) = disk["fault"].as_str() {
            // What was measured is not what the contender's name says.
            return Err(Error::Told(format!("amberlog's report of the disk says: {fault}")));
        }
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let external = std::fs::metadata(self.journal()).map_or(0.0, |file| file.blocks() as f64 * 512.0);
        let copied = number(&disk["counters"]["pool_bytes_max"]) + number(&disk["counters"]["area_bytes_max"]);
        let mut media = BTreeMap::from([
            ("memory_bytes".to_owned(), external + copied),
            ("nvm_bytes".to_owned(), number(&disk["nvm"]["bytes_to_nvm"])),
            ("network_bytes".to_owned(), number(&disk["remote"]["wire_bytes"])),
        ]);
        // Where committed blocks are held.
        let [protected, copied, faults] =
            ["pages_protected", "pages_copied", "cow_faults"].map(|name| number(&disk["counters"][name]));
        if protected + copied > 0.0 {
            // What was copied because of a fault had been protected.
            let blocks = protected + copied - faults;
            media.insert("copied_percent".to_owned(), copied / blocks * 100.0);
            media.insert("write_faults".to_owned(), faults);
        }
        Ok(media)
    }
}

/// Runs a load to its end.
pub(super) fn measure(options: &ShootOut, contender: &Contender, load: Load, _: &Conditions) -> Result<Measured> {
    let stand = Stand::new(options, contender)?;
    let (prepare, work) = load.lines(options.quick);
    let script = format!(
        "set -e
         {mount}
         mkdir -p /mnt/work
         {prepare}
         sync
         echo 3 >/proc/sys/vm/drop_caches
         exec 5</dev/ttyS1
         mark ready
         read -r go <&5
         read -r begin rest </proc/uptime
         {work} >/tmp/result
         read -r loaded rest </proc/uptime
         mark loaded
         read -r go <&5
         umount /mnt
         read -r ended rest </proc/uptime
         mark times $begin $loaded $ended
         grep -e phase= /tmp/result | sed 's/^/mark result /' >/dev/ttyS1 || true",
        mount = Stand::mount(contender),
    );
    let mut spec = stand.spec(contender, load.name(), script)?;
    spec.programs = load.programs().to_vec();
    let mut guest = Guest::start(spec)?;
    guest.wait_mark("ready", LIMIT)?;
    let storage = stand.storage.as_ref().ok_or_else(|| Error::Told("the medium is not mounted".to_owned()))?;
    let (bytes, flushes) = (storage.bytes_written(), storage.flushes());
    let cpu = process_tree_cpu_seconds(guest.process_id());
    guest.tell("go")?;
    guest.wait_mark("loaded", LIMIT)?;
    // The VMM still runs: its time can be read.
    let cpu = process_tree_cpu_seconds(guest.process_id()) - cpu;
    guest.tell("go")?;
    let code = guest.wait_exit_code(LIMIT)?;
    if code != 0 {
        return Err(guest.failure(&format!("its script ended with {code}")).into());
    }
    guest.wait_end(LIMIT)?;
    let mut measured = told(&guest.final_report(), load)?;
    measured.fields.extend([
        ("storage_bytes".to_owned(), (storage.bytes_written() - bytes) as f64),
        ("storage_flushes".to_owned(), (storage.flushes() - flushes) as f64),
        ("host_cpu_seconds".to_owned(), cpu),
    ]);
    measured.fields.extend(stand.media()?);
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
