//! What a log's table says for who goes on with it.

use crate::area::{Adopted, JournalArea};
use crate::location::Location;
use crate::logs::LogId;
use crate::table::{Doubt, Opening};

impl JournalArea {
    /// What the table of a log that was adopted says of it.
    pub fn adopted(&self, id: LogId) -> Option<Adopted> {
        self.with(id, |jcb| Adopted {
            is_open: jcb.is_open(),
            is_empty: !jcb.is_open()
                || (1..jcb.shape.log_blocks).all(|position| jcb.location(position) == Location::None),
            openings: jcb.table.opening(),
            is_marked: jcb.table.is_marked(),
            handed_over: jcb.table.handed_over(),
            is_closing: jcb.table.is_closing(),
            is_recovering: jcb.table.is_recovering(),
            is_distrusted: jcb.table.is_distrusted(),
            numbered: jcb.table.numbered(),
            doubt: jcb.table.doubt(),
        })
    }

    /// Its guest has said what the log is since it was recovered.
    pub fn forget_recovering(&self, id: LogId) {
        self.with(id, |jcb| {
            if !jcb.is_open() && jcb.table.is_recovering() {
                jcb.table.set_recovering(false);
            }
        });
    }

    /// A log that was to be handed over, or was once, is all here.
    pub fn forget_hand_over(&self, id: LogId) {
        self.with(id, |jcb| {
            jcb.table.set_handed_over(None);
        });
    }

    /// Storage is about to say that a log is empty, because its guest closes it, and all of it is home; or that was given up.
    pub fn note_closing(&self, id: LogId, is_closing: bool) {
        self.with(id, |jcb| {
            jcb.table.set_closing(is_closing);
        });
    }

    /// Whether something was written into a log while it was closed, which no kernel does.
    pub fn is_foreign(&self, id: LogId) -> bool {
        self.with(id, |jcb| jcb.table.is_foreign()).unwrap_or_default()
    }

    /// Says so, or that it is empty again.
    pub fn set_foreign(&self, id: LogId, is_foreign: bool) {
        self.with(id, |jcb| {
            jcb.table.set_foreign(is_foreign);
        });
    }

    /// Storage is about to say that this opening of a log is elsewhere, or has said so.
    pub fn note_opening(&self, id: LogId, opening: &Opening, is_done: bool) {
        self.with(id, |jcb| {
            if is_done {
                jcb.table.set_opening_done(opening);
            } else {
                jcb.table.set_opening_meant(opening);
            }
        });
    }

    /// What is made durable beside a log has numbers below this one, from now on; nothing: none is, in a log that is just opened.
    pub fn note_numbered(&self, id: LogId, next: Option<u32>) {
        self.with(id, |jcb| {
            jcb.table.set_numbered(next);
        });
    }

    /// Changes what whoever goes on has to know of storage that has failed.
    pub fn note_doubt(&self, id: LogId, change: impl FnOnce(&mut Doubt)) {
        self.with(id, |jcb| {
            let mut doubt = jcb.table.doubt();
            change(&mut doubt);
            if doubt != jcb.table.doubt() {
                jcb.table.set_doubt(doubt);
            }
        });
    }

    /// What storage has said of this opening is durable: its guest may be told that the log is open.
    pub fn note_marked(&self, id: LogId) {
        self.with(id, |jcb| {
            jcb.table.set_marked();
        });
    }
}
