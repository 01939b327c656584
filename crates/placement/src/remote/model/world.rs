//! What a crash leaves, and the judgement of what recovery makes of it.

use super::disk::Disk;
use super::life::Life;
use super::network::{Network, Weather};
use crate::disk::{Disk as VmDisk, DiskSettings, PlacementKind};
use crate::remote::tests::Random;
use crate::remote::{JournalStorage, MarkFound, RemoteMark, RemoteOptions, RemoteRecovered, recover_remote_image};
use crate::scan::{self, FoundLogPlace};
use jbd2::{Content, Features, LogRead, Plan as Replay, Superblock, SuperblockEdit};
use remote_journal::store::{Simulated, Store, StoreOptions};
use remote_journal::{ClientOptions, ClientSecurity, Server, ServerOptions};
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

pub const BLOCK: usize = 1024;
const IMAGE_BLOCKS: u64 = 3072;
/// Of the journal, its superblock included.
const LOG_BLOCKS: u32 = 128;
const NAME: &str = "disk";
const BOUNDS: StoreOptions =
    StoreOptions { segment_bytes: 256 << 10, space_bytes_max: 64 << 20, journal_bytes_max: 8 << 20 };

/// What `amberlog recover --remote` does with an image, which it has locked; or what a start does by itself (`only_marked`).
pub(super) fn recover_image(
    path: &Path,
    options: &RemoteOptions,
    dry_run: bool,
    only_marked: bool,
) -> Result<Vec<RemoteRecovered>, recovery::Error> {
    let access = if dry_run { recovery::Access::Read } else { recovery::Access::Write };
    recover_remote_image(&recovery::Disk::open(path, access)?, None, options, dry_run, only_marked)
}

/// An ext4 of one group with a journal without checksums: a transaction of which a block is missing looks
/// like any other.
pub(super) fn image() -> Vec<u8> {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let output = std::process::Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "1024", "-J", "size=1", "-O", "^metadata_csum,^resize_inode"])
        .args(["-E", "lazy_itable_init=0"])
        .arg(&path)
        .arg(IMAGE_BLOCKS.to_string())
        .output()
        .expect("e2fsprogs are installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(&path).expect("the image")
}

/// A transaction, and what it made of a block; nothing where it revoked it.
type Version = (u32, Option<Vec<u8>>);

/// What a journal is that commits without waiting (`journal_async_commit`): only checksums tell whether what a commit block
/// commits is there.
fn make_async(superblock: &mut [u8]) {
    const INCOMPAT: usize = 0x28;
    const CHECKSUM_TYPE: usize = 0x50;
    superblock[INCOMPAT..INCOMPAT + 4].copy_from_slice(&(Features::ASYNC_COMMIT | Features::CSUM_V3).to_be_bytes());
    superblock[CHECKSUM_TYPE] = 4;
    SuperblockEdit::new(superblock).expect("a superblock").seal();
}

/// A journal that goes round and round (`s_maxlen`).
pub(super) fn small(mut superblock: Vec<u8>) -> Vec<u8> {
    superblock[0x10..0x14].copy_from_slice(&LOG_BLOCKS.to_be_bytes());
    superblock
}

/// After which a guest's log gives its server up.
pub const TIMEOUT: Duration = Duration::from_millis(500);
/// So long whoever is not to give a server up waits for it, also on a machine that stands still for some seconds.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A client for the server behind this address.
pub(super) fn client_options(address: std::net::SocketAddr, timeout: Duration) -> RemoteOptions {
    let security = ClientSecurity { insecure: true, ..ClientSecurity::default() };
    RemoteOptions { client: ClientOptions { address: address.to_string(), security, timeout }, name: NAME.to_owned() }
}

/// A server with a store of its own.
pub(super) fn start_server() -> Server {
    serve(Simulated::default(), BOUNDS)
}

