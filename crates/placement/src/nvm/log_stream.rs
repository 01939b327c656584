//! A guest's log as it is written, turned into transactions: what jbd2's recovery would accept, as soon as it would.
//!
//! Log blocks are copied when they come, because the guest may change its pages as soon as its write completes. A
//! transaction is accepted when its commit block and everything that it commits is there and right; what is accepted is
//! forgotten here, since from then on it is in the journal on NVM or at home.
//!
//! Bounds: no more copies than the log has blocks, nor than the region could ever commit. A log that overlaps itself is
//! not followed.

use jbd2::{Checksum, Commit, Descriptor, Format, Kind, Revoke, Tag};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Where a transaction begins in the log, and its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    pub position: u32,
    pub sequence: u32,
}

/// A transaction that counts.
#[derive(Clone, Debug)]
pub(crate) struct Transaction {
    pub sequence: u32,
    /// Home blocks and what they shall hold; of a block that is in it twice, the last.
    pub blocks: HashMap<u64, Arc<[u8]>>,
    /// Blocks that no version counts of any more, those of `blocks` excepted: they are not in it.
    pub revokes: Vec<u64>,
}

/// What the guest's new tail means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TailMove {
    /// Transactions before this sequence number have left the log.
    Passed(u32),
    /// The log begins anew: nothing that was in it counts.
    Anew,
}

/// The log of one file system while it is open.
#[derive(Debug)]
pub(crate) struct LogStream {
    format: Format,
    /// Where the live log begins.
    tail: Tail,
    /// Where the next transaction begins.
    cursor: Tail,
    /// Beginnings of the transactions between the two.
    live: VecDeque<Tail>,
    copies: HashMap<u32, Arc<[u8]>>,
    copies_max: usize,
    /// A block came that may complete a transaction.
    may_accept: bool,
    /// When the guest says that it committed last: seconds and nanoseconds.
    committed_at: (u64, u32),
    /// How far the transaction at the cursor was looked through before it is complete.
    ahead: Ahead,
    /// How far it was followed.
    parsed: Option<Parsed>,
    /// Log blocks of the transaction that was accepted last, with their digests, where somebody wants to know.
    last: Vec<(u32, u64)>,
    remembers_last: bool,
    /// How many blocks were looked at for that.
    #[cfg(test)]
    pub looked_at: std::cell::Cell<u64>,
}

/// What a worker that died has left of a log that it followed; each as it is in [`LogStream`].
#[derive(Debug)]
pub(in crate::nvm) struct LeftLog {
    pub format: Format,
    pub tail: Tail,
    pub cursor: Tail,
    pub live: VecDeque<Tail>,
    pub copies: HashMap<u32, Arc<[u8]>>,
    pub committed_at: (u64, u32),
    pub last: Vec<(u32, u64)>,
}

/// See [`LogStream::ahead`].
#[derive(Debug, Default)]
struct Ahead {
    /// Of which transaction; another one is looked through from its beginning.
    of: Option<Tail>,
    /// Where to go on.
    position: u32,
    /// Tags whose data blocks follow there.
    tags: VecDeque<Tag>,
    /// Log blocks passed.
    blocks: u32,
    /// It is no transaction, or has ended.
    is_over: bool,
}

/// No room for another copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overflow;

impl LogStream {
    pub fn new(format: Format, tail: Tail, copies_max: usize) -> Self {
        LogStream {
            format,
            tail,
            cursor: tail,
            live: VecDeque::new(),
            copies: HashMap::new(),
            copies_max,
            may_accept: false,
            committed_at: (0, 0),
            ahead: Ahead::default(),
            parsed: None,
            last: Vec::new(),
            remembers_last: false,
            #[cfg(test)]
            looked_at: std::cell::Cell::default(),
        }
    }

    /// The log of which a worker that died has left this.
    pub(in crate::nvm) fn left(left: LeftLog, copies_max: usize) -> Self {
        LogStream {
            cursor: left.cursor,
            live: left.live,
            copies: left.copies,
            may_accept: true,
            committed_at: left.committed_at,
            last: left.last,
            remembers_last: true,
            ..LogStream::new(left.format, left.tail, copies_max)
        }
    }

