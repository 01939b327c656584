//! The machines of a log in a region are driven: one after the other ([`Work::drive`]), and each hears of the ends of its operations
//! ([`Work::errand_done`]).

use super::State;
use super::coverage::Flush;
use super::errand::Errand;
use super::work::Work;
use crate::keeper::Steps;
use block_route::Status;

impl Work {
    /// Takes everything that waits one step on.
    pub(super) fn drive(&mut self, state: &mut State, steps: &mut Steps) {
        if let State::Held(captured) = state {
            self.begin_commit(captured, steps);
            self.drive_checkpoint(captured, steps);
        }
        // First: if it does not leave after all, what waited for it goes on.
        self.drive_leaving(state, steps);
        self.advance(state, steps);
        self.drive_space(state, steps);
        self.drive_closing(state, steps);
        self.drive_distrusted(state, steps);
    }

    pub(super) fn errand_done(
        &mut self,
        state: &mut State,
        number: u64,
        errand: Errand,
        is_ok: bool,
        steps: &mut Steps,
    ) {
        if errand.wrote() {
            self.in_flight.end(number);
            // A guest's flush asks for what the guest has written. Ours are flushed by whoever needs them on the disk.
            if !matches!(errand, Errand::Append | Errand::EarlyAppend(_) | Errand::Checkpoint(_)) {
                self.home.set_dirty();
            }
        }
        self.coverage.ends(Flush::Ours(number), is_ok);
        match &errand {
            Errand::LeavingLog(attempt) => return self.leaving_log_done(state, *attempt, is_ok, steps),
            Errand::LeavingFlush(attempt) => return self.leaving_flush_done(state, Some(*attempt), is_ok, steps),
            Errand::LeavingSuperblock => return self.leaving_superblock_written(state, is_ok, steps),
            Errand::LeavingLastFlush => return self.leaving_flush_done(state, None, is_ok, steps),
            Errand::LeavingRest => return self.leaving_rest_done(is_ok, steps),
            Errand::Closed => return self.closed(state, is_ok, steps),
            _ => {}
        }
        let captured = match state {
            State::Held(captured) => Some(&mut **captured),
            State::Idle(_) | State::Failed => None,
        };
        let status = if is_ok { Status::Ok } else { Status::IoError };
        match (errand, captured) {
            (Errand::Through { request, blocks, same, is_held }, Some(captured)) => {
                self.through_done(captured, (request, blocks, is_held), same, is_ok, steps);
            }
            (
                Errand::Through { request, is_held: true, .. }
                | Errand::LateFlush { request, .. }
                | Errand::TailFlush { request, .. },
                None,
            ) => steps.release(request, status),
            (Errand::LateFlush { request, late, mark }, Some(captured)) => {
                self.late_flushed(captured, request, (late, mark), is_ok, steps);
            }
            (Errand::TailFlush { request, passed, mark, before }, Some(captured)) => {
                self.tail_flushed(captured, request, (passed, mark, before), is_ok, steps);
            }
            (Errand::Append, Some(captured)) => self.append_done(captured, is_ok, steps),
            (Errand::EarlyAppend(generation), captured) => {
                self.early_append_done(captured, generation, is_ok, steps);
            }
            (Errand::CommitFlush(mark), Some(captured)) => self.commit_flushed(captured, mark, is_ok, steps),
            (Errand::Checkpoint(versions), Some(captured)) => self.run_done(captured, versions, is_ok, steps),
            (Errand::CheckpointFlush(mark), Some(captured)) => {
                self.checkpoint_flushed(captured, mark, is_ok, steps);
            }
            _ => {}
        }
    }
}
