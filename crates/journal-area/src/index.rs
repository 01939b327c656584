//! Finds log blocks by a number: by the home block that they are the newest version of, and by the page that they are in.
//!
//! A number is first sent through a keyed function that has an inverse, so that the numbers of a file are as good as drawn by lot, and a
//! guest, who does not know the key, cannot aim. What comes out says where the entry is: its lowest bits which bucket, its highest ones
//! which of the bucket's cells. So an entry need not keep those. It keeps the bits between, and the log block: of a log of 128 MiB on a
//! file system of 2 GiB these are 4 and 15. How many entries each cell has is said in unary, a bit for each entry and one for each cell.
//! Together that is less than three bytes an entry, where the numbers alone would take as many.
//!
//! A table that is made anew when it grows would take up to twice its need, under the log's lock while a guest waits. This one grows
//! and shrinks by one bucket at a time (linear hashing): entering splits one, taking out joins two. In a bucket the entries are in the
//! order of what the key made of them, without the bits of the bucket, so that one that is split keeps its order.
//!
//! Must never: panic on, or loop over, anything a guest can bring about. A number has at most one log block: entering another one is refused.

use std::hash::{BuildHasher, RandomState};

/// Cells a bucket, as bits of what the key made of a number.
const CELL_BITS: u32 = 8;
const CELLS: usize = 1 << CELL_BITS;
/// Entries a bucket, on average, at most: one a cell. Buckets are joined when there are half as many. In one that has not been split there
/// may be twice as many.
const ENTRIES_A_BUCKET: usize = CELLS;
/// Buckets for which the list of them grows at a time.
const BUCKETS_MORE: usize = 16;
/// A bucket grows by 16 bytes, and has 8 more: as memory is given out.
const WORDS_MORE: usize = 2;
/// There are never fewer bits of a number: beside those of bucket and cell.
const NUMBER_BITS_MIN: u32 = 16;
const ROUNDS: usize = 4;

/// Which log block has a number, for numbers each of which has at most one.
#[derive(Debug)]
pub struct Index {
    /// Log blocks have lower numbers.
    positions: u32,
    position_bits: u32,
    /// Numbers are below two to this.
    number_bits: u32,
    keys: [(u64, u64); ROUNDS],
    buckets: Vec<Bucket>,
    len: usize,
    /// Of all buckets' words.
    words: usize,
}

/// Entries in their order. In its words are first as many ones as a cell has entries, and a zero, for each cell; then, from where that ends
/// when it is full, the entries: the bits that are left of the number, the log block.
#[derive(Debug, Default)]
struct Bucket {
    words: Box<[u64]>,
    len: usize,
}

/// What an entry of a bucket is made of.
#[derive(Clone, Copy, Debug)]
struct Widths {
    /// Bits of the number that are neither the bucket's nor the cell's.
    rest: u32,
    position: u32,
}

/// Where a number is in its bucket.
#[derive(Clone, Copy, Debug)]
struct Place {
    cell: usize,
    rest: u64,
}

impl Index {
    /// No entry yet, for a log of `positions` blocks and numbers below `bound`. Takes no memory until there is one.
    pub fn new(positions: u32, bound: u64) -> Self {
        let random = RandomState::new();
        let keys = std::array::from_fn(|round| (random.hash_one((round, 0)), random.hash_one((round, 1)) | 1));
        let position_bits = bits(u64::from(positions.saturating_sub(1)));
        // Of a log's blocks as many as a bucket has are in one, so that there are always bits for the cell.
        let number_bits = bits(bound.saturating_sub(1)).max(position_bits + 2).max(NUMBER_BITS_MIN);
        Index { positions, position_bits, number_bits, keys, buckets: Vec::new(), len: 0, words: 0 }
    }

    fn round(&self, round: usize, half: u64) -> u64 {
        let (added, factor) = self.keys[round];
        let product = u128::from(half ^ added) * u128::from(factor);
        product as u64 ^ (product >> 64) as u64
    }