    /// Keeps digests of the log blocks of the transaction that was accepted last.
    pub fn remember_last(mut self) -> Self {
        self.remembers_last = true;
        self
    }

    /// These.
    pub fn last(&self) -> &[(u32, u64)] {
        &self.last
    }

    pub fn format(&self) -> &Format {
        &self.format
    }

    /// The oldest transaction that is in the guest's log.
    pub fn tail(&self) -> Tail {
        self.tail
    }

    /// The next transaction.
    pub fn cursor(&self) -> Tail {
        self.cursor
    }

    /// The guest has written a log block (not the superblock).
    pub fn write(&mut self, position: u32, block: Arc<[u8]>) -> Result<(), Overflow> {
        if self.copies.len() >= self.copies_max && !self.copies.contains_key(&position) {
            return Err(Overflow);
        }
        self.may_accept = true;
        if self.parsed.as_ref().is_some_and(|parsed| parsed.has_passed(&self.format, position)) {
            // What is known of the transaction is of another block.
            self.parsed = None;
        }
        self.copies.insert(position, block);
        Ok(())
    }

    /// All log blocks that were written and belong to no accepted transaction yet, by position.
    pub fn copies(&self) -> impl Iterator<Item = (u32, &Arc<[u8]>)> {
        self.copies.iter().map(|(position, block)| (*position, block))
    }

    /// A log block that was written and belongs to no accepted transaction yet.
    pub fn read(&self, position: u32) -> Option<&Arc<[u8]>> {
        self.copies.get(&position)
    }

    /// The guest says where its log begins now.
    pub fn move_tail(&mut self, tail: Tail) -> TailMove {
        if tail == self.tail {
            return TailMove::Passed(tail.sequence);
        }
        if jbd2::sequence::is_after(self.tail.sequence, tail.sequence) {
            // What the guest still has in its log is known as home; nothing is lost by not going back.
            return TailMove::Passed(self.tail.sequence);
        }
        if let Some(count) = self.live.iter().position(|begin| *begin == tail) {
            self.live.drain(..count);
        } else if tail == self.cursor {
            self.live.clear();
        } else {
            self.live.clear();
            self.copies.clear();
            self.parsed = None;
            (self.tail, self.cursor) = (tail, tail);
            return TailMove::Anew;
        }
        self.tail = tail;
        TailMove::Passed(tail.sequence)
    }

    /// Where the live transactions begin that come before this tail.
    pub fn before(&self, tail: Tail) -> Vec<Tail> {
        match self.live.iter().position(|begin| *begin == tail) {
            Some(count) => self.live.iter().take(count).copied().collect(),
            None if tail == self.cursor => self.live.iter().copied().collect(),
            None => Vec::new(),
        }
    }

    /// A tail that was moved to this transaction could not be: those before it are live again.
    pub fn tail_stays(&mut self, moved_to: u32, before: Vec<Tail>) {
        let is_next = before.last().is_some_and(|last| last.sequence.wrapping_add(1) == moved_to);
        if !is_next || self.tail.sequence != moved_to {
            return;
        }
        before.into_iter().rev().for_each(|begin| self.live.push_front(begin));
        self.tail = self.live.front().copied().unwrap_or(self.cursor);
    }

    /// Whether the log can begin there now: with a transaction that is in it, or with the next.
    pub fn can_begin(&self, tail: Tail) -> bool {
        tail == self.cursor || self.live.contains(&tail)
    }

    /// Whether a block of a transaction that is in the log lies there. No kernel writes to it before it has moved its tail.
    pub fn is_live(&self, position: u32) -> bool {
        let format = &self.format;
        let live = format.distance(self.tail.position, self.cursor.position);
        format.contains(position) && format.distance(self.tail.position, position) < live
    }

    /// The log begins anew, perhaps with another layout: nothing that was in it counts.
    pub fn begin_anew(&mut self, format: Format, tail: Tail) {
        *self = LogStream { remembers_last: self.remembers_last, ..LogStream::new(format, tail, self.copies_max) };
    }

    /// The live log ends here: the guest has closed it.
    pub fn forget_live(&mut self) {
        self.live.clear();
        self.tail = self.cursor;
    }