/// What the guest has done, whatever became of it.
pub struct Known {
    pub disk: Disk,
    /// The complete journal: what was written last to each position.
    pub log: HashMap<u32, Vec<u8>>,
    /// The journal's superblock as it may be in effect.
    pub superblock: Vec<u8>,
    /// Of each block, in order.
    pub versions: BTreeMap<u64, Vec<Version>>,
    /// The last transaction that the guest was told is committed, and the last that it has begun to write.
    pub committed: u32,
    pub begun: u32,
    /// One step of storage in so many is followed by a loss of power, in a copy.
    pub crash_one_in: u32,
    /// How many copies then lose power, each with something else of what was not durable.
    pub crashes_each: u32,
    /// Steps of storage that fail, after so many that do not.
    pub failures: u32,
    pub failures_after: u32,
    /// Commit blocks are written beside what they commit. While such a transaction is on its way, storage by itself may
    /// have its commit block alone; so only a log that is on the server is judged then.
    pub is_async: bool,
    random: Random,
}

struct Remote {
    medium: Simulated,
    server: Option<Server>,
}

pub struct World {
    pub known: Mutex<Known>,
    remote: Mutex<Remote>,
    pub network: Network,
    pub place: FoundLogPlace,
    pub vm_disk: Arc<VmDisk>,
    /// After which the guest's log gives the server up.
    pub timeout: Duration,
    pub crashes: AtomicU64,
    pub steps: AtomicU64,
    /// A crash was judged badly: the thread that found it may not be the test's.
    pub has_failed: AtomicBool,
    hangs: AtomicBool,
    somebody_hangs: AtomicBool,
    directory: tempfile::TempDir,
}

/// A log as it was written, but for a transaction that is not committed.
struct CompleteLog<'a>(&'a HashMap<u32, Vec<u8>>, u32);

impl LogRead for CompleteLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        match self.0.get(&position) {
            Some(block) if jbd2::peek(block).is_none_or(|header| header.sequence != self.1) => {
                buffer.copy_from_slice(block);
            }
            _ => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

impl Known {
    /// What jbd2's replay of the complete journal, up to a transaction, writes.
    fn replayed(&self, last: u32) -> BTreeMap<u64, Vec<u8>> {
        let (superblock, format) = Superblock::parse(&self.superblock).expect("a superblock");
        let mut log = CompleteLog(&self.log, last.wrapping_add(1));
        let plan = Replay::new(&mut log, &superblock, &format, &|_| true).expect("a good log");
        let mut replayed = BTreeMap::new();
        for block in plan.blocks() {
            let mut data = vec![0; BLOCK];
            let copy = block.newest();
            let Ok(_) = log.read(copy.position, &mut data);
            assert!(copy.restore(plan.format(), &mut data));
            replayed.insert(block.home(), data);
        }
        replayed
    }

    /// What is wrong with an image in which everything up to this transaction is said to be.
    fn fault(&self, image: &[u8], survived: &[u8], last: u32) -> Option<String> {
        let of = |image: &[u8], block: u64| image[block as usize * BLOCK..][..BLOCK].to_vec();
        let replayed = self.replayed(last);
        for (block, versions) in &self.versions {
            let counts = |(sequence, _): &&Version| !jbd2::sequence::is_after(*sequence, last);
            let expected = match versions.iter().rfind(counts) {
                Some((_, Some(content))) => content.clone(),
                Some((_, None)) => of(survived, *block),
                None => of(&self.disk.base, *block),
            };
            if let Some(replayed) = replayed.get(block) {
                assert_eq!(replayed, &expected, "the model's own journal of block {block} is not what it committed");
            }
            if of(image, *block) != expected {
                return Some(format!("block {block} is not as transaction {last} left it"));
            }
        }
        None
    }
}

impl World {
    pub fn new(seed: u64, crash_one_in: u32, is_async: bool, timeout: Duration) -> Arc<Self> {
        let image = image();
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("image");
        std::fs::write(&path, &image).expect("written");
        let vm_disk = Arc::new(VmDisk::open(options(path)).expect("the image"));
        let place = scan::scan(std::slice::from_ref(&vm_disk)).expect("scanned").logs.remove(0);
        let at = crate::scan::offset_of(&place.runs, place.block_bytes, 0).expect("a place") as usize;
        let mut superblock = image[at..at + BLOCK].to_vec();
        superblock = small(superblock);
        if is_async {
            make_async(&mut superblock);
        }
        let known = Known {
            disk: Disk::new(image, BLOCK),
            log: HashMap::new(),
            superblock,
            versions: BTreeMap::new(),
            committed: 0,
            begun: 0,
            crash_one_in,
            crashes_each: 1,
            failures: 0,
            failures_after: 0,
            is_async,
            random: Random(seed ^ 0x776f_726c),
        };
        let world = World {
            known: Mutex::new(known),
            remote: Mutex::new(Remote { medium: Simulated::default(), server: None }),
            network: Network::new(),
            place,
            vm_disk,
            timeout,
            crashes: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
            somebody_hangs: AtomicBool::new(false),
            directory,
        };
        world.start_server(BOUNDS);
        Arc::new(world)
    }

