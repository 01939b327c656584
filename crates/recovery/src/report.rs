//! What a recovery did.

use serde::Serialize;

/// How a recovery ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// There is no journal.
    #[default]
    None,
    /// Nothing had to be done.
    Clean,
    /// What was committed is at home, and the journal is empty.
    Recovered,
    /// The log is on the journal's own place on storage; the guest's kernel replays it.
    Materialised,
    /// What could be recovered was; something in the log was damaged and is lost, or something that was written home before may be.
    Damaged,
}

/// The numbers of one recovery.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// How it ended.
    pub status: Status,
    /// Committed transactions in the log.
    pub transactions: u64,
    /// Home blocks written.
    pub blocks_written: u64,
    /// Bytes of them.
    pub bytes_written: u64,
    /// Data blocks of the log that were not written because a revoke covers them.
    pub revoked: u64,
    /// How long it took, seconds.
    pub seconds: f64,
    /// Sequence number of the first committed transaction, if there was one.
    pub first_sequence: Option<u32>,
    /// Sequence number of the last committed transaction, if there was one.
    pub last_sequence: Option<u32>,
    /// What an operator should know, as sentences.
    pub notes: Vec<String>,
}

impl Report {
    /// A report that says only how it ended.
    pub fn of(status: Status) -> Self {
        Report { status, ..Report::default() }
    }

    /// Adds a sentence.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// Adds another report: numbers add up, and the worse status stays. Sequence numbers are those of the first report
    /// that has some.
    pub fn add(&mut self, other: &Report) {
        self.status = self.status.max(other.status);
        self.transactions += other.transactions;
        self.blocks_written += other.blocks_written;
        self.bytes_written += other.bytes_written;
        self.revoked += other.revoked;
        self.seconds += other.seconds;
        if self.first_sequence.is_none() {
            self.first_sequence = other.first_sequence;
            self.last_sequence = other.last_sequence;
        }
        self.notes.extend(other.notes.iter().cloned());
    }
}