    /// What the last commit block says of the time.
    pub fn committed_at(&self) -> (u64, u32) {
        self.committed_at
    }

    /// Where the live transactions begin, and the position after each.
    pub fn live(&self) -> impl Iterator<Item = (Tail, u32)> {
        let ends = self.live.iter().skip(1).chain([&self.cursor]).map(|next| next.position);
        self.live.iter().copied().zip(ends)
    }

    /// Whether all of the next transaction is there.
    pub fn is_next_complete(&mut self) -> bool {
        if !self.may_accept {
            return false;
        }
        match self.parse() {
            Some(parsed) => self.parsed = Some(parsed),
            None => self.may_accept = false,
        }
        self.may_accept
    }

    /// The next transaction, if all of it is there.
    pub fn accept(&mut self, is_home: &dyn Fn(u64) -> bool) -> Option<Transaction> {
        if !self.may_accept {
            return None;
        }
        let parsed = self.parse();
        let Some(parsed) = parsed else {
            self.may_accept = false;
            return None;
        };
        let sequence = self.cursor.sequence;
        let mut blocks = HashMap::with_capacity(parsed.tags.len());
        for (position, tag) in &parsed.tags {
            let Some(copy) = self.copies.get(position) else { continue };
            // What a replay would skip is no version of anything.
            if !is_home(tag.block) || !jbd2::data_checksum_ok(&self.format, sequence, tag.checksum, copy) {
                log::warn!(
                    "transaction {sequence}: log block {position} is not a good version of block {}; it is ignored",
                    tag.block
                );
                continue;
            }
            blocks.insert(tag.block, unescaped(tag, copy));
        }
        for block in &parsed.revokes {
            // A copy in the revoking transaction itself is revoked too.
            blocks.remove(block);
        }
        let mut position = self.cursor.position;
        self.last.clear();
        while position != parsed.next {
            if let Some(copy) = self.copies.remove(&position).filter(|_| self.remembers_last) {
                self.last.push((position, digest_of(&copy)));
            }
            position = self.format.next(position);
        }
        self.live.push_back(self.cursor);
        self.committed_at = parsed.committed_at;
        self.cursor = Tail { position: parsed.next, sequence: sequence.wrapping_add(1) };
        Some(Transaction { sequence, blocks, revokes: parsed.revokes.into_iter().collect() })
    }

    /// What the transaction at the cursor, which is not complete, will probably commit: each home block once its data is in
    /// the log, in the log's order. None of it counts: the transaction may never be complete, or take it back.
    pub fn ahead(&mut self, is_home: &dyn Fn(u64) -> bool, mut found: impl FnMut(u64, Arc<[u8]>)) {
        let sequence = self.cursor.sequence;
        if self.ahead.of != Some(self.cursor) {
            self.ahead = Ahead { of: Some(self.cursor), position: self.cursor.position, ..Ahead::default() };
        }
        let ahead = &mut self.ahead;
        while !ahead.is_over && ahead.blocks < self.format.log_blocks() && self.format.contains(ahead.position) {
            let Some(block) = self.copies.get(&ahead.position) else { return };
            if let Some(tag) = ahead.tags.pop_front() {
                if is_home(tag.block) && jbd2::data_checksum_ok(&self.format, sequence, tag.checksum, block) {
                    found(tag.block, unescaped(&tag, block));
                }
            } else {
                let kind = jbd2::peek(block).filter(|header| header.sequence == sequence).map(|header| header.kind);
                match kind {
                    Some(Kind::Descriptor) => {
                        let descriptor = Descriptor::new(&self.format, block);
                        ahead.is_over = !descriptor.checksum_ok();
                        ahead.tags.extend(descriptor.tags());
                    }
                    Some(Kind::Revoke) => {}
                    _ => ahead.is_over = true,
                }
            }
            ahead.position = self.format.next(ahead.position);
            ahead.blocks += 1;
        }
    }