    /// The guest's client for the server behind this address.
    pub fn guest_options(&self) -> RemoteOptions {
        client_options(self.network.address, self.timeout)
    }

    /// Starts the server, with room for so much.
    pub fn start_server(&self, bounds: StoreOptions) {
        let mut remote = self.remote.lock().expect("no panic under this lock");
        let server = serve(remote.medium.clone(), bounds);
        self.network.lead_to(Some(server.address()));
        remote.server = Some(server);
    }

    /// Starts the server, as somebody has set it up.
    pub fn start_server_with(&self, change: impl FnOnce(&mut ServerOptions)) {
        let mut remote = self.remote.lock().expect("no panic under this lock");
        let store = Store::open(remote.medium.clone(), BOUNDS, 7).expect("a store");
        let server = serve_store(store, change);
        self.network.lead_to(Some(server.address()));
        remote.server = Some(server);
    }

    /// What the log's threads read and flush begins and does not end, or ends again.
    pub fn hang(&self, hangs: bool) {
        self.hangs.store(hangs, Ordering::SeqCst);
    }

    pub fn wait_until_somebody_hangs(&self) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !self.somebody_hangs.load(Ordering::SeqCst) {
            assert!(std::time::Instant::now() < deadline, "nobody needs storage");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_while_it_hangs(&self) {
        while self.hangs.load(Ordering::SeqCst) {
            self.somebody_hangs.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.somebody_hangs.store(false, Ordering::SeqCst);
    }

    pub fn start_small_server(&self, journal_bytes_max: u64) {
        self.start_server(StoreOptions { journal_bytes_max, ..BOUNDS });
    }

    pub fn start_usual_server(&self) {
        self.start_server(BOUNDS);
    }

    /// The server says that it stops, and does.
    pub fn stop_server(&self) {
        let server = self.remote.lock().expect("no panic under this lock").server.take();
        self.network.lead_to(None);
        if let Some(server) = server {
            server.stop();
        }
    }

    /// The server loses power, and what of its store was not durable.
    pub fn kill_server(&self) {
        let mut remote = self.remote.lock().expect("no panic under this lock");
        self.network.lead_to(None);
        self.network.reset();
        let mut random = Random(self.steps.load(Ordering::Relaxed));
        remote.medium = remote.medium.after_power_loss(|| random.below(2) == 0);
        remote.server = None;
    }

    /// A step of storage begins or has ended: the power may fail just then.
    fn step(&self, known: &mut Known) -> io::Result<()> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        if known.failures > 0 && known.failures_after > 0 {
            known.failures_after -= 1;
        } else if known.failures > 0 {
            known.failures -= 1;
            return Err(io::Error::other("the test wants this to fail"));
        }
        if known.crash_one_in > 0 && known.random.below(known.crash_one_in) == 0 {
            (0..known.crashes_each).for_each(|_| self.judge(known));
        }
        Ok(())
    }

    /// The host loses power now, in a copy; and perhaps the server. Recovers the copy, and compares every block.
    pub fn crash(&self) {
        self.judge(&mut self.known.lock().expect("no panic under this lock"));
    }

    fn judge(&self, known: &mut Known) {
        // The thread that ships drives a runtime, in which recovery's own cannot run.
        let judged = std::thread::scope(|scope| scope.spawn(|| self.judge_or_panic(known)).join());
        if judged.is_err() {
            self.has_failed.store(true, Ordering::SeqCst);
            let is_ours = std::thread::current().name() != Some("remote");
            assert!(!is_ours, "what is left is not what it has to be, see above");
        }
    }

    fn judge_or_panic(&self, known: &mut Known) {
        let how = known.random.below(4);
        let mut random = Random(known.random.next());
        let survived = known.disk.after_power_loss(|count| match how {
            0 => 0,
            1 => count - 1,
            _ => random.below(count as u32) as usize,
        });
        let at = crate::scan::offset_of(&self.place.runs, self.place.block_bytes, 0).expect("a place") as usize;
        let is_on_server = matches!(RemoteMark::read(&survived[at..at + BLOCK]), MarkFound::Live(_));
        if known.is_async && known.begun != known.committed && !is_on_server {
            return;
        }
        self.crashes.fetch_add(1, Ordering::Relaxed);
        let medium = {
            let remote = self.remote.lock().expect("no panic under this lock");
            match known.random.below(3) {
                0 => remote.medium.after_power_loss(|| false),
                1 => remote.medium.after_power_loss(|| true),
                _ => remote.medium.after_power_loss(|| random.below(2) == 0),
            }
        };
        let path: PathBuf = self.directory.path().join("survived");
        std::fs::write(&path, &survived).expect("written");
        let server = serve(medium, BOUNDS);
        let options = client_options(server.address(), PATIENCE);
        let recovered = recover_image(&path, &options, false, false).expect("it can be recovered");
        if recovered.iter().any(|one| one.report.status == recovery::Status::Materialised) {
            // What is not trusted is left to the guest's kernel, which replays it: its file system says so while it is mounted.
            const INCOMPAT: usize = 1024 + 0x60;
            const NEEDS_RECOVERY: u8 = 4;
            let mut image = std::fs::read(&path).expect("the image");
            image[INCOMPAT] |= NEEDS_RECOVERY;
            std::fs::write(&path, image).expect("written");
            let disk = recovery::Disk::open(&path, recovery::Access::Write).expect("the image");
            let reports = recovery::recover_disk(&disk, None, recovery::Options::default()).expect("it is looked at");
            reports.iter().for_each(|one| assert!(one.result.is_ok(), "{one:?}"));
        }
        let image = std::fs::read(&path).expect("the image");
        drop(server);
        let possible: Vec<u32> =
            (0..=known.begun.wrapping_sub(known.committed)).map(|more| known.committed.wrapping_add(more)).collect();
        let faults: Vec<Option<String>> = possible.iter().map(|last| known.fault(&image, &survived, *last)).collect();
        assert!(
            faults.iter().any(Option::is_none),
            "told of {}, writing {}; recovered {recovered:?}: {faults:?}",
            known.committed,
            known.begun
        );
    }
}

impl World {
    /// The journal superblock on storage.
    pub fn stored_superblock(&self) -> Vec<u8> {
        self.known.lock().expect("no panic under this lock").disk.last(self.superblock_at() / BLOCK as u64)
    }