    /// The keyed function: a Feistel network, whose halves need not be of one size.
    fn permuted(&self, number: u64) -> u64 {
        let low_bits = self.number_bits / 2;
        let (low_mask, high_mask) = (mask(low_bits), mask(self.number_bits - low_bits));
        let (mut low, mut high) = (number & low_mask, number >> low_bits & high_mask);
        for round in 0..ROUNDS {
            if round % 2 == 0 {
                high ^= self.round(round, low) & high_mask;
            } else {
                low ^= self.round(round, high) & low_mask;
            }
        }
        high << low_bits | low
    }

    /// Its inverse.
    fn number_of(&self, permuted: u64) -> u64 {
        let low_bits = self.number_bits / 2;
        let (low_mask, high_mask) = (mask(low_bits), mask(self.number_bits - low_bits));
        let (mut low, mut high) = (permuted & low_mask, permuted >> low_bits & high_mask);
        for round in (0..ROUNDS).rev() {
            if round % 2 == 0 {
                high ^= self.round(round, low) & high_mask;
            } else {
                low ^= self.round(round, high) & low_mask;
            }
        }
        high << low_bits | low
    }

    /// The bucket of what the key made of a number: as many of its lowest bits as there are buckets for, or one less.
    fn bucket_of(&self, permuted: u64) -> usize {
        let low = 1 << self.buckets.len().ilog2();
        let index = permuted as usize & (2 * low - 1);
        if index < self.buckets.len() { index } else { index & (low - 1) }
    }

    /// How many bits a bucket's number has.
    fn level(&self, bucket: usize) -> u32 {
        let level = self.buckets.len().ilog2();
        let low = 1 << level;
        level + u32::from(bucket >= low || bucket + low < self.buckets.len())
    }

    fn widths(&self, level: u32) -> Widths {
        Widths { rest: self.number_bits - level - CELL_BITS, position: self.position_bits }
    }

    /// Where a number is, if it is one and there are buckets.
    fn place(&self, number: u64) -> Option<(usize, Widths, Place)> {
        if self.buckets.is_empty() || !self.can_have(number) {
            return None;
        }
        let permuted = self.permuted(number);
        let bucket = self.bucket_of(permuted);
        let level = self.level(bucket);
        let widths = self.widths(level);
        Some((bucket, widths, Place::of(permuted >> level, widths)))
    }

    /// Whether a number is one that there can be without more bits for all of them.
    pub fn can_have(&self, number: u64) -> bool {
        bits(number) <= self.number_bits
    }

    /// The log block that has this number.
    pub fn find(&self, number: u64) -> Option<u32> {
        let (bucket, widths, place) = self.place(number)?;
        self.buckets[bucket].find(widths, place).ok().map(|(_, position)| position)
    }

    /// Enters a log block. False, and nothing is changed, when its number has one already, or when the log has no such block.
    pub fn insert(&mut self, number: u64, position: u32) -> bool {
        if position >= self.positions {
            return false;
        }
        if !self.can_have(number) {
            self.widen(bits(number));
        }
        if self.buckets.is_empty() {
            self.add_bucket(Bucket::default());
        }
        let Some((bucket, widths, place)) = self.place(number) else { return false };
        let bucket = &mut self.buckets[bucket];
        let Err(bit) = bucket.find(widths, place) else { return false };
        let before = bucket.words.len();
        bucket.insert(widths, place, bit, position);
        self.words = self.words - before + bucket.words.len();
        self.len += 1;
        if self.len > self.buckets.len() * ENTRIES_A_BUCKET {
            self.split();
        }
        true
    }

    /// Takes a log block out. False when it does not have this number.
    pub fn remove(&mut self, number: u64, position: u32) -> bool {
        let Some((bucket, widths, place)) = self.place(number) else { return false };
        let bucket = &mut self.buckets[bucket];
        let Some((bit, _)) = bucket.find(widths, place).ok().filter(|(_, there)| *there == position) else {
            return false;
        };
        let before = bucket.words.len();
        bucket.remove(widths, place, bit);
        self.words = self.words - before + bucket.words.len();
        self.len -= 1;
        self.join_where_few();
        true
    }