    /// Follows the transaction at the cursor, from where it was followed to before; nothing when something of it is missing or wrong.
    fn parse(&mut self) -> Option<Parsed> {
        let cursor = self.cursor;
        let known = self.parsed.take().filter(|parsed| parsed.begin == cursor);
        let mut parsed = known.unwrap_or_else(|| Parsed::begin(cursor));
        let end = self.follow(&mut parsed);
        match end {
            Some(()) => Some(parsed),
            None => {
                self.parsed = Some(parsed);
                None
            }
        }
    }

    /// Follows a transaction as far as it is there and right; something if that is to its end.
    fn follow(&self, parsed: &mut Parsed) -> Option<()> {
        let format = &self.format;
        let before = u64::from(format.distance(self.tail.position, self.cursor.position));
        if parsed.is_over {
            return Some(());
        }
        loop {
            let position = parsed.next;
            // A log that runs into its own beginning is not a log.
            if !format.contains(position) || before + u64::from(parsed.blocks) + 1 >= u64::from(format.log_blocks()) {
                return None;
            }
            let block = self.copies.get(&position)?;
            #[cfg(test)]
            self.looked_at.set(self.looked_at.get() + 1);
            if let Some(tag) = parsed.expected.pop_front() {
                parsed.checksum = self.add(parsed.checksum, block);
                parsed.tags.push((position, tag));
                parsed.pass(format);
                continue;
            }
            let header = jbd2::peek(block).filter(|header| header.sequence == self.cursor.sequence)?;
            match header.kind {
                Kind::Descriptor => {
                    let descriptor = Descriptor::new(format, block);
                    if !descriptor.checksum_ok() {
                        return None;
                    }
                    parsed.checksum = self.add(parsed.checksum, block);
                    parsed.expected.extend(descriptor.tags());
                }
                Kind::Revoke => {
                    let revoke = Revoke::new(format, block);
                    if !revoke.checksum_ok() {
                        return None;
                    }
                    parsed.revokes.extend(revoke.records().ok()?);
                }
                Kind::Commit => {
                    let commit = Commit::new(format, block);
                    let is_right = match format.checksum {
                        Checksum::V1 => commit.transaction_checksum_ok(parsed.checksum),
                        _ => commit.checksum_ok(),
                    };
                    if !is_right {
                        return None;
                    }
                    parsed.committed_at = (commit.seconds(), commit.nanoseconds());
                    parsed.is_over = true;
                    parsed.pass(format);
                    return Some(());
                }
                Kind::SuperblockV1 | Kind::SuperblockV2 | Kind::Unknown(_) => return None,
            }
            parsed.pass(format);
        }
    }

    /// Adds a block to jbd2's first kind of checksum, which runs over descriptors and data.
    fn add(&self, checksum: u32, block: &[u8]) -> u32 {
        if self.format.checksum == Checksum::V1 { jbd2::crc32_be(checksum, block) } else { checksum }
    }
}

/// What a log block is known by that is expected once more.
pub(crate) fn digest_of(block: &[u8]) -> u64 {
    let (first, second) = block.split_at(block.len() / 2);
    u64::from(crc32c::crc32c(first)) << 32 | u64::from(crc32c::crc32c(second))
}