    /// Somebody else writes it.
    pub fn write_superblock(&self, block: &[u8]) {
        let mut known = self.known.lock().expect("no panic under this lock");
        let write = known.disk.write(self.superblock_at(), block);
        known.disk.ended(write);
    }

    fn superblock_at(&self) -> u64 {
        crate::scan::offset_of(&self.place.runs, self.place.block_bytes, 0).expect("a place")
    }

    /// What is wrong with an image, if it is not what some transaction left that the guest was told of last, or began after that; `survived`
    /// is what it was before it was recovered.
    pub fn fault(&self, image: &[u8], survived: &[u8]) -> Option<String> {
        let known = self.known.lock().expect("no panic under this lock");
        let possible = (0..=known.begun.wrapping_sub(known.committed)).map(|more| known.committed.wrapping_add(more));
        let faults: Vec<_> = possible.map(|last| known.fault(image, survived, last)).collect();
        if faults.iter().any(Option::is_none) { None } else { faults.into_iter().flatten().next() }
    }

    /// The disk, as another worker opens it.
    pub fn open_disk(&self) -> Arc<VmDisk> {
        Arc::new(VmDisk::open(options(self.vm_disk.options.path.clone())).expect("the image"))
    }

    /// A file for the copy of the log.
    pub fn copy_path(&self, number: u32) -> PathBuf {
        self.directory.path().join(format!("copy-{number}"))
    }