    /// Takes all out that are not to stay, in one pass.
    pub fn retain(&mut self, mut stays: impl FnMut(u32) -> bool) {
        for bucket in 0..self.buckets.len() {
            let mut entries = self.entries(bucket);
            entries.retain(|(_, position)| stays(*position));
            if entries.len() < self.buckets[bucket].len {
                self.len -= self.buckets[bucket].len - entries.len();
                let widths = self.widths(self.level(bucket));
                self.exchange(bucket, Bucket::of(widths, &entries));
            }
        }
        while self.join_where_few() {}
    }

    fn add_bucket(&mut self, bucket: Bucket) {
        if self.buckets.len() == self.buckets.capacity() {
            self.buckets.reserve_exact(BUCKETS_MORE);
        }
        self.words += bucket.words.len();
        self.buckets.push(bucket);
    }

    fn exchange(&mut self, index: usize, bucket: Bucket) {
        self.words += bucket.words.len();
        let old = std::mem::replace(&mut self.buckets[index], bucket);
        self.words -= old.words.len();
    }

    /// A bucket's entries, in their order: what is left of the number without the bucket's bits, and the log block.
    fn entries(&self, bucket: usize) -> Vec<(u64, u32)> {
        self.buckets[bucket].entries(self.widths(self.level(bucket)))
    }

    /// Makes one more bucket, of those entries of an older one that belong there.
    fn split(&mut self) {
        let level = self.buckets.len().ilog2();
        let older = self.buckets.len() - (1 << level);
        let entries = self.entries(older);
        let widths = self.widths(level + 1);
        let part = |bit: u64| {
            let part = entries.iter().filter(|(rest, _)| rest & 1 == bit);
            Bucket::of(widths, &part.map(|(rest, position)| (rest >> 1, *position)).collect::<Vec<_>>())
        };
        let (stay, go) = (part(0), part(1));
        self.exchange(older, stay);
        self.add_bucket(go);
    }

    /// Lets the bucket that was made last go back into the one that it came from, where there are few entries. Says whether it has.
    fn join_where_few(&mut self) -> bool {
        if self.buckets.len() < 2 || self.len >= self.buckets.len() * ENTRIES_A_BUCKET / 2 {
            if self.len == 0 {
                (self.buckets, self.words) = (Vec::new(), 0);
            }
            return false;
        }
        let youngest = self.buckets.len() - 1;
        let level = youngest.ilog2();
        let older = youngest - (1 << level);
        let mut entries: Vec<(u64, u32)> = self.entries(older).into_iter().map(|(rest, at)| (rest << 1, at)).collect();
        entries.extend(self.entries(youngest).into_iter().map(|(rest, at)| (rest << 1 | 1, at)));
        entries.sort_unstable();
        self.exchange(youngest, Bucket::default());
        self.buckets.pop();
        if self.buckets.capacity() > self.buckets.len() + 2 * BUCKETS_MORE {
            self.buckets.shrink_to(self.buckets.len() + BUCKETS_MORE);
        }
        let joined = Bucket::of(self.widths(level), &entries);
        self.exchange(older, joined);
        true
    }

    /// Numbers have so many bits from now on, where that is more than it was. What there is stays. The key makes something else of each
    /// then, so each is entered anew, but bucket by bucket: there are never two tables of all entries.
    fn widen(&mut self, number_bits: u32) {
        let mut wider = Index { number_bits, buckets: Vec::new(), len: 0, words: 0, ..*self };
        for bucket in 0..self.buckets.len() {
            let level = self.level(bucket);
            for (rest, position) in self.entries(bucket) {
                wider.insert(self.number_of(rest << level | bucket as u64), position);
            }
            self.exchange(bucket, Bucket::default());
        }
        *self = wider;
    }

    /// The same for numbers below `bound`.
    pub fn widen_to(&mut self, bound: u64) {
        if bits(bound.saturating_sub(1)) > self.number_bits {
            self.widen(bits(bound.saturating_sub(1)));
        }
    }