/// A home block's content from its log block.
fn unescaped(tag: &Tag, copy: &Arc<[u8]>) -> Arc<[u8]> {
    if !tag.escaped {
        return Arc::clone(copy);
    }
    let mut content = copy.to_vec();
    content[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
    Arc::from(content)
}

/// How far a transaction was followed: what has been passed is not looked at again.
#[derive(Debug)]
struct Parsed {
    /// Where it begins.
    begin: Tail,
    /// Blocks passed, and the position after them.
    blocks: u32,
    next: u32,
    /// Tags whose data blocks follow there.
    expected: VecDeque<Tag>,
    /// jbd2's first kind of checksum so far.
    checksum: u32,
    tags: Vec<(u32, Tag)>,
    revokes: HashSet<u64>,
    committed_at: (u64, u32),
    /// To its commit block.
    is_over: bool,
}

impl Parsed {
    fn begin(begin: Tail) -> Self {
        Parsed {
            begin,
            blocks: 0,
            next: begin.position,
            expected: VecDeque::new(),
            checksum: !0,
            tags: Vec::new(),
            revokes: HashSet::new(),
            committed_at: (0, 0),
            is_over: false,
        }
    }

    fn pass(&mut self, format: &Format) {
        self.blocks += 1;
        self.next = format.next(self.next);
    }

    fn has_passed(&self, format: &Format, position: u32) -> bool {
        format.contains(position) && format.distance(self.begin.position, position) < self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jbd2::build::{self, SuperblockBuilder, TagSpec};
    use jbd2::{Features, Superblock};

    const BLOCK: usize = 1024;

    fn format(checksum: Checksum) -> Format {
        let features = Features { compat: 0, incompat: Features::REVOKE | Features::WIDE, ro_compat: 0 };
        let builder =
            SuperblockBuilder { block_size: BLOCK as u32, maxlen: 64, features, ..SuperblockBuilder::default() };
        Superblock::parse(&builder.checksum(checksum).build()).expect("valid").1
    }

    struct Writer {
        format: Format,
        stream: LogStream,
        at: u32,
        sequence: u32,
    }

    impl Writer {
        fn new(checksum: Checksum) -> Self {
            let format = format(checksum);
            let tail = Tail { position: format.first, sequence: 5 };
            Writer { format, stream: LogStream::new(format, tail, 1000), at: format.first, sequence: 5 }
        }

        /// The blocks of a transaction, in order of the log.
        fn transaction(&self, blocks: &[(u64, Vec<u8>)], revokes: &[u64]) -> Vec<Vec<u8>> {
            let mut log = Vec::new();
            if !revokes.is_empty() {
                log.push(build::revoke(&self.format, self.sequence, revokes));
            }
            let logged: Vec<(u64, Vec<u8>, bool)> = blocks
                .iter()
                .map(|(block, data)| {
                    let escaped = jbd2::is_escaped_content(data);
                    let mut data = data.clone();
                    if escaped {
                        data[..4].fill(0);
                    }
                    (*block, data, escaped)
                })
                .collect();
            let tags: Vec<TagSpec<'_>> = logged
                .iter()
                .map(|(block, data, escaped)| TagSpec { block: *block, data, escaped: *escaped, with_uuid: false })
                .collect();
            let mut sum = !0;
            if !tags.is_empty() {
                let descriptor = build::descriptor(&self.format, self.sequence, &tags);
                sum = jbd2::crc32_be(sum, &descriptor);
                log.push(descriptor);
            }
            for (_, data, _) in &logged {
                sum = jbd2::crc32_be(sum, data);
                log.push(data.clone());
            }
            log.push(build::commit(&self.format, self.sequence, 0, 0, Some(sum)));
            log
        }

        fn write(&mut self, log: Vec<Vec<u8>>) {
            for block in log {
                self.stream.write(self.at, Arc::from(block)).expect("room");
                self.at = self.format.next(self.at);
            }
            self.sequence += 1;
        }
    }

    #[test]
    fn transactions_come_out_whole_and_in_order_round_the_end() {
        for checksum in [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3] {
            let mut writer = Writer::new(checksum);
            let mut magic = vec![7; BLOCK];
            magic[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
            for round in 0..40u64 {
                let blocks = [(round, vec![round as u8; BLOCK]), (100, magic.clone()), (round + 200, vec![1; BLOCK])];
                let log = writer.transaction(&blocks, &[round + 200, 300 + round]);
                writer.write(log);
                let accepted = writer.stream.accept(&|_| true).expect("accepted");
                assert_eq!(accepted.sequence, 5 + round as u32);
                assert_eq!(accepted.blocks.len(), 2, "what is revoked in the transaction itself is not in it");
                assert_eq!(&accepted.blocks[&100][..], &magic[..]);
                assert_eq!(&accepted.blocks[&round][..], &[round as u8; BLOCK][..]);
                assert_eq!(accepted.revokes.len(), 2);
                assert!(writer.stream.accept(&|_| true).is_none());
                let cursor = writer.stream.cursor();
                assert_eq!(writer.stream.move_tail(cursor), TailMove::Passed(6 + round as u32));
                assert!(writer.stream.copies.is_empty());
            }
        }
    }

    #[test]
    fn what_is_seen_ahead_is_what_is_accepted() {
        for checksum in [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3] {
            let mut writer = Writer::new(checksum);
            let mut magic = vec![7; BLOCK];
            magic[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
            // Round the log's end, too.
            for round in 0..40u64 {
                let blocks = [(round, vec![round as u8; BLOCK]), (100, magic.clone()), (1 << 40, vec![1; BLOCK])];
                let mut seen = HashMap::new();
                for block in writer.transaction(&blocks, &[300 + round]) {
                    writer.stream.write(writer.at, Arc::from(block)).expect("room");
                    writer.at = writer.format.next(writer.at);
                    writer.stream.ahead(&|block| block < 1000, |block, content| {
                        assert!(seen.insert(block, content).is_none(), "block {block} is seen once");
                    });
                }
                writer.sequence += 1;
                let accepted = writer.stream.accept(&|block| block < 1000).expect("accepted");
                assert_eq!(seen, accepted.blocks);
                let cursor = writer.stream.cursor();
                writer.stream.move_tail(cursor);
            }
        }
    }

    #[test]
    fn nothing_is_seen_ahead_behind_a_gap_or_a_damaged_descriptor() {
        let mut writer = Writer::new(Checksum::V3);
        let mut log = writer.transaction(&[(1, vec![1; BLOCK]), (2, vec![2; BLOCK])], &[]);
        let first = writer.format.first;
        let mut seen = Vec::new();
        for index in [0, 2, 3] {
            writer.stream.write(first + index, Arc::from(log[index as usize].as_slice())).expect("room");
            writer.stream.ahead(&|_| true, |block, _| seen.push(block));
        }
        assert_eq!(seen, [0; 0]);
        writer.stream.write(first + 1, Arc::from(log[1].as_slice())).expect("room");
        writer.stream.ahead(&|_| true, |block, _| seen.push(block));
        assert_eq!(seen, [1, 2]);
        let mut writer = Writer::new(Checksum::V3);
        log[0][20] ^= 1;
        writer.write(log);
        writer.stream.ahead(&|_| true, |block, _| panic!("block {block} is seen through a damaged descriptor"));
    }

    #[test]
    fn nothing_is_accepted_that_jbd2_would_not_accept() {
        for checksum in [Checksum::V1, Checksum::V2, Checksum::V3] {
            let writer = Writer::new(checksum);
            let log = writer.transaction(&[(1, vec![1; BLOCK]), (2, vec![2; BLOCK])], &[9]);
            for (missing, _) in log.iter().enumerate() {
                let mut writer = Writer::new(checksum);
                for (index, block) in log.iter().enumerate() {
                    if index != missing {
                        let position = writer.format.first + index as u32;
                        writer.stream.write(position, Arc::from(block.as_slice())).expect("room");
                    }
                    assert!(writer.stream.accept(&|_| true).is_none(), "block {missing} is missing");
                }
                // In whatever order they come.
                let position = writer.format.first + missing as u32;
                writer.stream.write(position, Arc::from(log[missing].as_slice())).expect("room");
                assert!(writer.stream.accept(&|_| true).is_some());
            }
        }
        // A damaged data block is skipped, a damaged control block ends the log.
        let writer = Writer::new(Checksum::V3);
        let log = writer.transaction(&[(1, vec![1; BLOCK]), (2, vec![2; BLOCK])], &[9]);
        for damaged in 0..log.len() {
            let mut writer = Writer::new(Checksum::V3);
            let mut blocks = log.clone();
            blocks[damaged][BLOCK / 2] ^= 1;
            writer.write(blocks);
            let accepted = writer.stream.accept(&|_| true);
            let is_data = (2..4).contains(&damaged);
            assert_eq!(accepted.map(|transaction| transaction.blocks.len()), is_data.then_some(1), "block {damaged}");
        }
    }

    #[test]
    fn blocks_outside_the_file_system_are_ignored_and_copies_are_bounded() {
        let mut writer = Writer::new(Checksum::V3);
        let log = writer.transaction(&[(1, vec![1; BLOCK]), (u64::MAX >> 8, vec![2; BLOCK])], &[]);
        writer.write(log);
        let accepted = writer.stream.accept(&|block| block < 100).expect("accepted");
        assert_eq!(accepted.blocks.keys().copied().collect::<Vec<_>>(), [1]);
        let mut stream = LogStream::new(format(Checksum::None), Tail { position: 1, sequence: 1 }, 2);
        assert_eq!(stream.write(1, Arc::from([0; BLOCK])), Ok(()));
        assert_eq!(stream.write(2, Arc::from([0; BLOCK])), Ok(()));
        assert_eq!(stream.write(3, Arc::from([0; BLOCK])), Err(Overflow));
        assert_eq!(stream.write(2, Arc::from([1; BLOCK])), Ok(()));
    }

    #[test]
    fn a_log_full_of_descriptors_is_not_followed_for_ever() {
        let mut writer = Writer::new(Checksum::None);
        let log = writer.transaction(&[(1, vec![1; BLOCK])], &[]);
        for position in writer.format.first..writer.format.last {
            let block = if position % 2 == writer.format.first % 2 { &log[0] } else { &log[1] };
            writer.stream.write(position, Arc::from(block.as_slice())).expect("room");
        }
        assert!(writer.stream.accept(&|_| true).is_none());
    }

    #[test]
    fn a_block_that_is_written_again_counts_as_it_is_now() {
        for checksum in [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3] {
            let blocks = [(1, vec![1; BLOCK]), (2, vec![2; BLOCK]), (3, vec![3; BLOCK])];
            let changed = [(1, vec![1; BLOCK]), (4, vec![4; BLOCK]), (3, vec![3; BLOCK])];
            let (log, other) = {
                let writer = Writer::new(checksum);
                (writer.transaction(&blocks, &[9]), writer.transaction(&changed, &[8]))
            };
            for followed in 1..log.len() {
                let mut writer = Writer::new(checksum);
                let first = writer.format.first;
                for (index, block) in log[..followed].iter().enumerate() {
                    writer.stream.write(first + index as u32, Arc::from(block.as_slice())).expect("room");
                    assert!(writer.stream.accept(&|_| true).is_none());
                }
                for (index, block) in other.iter().enumerate() {
                    writer.stream.write(first + index as u32, Arc::from(block.as_slice())).expect("room");
                }
                let accepted = writer.stream.accept(&|_| true).expect("accepted");
                assert_eq!(accepted.blocks.len(), 3);
                assert_eq!(accepted.blocks.get(&4).map(|content| content[0]), Some(4), "after {followed} blocks");
                assert_eq!(accepted.revokes, [8]);
            }
        }
    }

    #[test]
    fn each_block_is_looked_at_once_however_its_transaction_comes() {
        for checksum in [Checksum::V1, Checksum::V3] {
            let mut writer = Writer::new(checksum);
            let blocks: Vec<(u64, Vec<u8>)> = (0..50).map(|block| (block, vec![block as u8; BLOCK])).collect();
            let log = writer.transaction(&blocks, &[99]);
            let count = log.len() as u64;
            for block in log {
                assert!(writer.stream.accept(&|_| true).is_none());
                writer.stream.write(writer.at, Arc::from(block)).expect("room");
                writer.at = writer.format.next(writer.at);
            }
            assert!(writer.stream.accept(&|_| true).is_some());
            assert_eq!(writer.stream.looked_at.get(), count);
        }
    }

    #[test]
    fn a_tail_that_is_nowhere_begins_the_log_anew() {
        let mut writer = Writer::new(Checksum::V3);
        for round in 0..4u64 {
            let log = writer.transaction(&[(round, vec![1; BLOCK])], &[]);
            writer.write(log);
            writer.stream.accept(&|_| true).expect("accepted");
        }
        let second = Tail { position: writer.format.first + 3, sequence: 6 };
        assert_eq!(writer.stream.move_tail(second), TailMove::Passed(6));
        assert_eq!(writer.stream.tail(), second);
        let back = Tail { position: writer.format.first, sequence: 5 };
        assert_eq!(writer.stream.move_tail(back), TailMove::Passed(6), "a tail does not go back");
        let nowhere = Tail { position: 40, sequence: 77 };
        assert_eq!(writer.stream.move_tail(nowhere), TailMove::Anew);
        assert_eq!(writer.stream.cursor(), nowhere);
    }
}
