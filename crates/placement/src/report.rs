//! What a VM's disks did, as `--report` and `status --json` print it.

use crate::disk::{Disk, PlacementKind};
use crate::durability_report::DurabilityReport;
use crate::journals::Journals;
use crate::nvm::NvmReport;
use crate::remote::RemoteReport;
use block_route::LogIndex;
use guest_memory::Protection;
use recovery::{Report, Status};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// A VM.
#[derive(Clone, Debug, Serialize)]
pub struct VmReport {
    /// Version of this format.
    pub schema: u32,
    /// Its name.
    pub vm: String,
    /// Its disks, in the order in which they are attached.
    pub disks: Vec<DiskReport>,
    /// What protecting its memory took, since the process that serves it began.
    pub protection: ProtectionReport,
}

/// Protection of a VM's pages.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ProtectionReport {
    /// Calls to protect and to let go.
    pub calls: u64,
    /// Microseconds in them.
    pub calls_us: u64,
    /// Microseconds in which a writer to a protected page waited for its answer; the calls that let such pages go are in both.
    pub faults_us: u64,
}

/// A disk.
#[derive(Clone, Debug, Serialize)]
pub struct DiskReport {
    /// Its name.
    pub name: String,
    /// Where its journals live, by their placement.
    pub placement: &'static str,
    /// Where one is to live from its guest's next mount on, or is on its way to.
    pub placement_wished: Option<&'static str>,
    /// Where they really live at this moment: `copy` where protection is not possible, `storage` where nothing is held.
    pub placement_effective: &'static str,
    /// Why that is another place, if it is.
    pub placement_reason: Option<String>,
    /// The journal of its first file system.
    pub journal: JournalReport,
    /// What it has done.
    pub counters: CountersReport,
    /// What was done with its region of NVM, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvm: Option<NvmReport>,
    /// How what is held becomes durable on storage, for placements that hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durability: Option<DurabilityReport>,
    /// What was done with its logs on a journal server, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteReport>,
    /// The last recovery of its file systems together.
    pub recovery: Report,
    /// What is wrong, in a sentence, if anything is: a queue of the guest's that was stopped, memory of its that cannot be
    /// reached, a journal that was not what it seemed.
    pub fault: Option<String>,
}

/// A journal.
#[derive(Clone, Debug, Serialize)]
pub struct JournalReport {
    /// `internal`, `external` or `none`.
    pub kind: &'static str,
    /// Its blocks.
    pub blocks: u32,
}

/// Counters of a disk: bytes and requests of the disk, the rest summed over its file systems.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs, reason = "the names are the contract and say it all")]
pub struct CountersReport {
    pub journal_bytes_received: u64,
    pub journal_bytes_to_storage: u64,
    pub home_bytes_to_storage: u64,
    pub read_bytes: u64,
    pub flushes: u64,
    pub flushes_to_storage: u64,
    pub mark_bytes_to_storage: u64,
    pub transactions: u64,
    pub blocks_committed: u64,
    pub pages_protected: u64,
    pub protect_calls: u64,
    pub cow_faults: u64,
    pub pages_copied: u64,
    pub blocks_retained_now: u64,
    pub blocks_retained_max: u64,
    pub area_bytes_max: u64,
    pub pool_bytes_max: u64,
    pub pool_bytes_now: u64,
    pub released_home: u64,
    pub released_superseded: u64,
    pub released_revoked: u64,
    pub released_discarded: u64,
    pub written_home_by_host: u64,
}

/// Why a journal is not where it was asked to be.
const BROUGHT: &str = "its journal was not empty when its guest came (it was left on storage for the guest's kernel to replay, or was \
                       brought as it is), and goes on there until its file system is next unmounted; what was asked for is in force \
                       from the next mount on";