    /// All entries, in no order: number and log block.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        (0..self.buckets.len()).flat_map(move |bucket| {
            let level = self.level(bucket);
            let number = move |rest: u64| self.number_of(rest << level | bucket as u64);
            self.entries(bucket).into_iter().map(move |(rest, position)| (number(rest), position))
        })
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Takes all out and gives the memory back.
    pub fn clear(&mut self) {
        (self.buckets, self.len, self.words) = (Vec::new(), 0, 0);
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        (self.words * size_of::<u64>() + self.buckets.capacity() * size_of::<Bucket>()) as u64
    }

    /// Checks what is known of all; what is wrong, as a sentence. Costs time: for tests.
    pub fn check(&self) -> Result<(), String> {
        let words: usize = self.buckets.iter().map(|bucket| bucket.words.len()).sum();
        let len: usize = self.buckets.iter().map(|bucket| bucket.len).sum();
        if (words, len) != (self.words, self.len) {
            return Err(format!("an index has {len} entries in {words} words, not {} in {}", self.len, self.words));
        }
        match self.iter().find(|(number, position)| self.find(*number) != Some(*position)) {
            Some((number, position)) => Err(format!("log block {position} is not found by its number {number}")),
            None => Ok(()),
        }
    }
}

impl Widths {
    fn entry(self) -> usize {
        (self.rest + self.position) as usize
    }
}

impl Place {
    /// Of a number without its bucket's bits.
    fn of(rest: u64, widths: Widths) -> Self {
        Place { cell: (rest >> widths.rest) as usize, rest: rest & mask(widths.rest) }
    }
}

impl Bucket {
    /// Of entries in their order.
    fn of(widths: Widths, entries: &[(u64, u32)]) -> Self {
        let mut bucket = Bucket { words: words_for(widths, entries.len()), len: entries.len() };
        let at = bucket.entries_at(widths);
        for (index, (rest, position)) in entries.iter().enumerate() {
            let place = Place::of(*rest, widths);
            put(&mut bucket.words, index + place.cell, 1, 1);
            bucket.put_entry(widths, at, index, place.rest, *position);
        }
        bucket
    }

    /// How many entries there is room for.
    fn capacity(&self, widths: Widths) -> usize {
        (self.words.len() * 64).saturating_sub(CELLS) / (widths.entry() + 1)
    }

    /// The bit at which the entries begin.
    fn entries_at(&self, widths: Widths) -> usize {
        CELLS + self.capacity(widths)
    }

    fn put_entry(&mut self, widths: Widths, at: usize, index: usize, rest: u64, position: u32) {
        let at = at + index * widths.entry();
        put(&mut self.words, at, widths.rest, rest);
        put(&mut self.words, at + widths.rest as usize, widths.position, u64::from(position));
    }

    /// The bit that stands for an entry, and its log block; or the bit that would.
    fn find(&self, widths: Widths, place: Place) -> Result<(usize, u32), usize> {
        if self.len == 0 {
            return Err(place.cell);
        }
        let at = self.entries_at(widths);
        let mut bit = if place.cell == 0 { 0 } else { nth_zero(&self.words, place.cell - 1) + 1 };
        while get(&self.words, bit, 1) == 1 {
            let entry = at + (bit - place.cell) * widths.entry();
            let rest = get(&self.words, entry, widths.rest);
            if rest == place.rest {
                let position = get(&self.words, entry + widths.rest as usize, widths.position);
                return Ok((bit, position as u32));
            }
            if rest > place.rest {
                break;
            }
            bit += 1;
        }
        Err(bit)
    }

    fn insert(&mut self, widths: Widths, place: Place, bit: usize, position: u32) {
        if self.len == self.capacity(widths) {
            self.resize(widths, self.len + 1);
        }
        let (at, index, entry) = (self.entries_at(widths), bit - place.cell, widths.entry());
        move_up(&mut self.words, at + index * entry, at + self.len * entry, entry);
        self.put_entry(widths, at, index, place.rest, position);
        move_up(&mut self.words, bit, self.len + CELLS, 1);
        put(&mut self.words, bit, 1, 1);
        self.len += 1;
    }

    fn remove(&mut self, widths: Widths, place: Place, bit: usize) {
        let (at, index, entry) = (self.entries_at(widths), bit - place.cell, widths.entry());
        move_down(&mut self.words, at + (index + 1) * entry, at + self.len * entry, entry);
        move_down(&mut self.words, bit + 1, self.len + CELLS, 1);
        put(&mut self.words, self.len + CELLS - 1, 1, 0);
        self.len -= 1;
        // Not at once, so that what comes and goes does not move all the time.
        if self.len == 0 || self.words.len() > words_for_count(widths, self.len) + 2 * WORDS_MORE {
            self.resize(widths, self.len);
        }
    }

