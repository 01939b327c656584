//! What keepers want done: carried out here, or passed on to the thread of the disk that a step names.

use super::{DiskRoute, Errand};
use crate::disk::DiskCounters;
use crate::journals::TraceKind;
use crate::keeper::{Side, Step, Steps, SuperblockBlock};
use crate::kept_log::KeptLog;
use crate::layout::Piece;
use block_route::{Buffer, DiskOperation, Operation, Plan, RequestId, RequestKind, Status};
use std::sync::Arc;

impl DiskRoute {
    /// What the guest wrote into a log in this pass counts before what comes next.
    pub(super) fn settle(&mut self, log: &Arc<KeptLog>, plan: &mut Plan) {
        self.journals.describe_new_memory();
        let mut steps = Steps::default();
        log.keeper.settle_pass(log, &mut steps);
        self.carry_out(log, steps, plan);
    }

    /// Has done what a keeper wants, here or by the disk that it names.
    pub(super) fn carry_out(&mut self, log: &Arc<KeptLog>, steps: Steps, plan: &mut Plan) {
        let mut is_retry = false;
        for (side, step) in steps.0 {
            let (disk, index) = match side {
                Side::Home => (&log.home, log.home_disk),
                Side::Journal => (&log.journal, log.journal_disk),
            };
            if index != self.disk {
                self.journals.pass_on_to(index, (Arc::clone(log), side, step));
                continue;
            }
            match step {
                Step::Write { request, offset, content, task } => {
                    let len = content.iter().map(|buffer| buffer.len() as u64).sum();
                    if side == Side::Home {
                        DiskCounters::add(&disk.counters.home_bytes_to_storage, len);
                        self.journals.trace(self.disk, TraceKind::Home, offset, len);
                    } else {
                        DiskCounters::add(&disk.counters.journal_bytes_to_storage, len);
                    }
                    let ticket = Some(self.ticket(Errand::Keeper(Arc::clone(log), task)));
                    plan.disk(DiskOperation {
                        request,
                        ticket,
                        operation: Operation::Write,
                        offset,
                        len,
                        buffers: content,
                    });
                }
                Step::Flush { task } => {
                    DiskCounters::add(&disk.counters.flushes_to_storage, 1);
                    let covered = disk.to_flush().unwrap_or(0);
                    let ticket = Some(self.ticket(Errand::KeeperFlush(Arc::clone(log), task, covered)));
                    plan.disk(DiskOperation {
                        request: None,
                        ticket,
                        operation: Operation::Flush,
                        offset: 0,
                        len: 0,
                        buffers: Vec::new(),
                    });
                }
                Step::Hold(request) => plan.hold(request),
                Step::Release(request, status) => plan.release(request, status),
                Step::Retry => is_retry = true,
                Step::Closed => {
                    // It may have been put in another's keeping by a step before.
                    if let Some(log) = self.journals.log(log.index) {
                        self.journals.follow_wish(&log);
                    }
                }
                Step::OnStorage { from } => self.journals.is_on_storage(log.index, Some(from)),
                Step::Superblock(request, content) => self.held_superblock(log, request, &content, plan),
            }
        }
        if is_retry {
            self.retry_waiting(plan);
            self.drive(plan);
        }
    }

    /// A superblock that was held is taken now.
    fn held_superblock(&mut self, log: &Arc<KeptLog>, request: RequestId, content: &[u8], plan: &mut Plan) {
        let mut steps = Steps::default();
        let (log, taken) = self.journals.superblock_written(log, SuperblockBlock { content, request }, &mut steps);
        self.carry_out(&log, steps, plan);
        let taken = taken.and_then(|passes| Ok(if passes { Some(log.place_of(0)?) } else { None }));
        let status = match taken {
            Ok(None) => Status::Ok,
            Ok(Some(offset)) => {
                let len = content.len() as u64;
                DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, len);
                let ticket = Some(self.ticket(Errand::Plain(false)));
                let buffers = vec![Buffer::Bytes(Arc::from(content))];
                let (request, operation) = (Some(request), Operation::Write);
                plan.disk(DiskOperation { request, ticket, operation, offset, len, buffers });
                Status::Ok
            }
            Err(error) => {
                log::error!("disk {}: {error}", log.journal.options.name);
                Status::IoError
            }
        };
        plan.release(request, status);
        self.scan_if(false);
    }

    /// Asks again about what waits.
    pub(super) fn retry_waiting(&mut self, plan: &mut Plan) {
        for waiting in std::mem::take(&mut self.behind) {
            let request = waiting.request;
            // It takes holds of its own, so the one it waited with can go after.
            match waiting.piece {
                _ if waiting.kind == RequestKind::Read => self.read_piece(waiting, plan),
                Piece::Home(home, ..) => self.home_write(&home, waiting, plan),
                Piece::Log(..) | Piece::Plain(..) => unreachable!("only homes and reads wait"),
            }
            plan.release(request, Status::Ok);
        }
    }

    /// Has keepers do what they have to do on the disk with the homes.
    pub(super) fn drive(&mut self, plan: &mut Plan) {
        for log in self.journals.logs_at_home(self.disk) {
            let mut steps = Steps::default();
            log.keeper.drive(&log, &mut steps);
            self.carry_out(&log, steps, plan);
        }
    }

    /// Tells keepers of something, and has done what they want.
    pub(super) fn tell(&mut self, logs: Vec<Arc<KeptLog>>, plan: &mut Plan, tell: impl Fn(&KeptLog, &mut Steps)) {
        for log in logs {
            let mut steps = Steps::default();
            tell(&log, &mut steps);
            self.carry_out(&log, steps, plan);
        }
    }
}