    /// The disk as the guest knows it.
    pub fn image_now(&self) -> Vec<u8> {
        self.known.lock().expect("no panic under this lock").disk.after_power_loss(|count| count - 1)
    }

    fn medium_now(&self) -> Simulated {
        self.remote.lock().expect("no panic under this lock").medium.after_power_loss(|| true)
    }

    /// A server on a copy of the store.
    pub fn serve_copy(&self) -> Server {
        serve(self.medium_now(), BOUNDS)
    }

    pub fn serve_copy_with(&self, change: impl FnOnce(&mut ServerOptions)) -> Server {
        serve_store(Store::open(self.medium_now(), BOUNDS, 7).expect("a store"), change)
    }

    /// Ranges of a store's bytes to be damaged, one after another.
    pub fn damages(&self) -> Vec<(u64, u64)> {
        (0..24).map(|index| (index * 2048 + 100, 1)).chain((0..6).map(|index| (index * 6000, 4000))).collect()
    }

    /// A server on a copy of the store with bits flipped in every so many bytes from here on; nothing where the store cannot
    /// be opened.
    pub fn serve_damaged(&self, from: u64, len: u64) -> Option<Server> {
        let medium = self.medium_now();
        let segment = *remote_journal::store::Medium::list(&medium).ok()?.last()?;
        (from..from + len).step_by(64).for_each(|offset| medium.flip(segment, offset));
        Some(serve_store(Store::open(medium, BOUNDS, 7).ok()?, |_| {}))
    }
}

pub(super) fn options(path: PathBuf) -> DiskSettings {
    DiskSettings {
        name: NAME.to_owned(),
        path,
        placement: PlacementKind::Remote,
        honour_flush: true,
        read_only: false,
        durable_within: None,
        write_log: None,
    }
}

fn serve(medium: Simulated, bounds: StoreOptions) -> Server {
    serve_store(Store::open(medium, bounds, 7).expect("a store"), |_| {})
}

fn serve_store(store: Store<Simulated>, change: impl FnOnce(&mut ServerOptions)) -> Server {
    let mut options = ServerOptions::new("127.0.0.1:0", "");
    options.insecure = true;
    change(&mut options);
    Server::with_store(options, store).expect("a server")
}

/// Storage as a log's own thread and its guest's superblocks reach it. A world ends with its guest: a worker that was killed is
/// left as it is, and must not keep servers, networks and files for as long as the other tests run.
pub struct Observed {
    pub world: Weak<World>,
    pub life: Arc<Life>,
}

impl Observed {
    fn world(&self) -> Arc<World> {
        self.world.upgrade().unwrap_or_else(|| {
            self.life.kill();
            self.life.step();
            unreachable!("a worker that is dead takes no step")
        })
    }
}

impl JournalStorage for Observed {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.life.step();
        let world = self.world();
        let written = {
            let mut known = world.known.lock().expect("no panic under this lock");
            world.step(&mut known)?;
            let write = known.disk.write(offset, bytes);
            let on_its_way = world.step(&mut known);
            known.disk.ended(write);
            on_its_way
        };
        self.life.step();
        written
    }

    fn failed_flushes(&self) -> u64 {
        0
    }

    fn sync_since(&self, _failed: u64) -> io::Result<()> {
        self.life.step();
        let world = self.world();
        world.wait_while_it_hangs();
        let synced = {
            let mut known = world.known.lock().expect("no panic under this lock");
            world.step(&mut known)?;
            known.disk.flush();
            world.step(&mut known)
        };
        self.life.step();
        synced
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        if self.life.is_dead() {
            self.life.step();
        }
        let world = self.world();
        world.wait_while_it_hangs();
        let known = world.known.lock().expect("no panic under this lock");
        let content = known.disk.last(offset / BLOCK as u64);
        bytes.copy_from_slice(&content[offset as usize % BLOCK..][..bytes.len()]);
        Ok(())
    }

    fn forget_cached(&self) {}

    fn patience(&self) -> Duration {
        Duration::ZERO
    }
}

impl World {
    /// Sets the weather, and resets what is open when that matters.
    pub fn weather(&self, weather: Weather) {
        self.network.set(weather);
    }
}