    /// Makes room for so many entries, and no more than memory is given out by.
    fn resize(&mut self, widths: Widths, count: usize) {
        let resized = Bucket { words: words_for(widths, count), len: self.len };
        let old = std::mem::replace(self, resized);
        if self.len == 0 {
            return;
        }
        copy(&old.words, 0, &mut self.words, 0, CELLS + self.len);
        let at = self.entries_at(widths);
        copy(&old.words, old.entries_at(widths), &mut self.words, at, self.len * widths.entry());
    }

    /// All entries: the number without the bucket's bits, and the log block.
    fn entries(&self, widths: Widths) -> Vec<(u64, u32)> {
        let mut entries = Vec::with_capacity(self.len);
        let (mut cell, mut bit) = (0, 0);
        let mut at = self.entries_at(widths);
        while entries.len() < self.len {
            if get(&self.words, bit, 1) == 0 {
                cell += 1;
            } else {
                let rest = get(&self.words, at, widths.rest);
                let position = get(&self.words, at + widths.rest as usize, widths.position);
                entries.push((cell << widths.rest | rest, position as u32));
                at += widths.entry();
            }
            bit += 1;
        }
        entries
    }
}

/// How many words a bucket of so many entries takes: an odd number, since memory comes in 16 bytes and 8 of these are not ours.
fn words_for_count(widths: Widths, count: usize) -> usize {
    if count == 0 { 0 } else { (CELLS + count * (widths.entry() + 1)).div_ceil(64) | 1 }
}

fn words_for(widths: Widths, count: usize) -> Box<[u64]> {
    vec![0; words_for_count(widths, count)].into()
}

/// How many bits a number has.
fn bits(number: u64) -> u32 {
    u64::BITS - number.leading_zeros()
}

/// So many ones.
fn mask(bits: u32) -> u64 {
    if bits == 0 { 0 } else { u64::MAX >> (64 - bits) }
}

fn get(words: &[u64], at: usize, width: u32) -> u64 {
    if width == 0 {
        return 0;
    }
    let (index, shift) = (at / 64, (at % 64) as u32);
    let mut value = words[index] >> shift;
    if shift + width > 64 {
        value |= words[index + 1] << (64 - shift);
    }
    value & mask(width)
}

fn put(words: &mut [u64], at: usize, width: u32, value: u64) {
    if width == 0 {
        return;
    }
    let (index, shift) = (at / 64, (at % 64) as u32);
    words[index] = words[index] & !(mask(width) << shift) | value << shift;
    if shift + width > 64 {
        words[index + 1] = words[index + 1] & !(mask(width) >> (64 - shift)) | value >> (64 - shift);
    }
}

/// The bit of the `count`-th zero, counted from 0, which there has to be.
fn nth_zero(words: &[u64], mut count: usize) -> usize {
    for (index, word) in words.iter().enumerate() {
        let mut ones = !word;
        let zeros = ones.count_ones() as usize;
        if count >= zeros {
            count -= zeros;
            continue;
        }
        let mut bit = index * 64;
        for width in [32, 16, 8] {
            let here = (ones & mask(width)).count_ones() as usize;
            if count >= here {
                count -= here;
                ones >>= width;
                bit += width as usize;
            }
        }
        for _ in 0..count {
            ones &= ones - 1;
        }
        return bit + ones.trailing_zeros() as usize;
    }
    words.len() * 64
}

/// Bits from `from` to `to` go up by so many. Those that they leave say nothing.
fn move_up(words: &mut [u64], from: usize, to: usize, by: usize) {
    if from == to {
        return;
    }
    let (whole, shift) = (by / 64, (by % 64) as u32);
    let (first, last) = ((from + by) / 64, (to + by - 1) / 64);
    let (first_word, last_word) = (words[first], words[last]);
    for index in (first..=last).rev() {
        let from_this = if index >= whole { words[index - whole] } else { 0 };
        let from_before = if index > whole { words[index - whole - 1] } else { 0 };
        words[index] = if shift == 0 { from_this } else { from_this << shift | from_before >> (64 - shift) };
    }
    keep_edges(words, (from + by, first_word), (to + by, last_word));
}

