//! The face of all models: requests in, completions out, in their own time.

use crate::completion::{Completion, Totals};
use crate::drives::{FlashDrive, SpinningDrive};
use crate::flash::Flash;
use crate::spinning::Spinning;
use disk_model_client::{Kind, Profile, Request};

#[derive(Clone, Debug)]
enum Inner {
    Spinning(Box<Spinning>),
    Flash(Flash),
    Nothing(Vec<Completion>),
}

/// A modelled disk. Times are in ns and must not go back; an earlier one than the last counts as the last.
#[derive(Clone, Debug)]
pub struct Model {
    inner: Inner,
    now_ns: u64,
    under_way: u64,
    totals: Totals,
    capacity_bytes: Option<u64>,
}

impl Model {
    /// A disk that has nothing to do. The seed sets the angle of a platter at time 0 and the jitter of flash.
    pub fn new(profile: Profile, seed: u64) -> Self {
        Self::scaled(profile, seed, 1.0, 1.0)
    }

    /// The same for loads whose sizes and clocks are a part of what they were: see [`SpinningDrive::scaled`].
    pub fn scaled(profile: Profile, seed: u64, sizes: f64, clocks: f64) -> Self {
        let spinning = |drive: SpinningDrive| Self::spinning(drive.scaled(sizes, clocks), seed);
        const SCSI: SpinningDrive = SpinningDrive::ST336753LW;
        const DESKTOP: SpinningDrive = SpinningDrive::HDD_7200;
        match profile {
            Profile::St336753lw => spinning(SCSI),
            Profile::St336753lwWriteThrough => spinning(SpinningDrive { write_cache_bytes: 0, ..SCSI }),
            Profile::St336753lwProtected => spinning(SpinningDrive { is_cache_durable: true, ..SCSI }),
            Profile::St336753lwScsiFlush => spinning(SpinningDrive { is_flush_barrier: false, ..SCSI }),
            Profile::Hdd7200 => spinning(DESKTOP),
            Profile::Hdd7200Protected => spinning(SpinningDrive { is_cache_durable: true, ..DESKTOP }),
            Profile::Hdd7200WriteThrough => spinning(SpinningDrive { write_cache_bytes: 0, ..DESKTOP }),
            Profile::St39102lw => spinning(SpinningDrive::ST39102LW),
            Profile::Pcm => Self::flash(FlashDrive::PCM, seed),
            Profile::SataSsd => Self::flash(FlashDrive::SATA_SSD, seed),
            Profile::Nvme => Self::flash(FlashDrive::NVME, seed),
            Profile::NvmeProtected => Self::flash(FlashDrive::NVME_PROTECTED, seed),
            Profile::None => Self::with(Inner::Nothing(Vec::new()), None),
        }
    }

    /// A drive with an arm.
    pub fn spinning(drive: SpinningDrive, seed: u64) -> Self {
        Self::with(Inner::Spinning(Box::new(Spinning::new(drive, seed))), Some(drive.capacity_bytes))
    }

    /// A drive without one.
    pub fn flash(drive: FlashDrive, seed: u64) -> Self {
        Self::with(Inner::Flash(Flash::new(drive, seed)), None)
    }

    fn with(inner: Inner, capacity_bytes: Option<u64>) -> Self {
        Model { inner, now_ns: 0, under_way: 0, totals: Totals::default(), capacity_bytes }
    }

    /// What it holds, in bytes; `None`: as much as is asked for.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.capacity_bytes
    }

    /// Takes a request that arrives at `now_ns`. Completions due before are kept for [`Model::advance`].
    pub fn submit(&mut self, now_ns: u64, request: Request) {
        self.now_ns = self.now_ns.max(now_ns);
        match request.kind {
            Kind::Read => {
                self.totals.reads += 1;
                self.totals.read_bytes += request.len;
            }
            Kind::Write => {
                self.totals.writes += 1;
                self.totals.write_bytes += request.len;
            }
            Kind::Flush => self.totals.flushes += 1,
            Kind::Command => {}
        }
        self.under_way += 1;
        self.totals.queue_max = self.totals.queue_max.max(self.under_way);
        match &mut self.inner {
            Inner::Spinning(disk) => disk.submit(self.now_ns, request, &mut self.totals),
            Inner::Flash(disk) => disk.submit(self.now_ns, request, &mut self.totals),
            Inner::Nothing(done) => done.push(Completion { tag: request.tag, at_ns: self.now_ns }),
        }
    }

    /// When something may complete next if nothing else arrives, in ns.
    pub fn next_event_ns(&self) -> Option<u64> {
        match &self.inner {
            Inner::Spinning(disk) => disk.next_event_ns(),
            Inner::Flash(disk) => disk.next_event_ns(),
            Inner::Nothing(done) => done.first().map(|completion| completion.at_ns),
        }
    }

    /// Lets time pass until `now_ns` and appends what has completed, in order of time.
    pub fn advance(&mut self, now_ns: u64, completed: &mut Vec<Completion>) {
        self.now_ns = self.now_ns.max(now_ns);
        let before = completed.len();
        match &mut self.inner {
            Inner::Spinning(disk) => disk.advance(self.now_ns, completed, &mut self.totals),
            Inner::Flash(disk) => disk.advance(self.now_ns, completed),
            Inner::Nothing(done) => completed.append(done),
        }
        self.under_way -= (completed.len() - before) as u64;
    }

    /// What it did so far.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Lets time pass until nothing is under way (for arithmetic without a clock); gives the time, in ns, at which the last
    /// request completed.
    pub fn drain(&mut self, completed: &mut Vec<Completion>) -> u64 {
        let first = completed.len();
        while self.under_way > 0 {
            let Some(next) = self.next_event_ns() else { break };
            self.advance(next, completed);
        }
        completed[first..].iter().map(|completion| completion.at_ns).max().unwrap_or(self.now_ns)
    }
}