impl Journals {
    /// What the VM's disks have done so far.
    pub fn report(&self, vm: &str) -> VmReport {
        let disks = (0..self.disks().len()).map(|index| self.disk_report(index)).collect();
        let memory = &self.memory;
        let protection = ProtectionReport {
            calls: memory.protection_calls(),
            calls_us: memory.protection_ns() / 1000,
            faults_us: memory.fault_latency().sum_ns / 1000,
        };
        VmReport { schema: 1, vm: vm.to_owned(), disks, protection }
    }

    /// What they have done, where the VM has ended: nothing is in force any more, and `within_s` says what was asked for last.
    pub fn last_report(&self, vm: &str) -> VmReport {
        let mut report = self.report(vm);
        for (index, disk) in report.disks.iter_mut().enumerate() {
            if let Some(durability) = &mut disk.durability {
                durability.within_s = self.disk(index).durable_within().map(|within| within.as_secs());
            }
        }
        report
    }

    fn disk_report(&self, index: usize) -> DiskReport {
        let disk = self.disk(index);
        let logs: Vec<_> = self.logs().into_iter().filter(|log| log.home_disk == index).collect();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let own = &disk.counters;
        let mut counters = CountersReport {
            journal_bytes_received: load(&own.journal_bytes_received),
            journal_bytes_to_storage: load(&own.journal_bytes_to_storage),
            home_bytes_to_storage: load(&own.home_bytes_to_storage),
            read_bytes: load(&own.read_bytes),
            flushes: load(&own.flushes),
            flushes_to_storage: load(&own.flushes_to_storage),
            mark_bytes_to_storage: load(&own.mark_bytes_to_storage),
            transactions: load(&own.commit_blocks),
            ..CountersReport::default()
        };
        let mut recovery = Report::default();
        for log in &logs {
            let held = self.area.counters(log.id);
            counters.transactions += held.transactions;
            counters.blocks_committed += held.blocks_committed;
            counters.pages_protected += held.pages_protected;
            counters.protect_calls += held.protect_calls;
            counters.cow_faults += held.cow_faults;
            counters.pages_copied += held.pages_copied;
            counters.blocks_retained_now += held.blocks_retained_now;
            counters.blocks_retained_max += held.blocks_retained_max;
            counters.area_bytes_max += held.area_bytes_max;
            counters.pool_bytes_max += held.pool_bytes_max;
            counters.pool_bytes_now += held.pool_bytes_now;
            counters.released_home += held.released_home;
            counters.released_superseded += held.released_superseded;
            counters.released_revoked += held.released_revoked;
            counters.released_discarded += held.released_discarded;
            counters.written_home_by_host += held.written_home_by_host;
            // An external journal's bytes go through its own disk, but they are this file system's.
            if log.journal_disk != index {
                let journal = &self.disk(log.journal_disk).counters;
                counters.journal_bytes_received += load(&journal.journal_bytes_received);
                counters.journal_bytes_to_storage += load(&journal.journal_bytes_to_storage);
                counters.mark_bytes_to_storage += load(&journal.mark_bytes_to_storage);
                counters.transactions += load(&journal.commit_blocks);
            }
            match log.recovery() {
                Some(report) => recovery.add(&report),
                None if log.was_opened() => recovery.add(&Report::of(Status::Clean)),
                None => {}
            }
        }
        let journal = match logs.iter().min_by_key(|log| log.place.home_start) {
            Some(log) => JournalReport {
                kind: if log.place.is_external { "external" } else { "internal" },
                blocks: log.place.log_blocks,
            },
            None => JournalReport { kind: "none", blocks: 0 },
        };
        let nvm = self.region(index).map(|nvm| nvm.report());
        if let Some(nvm) = &nvm {
            counters.blocks_committed +=
                nvm.blocks_first + nvm.blocks_second + nvm.blocks_updated + nvm.appends_written_home;
        }
        let mut remote: Option<RemoteReport> = None;
        for of_log in logs.iter().filter_map(|log| log.keeper.remote_report()) {
            remote.get_or_insert_default().add(&of_log);
        }
        let mut durability: Option<DurabilityReport> = None;
        let mut is_first = true;
        for log in &logs {
            let Some(of_log) = log.keeper.durability(log) else { continue };
            let sum = durability.get_or_insert_default();
            if log.is_open() {
                sum.add(&of_log, std::mem::take(&mut is_first));
            } else {
                sum.add_counts(&of_log);
            }
        }
        if durability.is_none() && disk.options.placement.is_held() {
            durability = Some(DurabilityReport::default());
        }
        let placement = logs.first().map_or(disk.options.placement, |log| log.placement);
        let wished = logs.iter().find(|log| log.wanted() != log.placement).map(|log| log.wanted().name());
        let is_brought = logs.iter().any(|log| log.is_brought() && log.placement != PlacementKind::Storage);
        if is_brought && disk.durable_within().is_some() {
            durability.get_or_insert_default().reason.get_or_insert_with(|| BROUGHT.to_owned());
        }
        let open = logs.iter().filter(|log| log.is_open());
        let kept: Vec<Option<String>> = open.map(|log| log.keeper.why_on_storage(log)).collect();
        let (effective, placement_reason) = match kept.iter().flatten().next() {
            _ if is_brought => (PlacementKind::Storage, Some(BROUGHT.to_owned())),
            Some(reason) => {
                // What another one has elsewhere is not on storage.
                let is_all = kept.iter().all(Option::is_some);
                (if is_all { PlacementKind::Storage } else { placement }, Some(reason.clone()))
            }
            None => self.effective_placement(disk, placement, remote.as_ref()),
        };
        DiskReport {
            nvm,
            remote,
            durability,
            name: disk.options.name.clone(),
            placement: placement.name(),
            placement_wished: wished,
            placement_effective: effective.name(),
            placement_reason,
            journal,
            counters,
            recovery,
            fault: disk.fault(),
        }
    }