/// Bits from `from` to `to` go down by so many.
fn move_down(words: &mut [u64], from: usize, to: usize, by: usize) {
    if from == to {
        return;
    }
    let (whole, shift) = (by / 64, (by % 64) as u32);
    let (first, last) = ((from - by) / 64, (to - by - 1) / 64);
    let (first_word, last_word) = (words[first], words[last]);
    for index in first..=last {
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        let (from_this, from_behind) = (word(index + whole), word(index + whole + 1));
        words[index] = if shift == 0 { from_this } else { from_this >> shift | from_behind << (64 - shift) };
    }
    keep_edges(words, (from - by, first_word), (to - by, last_word));
}

/// Puts back what is below the first bit in its word, and from the second one on in its word.
fn keep_edges(words: &mut [u64], (first, first_word): (usize, u64), (end, last_word): (usize, u64)) {
    let below = mask((first % 64) as u32);
    words[first / 64] = words[first / 64] & !below | first_word & below;
    if end % 64 != 0 {
        let here = mask((end % 64) as u32);
        words[end / 64] = words[end / 64] & here | last_word & !here;
    }
}

fn copy(source: &[u64], mut from: usize, target: &mut [u64], mut to: usize, len: usize) {
    let mut left = len;
    while left > 0 {
        let width = left.min(64);
        put(target, to, width as u32, get(source, from, width as u32));
        (from, to, left) = (from + width, to + width, left - width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn an_empty_index_takes_nothing() {
        let mut index = Index::new(1000, 1 << 20);
        assert_eq!((index.memory_bytes(), index.find(7), index.remove(7, 3), index.len()), (0, None, false, 0));
        assert!(index.insert(7, 3));
        assert!(index.memory_bytes() < 500, "{} bytes", index.memory_bytes());
        assert!(!index.insert(7, 4), "it has a log block already");
        assert!(!index.insert(8, 1000), "not of this log");
        assert_eq!((index.find(7), index.remove(7, 4), index.remove(7, 3)), (Some(3), false, true));
        assert_eq!((index.memory_bytes(), index.find(7)), (0, None));
        assert!(!Index::new(0, 0).insert(0, 0), "a log without blocks is no harm");
    }

    #[test]
    fn what_the_key_makes_of_numbers_can_be_undone_and_is_spread() {
        for bound in [1, 1 << 16, (1 << 19) + 5, 1 << 29, 1 << 33, 1 << 48, u64::MAX] {
            let index = Index::new(1 << 15, bound);
            for number in (0..1000).map(|step| (bound / 1000) * step).chain([bound - 1]) {
                assert_eq!(index.number_of(index.permuted(number)), number);
                assert!(bits(index.permuted(number)) <= index.number_bits);
            }
        }
        // Neighbours, and numbers at the same distances.
        for step in [1, 8, 11, 4096] {
            let mut index = Index::new(1 << 15, 1 << 28);
            assert!((0..1 << 15).all(|position| index.insert(u64::from(position) * step, position)));
            let most = index.buckets.iter().map(|bucket| bucket.len).max();
            assert!(most < Some(2 * ENTRIES_A_BUCKET + 200), "{most:?} of a step of {step}");
        }
    }

    /// Bytes an entry of logs that are full, and that nothing is left when they are empty.
    #[test]
    fn an_entry_takes_few_bytes_and_gives_them_back() {
        for (positions, home_bits, most) in
            [(32_768, 19, 2.9), (32_768, 29, 4.2), (262_144, 19, 3.0), (262_144, 40, 6.0)]
        {
            let mut index = Index::new(positions, 1 << home_bits);
            let number = |position: u32| (u64::from(position) * 11) & mask(home_bits);
            let entered = (0..positions).filter(|position| index.insert(number(*position), *position)).count();
            let an_entry = index.memory_bytes() as f64 / entered as f64;
            println!("{positions} log blocks, {home_bits} bits: {an_entry:.2} bytes an entry");
            assert!(an_entry <= most, "{an_entry} bytes an entry of {home_bits} bits");
            index.check().expect("as it is said to be");
            (0..positions - 100).for_each(|position| _ = index.remove(number(position), position));
            assert!(index.memory_bytes() < 2500, "{} bytes of {}", index.memory_bytes(), index.len());
            index.retain(|_| false);
            assert_eq!((index.memory_bytes(), index.len()), (0, 0));
        }
    }

    /// Whoever makes room for longer numbers must not need two tables for it.
    #[test]
    fn a_file_system_that_grows_does_not_need_two_tables() {
        let mut index = Index::new(262_144, 1 << 22);
        assert!((0..262_144).all(|position| index.insert(u64::from(position) * 7, position)));
        let before = index.memory_bytes();
        index.widen_to(1 << 40);
        assert!(index.memory_bytes() > before);
        assert_eq!(index.find(7 * 1000), Some(1000));
        assert!(index.insert((1 << 40) - 1, 0));
        index.widen_to(1 << 22);
        assert_eq!(index.find((1 << 40) - 1), Some(0));
        index.check().expect("as it is said to be");
    }

    #[test]
    fn bits_move_up_and_down() {
        for (from, to, by) in [
            (0, 1, 1),
            (3, 200, 1),
            (63, 64, 1),
            (64, 128, 64),
            (5, 250, 19),
            (100, 101, 74),
            (0, 256, 66),
            (190, 230, 26),
        ] {
            let before: Vec<u64> = (1..=6u64).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
            let bit = |words: &[u64], at: usize| get(words, at, 1);
            let mut words = before.clone();
            move_up(&mut words, from, to, by);
            for at in 0..words.len() * 64 {
                let source = if (from + by..to + by).contains(&at) { at - by } else { at };
                let is_left = (from..(from + by).min(to)).contains(&at);
                assert!(is_left || bit(&words, at) == bit(&before, source), "bit {at} of {from}..{to} by {by}");
            }
            move_down(&mut words, from + by, to + by, by);
            (0..from).chain(to + by..384).for_each(|at| assert_eq!(bit(&words, at), bit(&before, at)));
            (from..to).for_each(|at| assert_eq!(bit(&words, at), bit(&before, at), "bit {at} of {from}..{to} by {by}"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn it_is_a_map(
            shape in prop_oneof![Just((3000u32, 1u64 << 19)), Just((40_000, 1 << 16)), Just((1 << 26, 1 << 48)), Just((2900, 1 << 33))],
            steps in proptest::collection::vec((0u64..3000, 0u32..3000, 0u8..10, 1u64..1200), 1..40),
        ) {
            let (positions, bound) = shape;
            let mut index = Index::new(positions, bound);
            let mut model: BTreeMap<u64, u32> = BTreeMap::new();
            for (first, position, what, count) in steps {
                for step in 0..count {
                    let (number, position) = ((first + step) * (bound / 5000) % bound, (position + step as u32) % 3000);
                    if what < 6 {
                        let is_new = position < positions && !model.contains_key(&number);
                        prop_assert_eq!(index.insert(number, position), is_new);
                        if is_new {
                            model.insert(number, position);
                        }
                    } else if what < 8 {
                        let there = model.remove(&number);
                        prop_assert_eq!(index.remove(number, there.unwrap_or(position)), there.is_some());
                    }
                }
                match what {
                    8 => {
                        index.retain(|there| there % 3 != position % 3);
                        model.retain(|_, there| *there % 3 != position % 3);
                    }
                    9 => index.widen_to(bound * (1 + first % 5)),
                    _ => {}
                }
                prop_assert_eq!(index.len(), model.len());
                let mut all: Vec<(u64, u32)> = index.iter().collect();
                all.sort_unstable();
                prop_assert!(all.into_iter().eq(model.iter().map(|(number, position)| (*number, *position))));
                prop_assert_eq!(index.check(), Ok(()));
                prop_assert!(index.find(bound - 1).is_none() || model.contains_key(&(bound - 1)));
            }
        }
    }
}