    /// Where the journals of a disk live at this moment, and why not where they are to.
    fn effective_placement(
        &self,
        disk: &Disk,
        placement: PlacementKind,
        remote: Option<&RemoteReport>,
    ) -> (PlacementKind, Option<String>) {
        if let Some(reason) = disk.unheld() {
            return (PlacementKind::Storage, Some(reason));
        }
        match placement {
            // Before a VMM has connected nobody knows.
            PlacementKind::Retain if self.memory.page_count() > 0 => match self.memory.protection() {
                Protection::Available => (placement, None),
                Protection::Unavailable(reason) => (PlacementKind::Copy, Some(reason)),
            },
            PlacementKind::Remote if !remote.is_some_and(|remote| remote.is_remote_now) => {
                (PlacementKind::Storage, Some("nothing of the journal is on its server at this moment".to_owned()))
            }
            _ if placement != disk.options.placement => {
                (placement, Some(format!("it was changed from {} while the guest runs", disk.options.placement.name())))
            }
            _ => (placement, None),
        }
    }

    /// Whether the log with this index was opened by a guest since it was found.
    pub fn was_opened(&self, index: LogIndex) -> bool {
        self.log(index).is_some_and(|log| log.was_opened())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every field that a report can have is explained.
    #[test]
    fn the_page_explains_every_counter() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reports.md");
        let page = std::fs::read_to_string(page).expect("docs/reports.md");
        let value = |value: serde_json::Result<serde_json::Value>| value.expect("reports are JSON");
        for report in [
            value(serde_json::to_value(CountersReport::default())),
            value(serde_json::to_value(RemoteReport::default())),
            value(serde_json::to_value(NvmReport::default())),
            value(serde_json::to_value(DurabilityReport::default())),
            value(serde_json::to_value(Report {
                first_sequence: Some(1),
                last_sequence: Some(1),
                ..Report::default()
            })),
        ] {
            for name in report.as_object().expect("an object").keys() {
                assert!(page.contains(&format!("`{name}`")), "docs/reports.md does not explain {name}");
            }
        }
    }
}
