//! The bytes of a group on their way to a segment. They begin where direct I/O can take them from: at a multiple of
//! [`ALIGNMENT`] in memory.

/// What direct I/O asks of addresses, offsets and lengths, in bytes; no disk asks for more.
pub(super) const ALIGNMENT: usize = 4096;

/// A buffer that begins at a multiple of [`ALIGNMENT`].
#[derive(Debug, Default)]
pub(super) struct Staging {
    bytes: Vec<u8>,
    /// Where the content begins.
    start: usize,
}

impl Staging {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    pub fn extend(&mut self, more: &[u8]) {
        self.make_room_for(more.len());
        self.bytes.extend_from_slice(more);
    }

    /// Appends zeros up to a multiple of this.
    pub fn pad_to(&mut self, multiple: usize) {
        let len = self.len().next_multiple_of(multiple);
        self.make_room_for(len - self.len());
        self.bytes.resize(self.start + len, 0);
    }

    /// Drops the first bytes.
    pub fn drop_first(&mut self, bytes: usize) {
        self.bytes.copy_within(self.start + bytes.., self.start);
        self.bytes.truncate(self.bytes.len() - bytes);
    }

    /// After this the buffer may grow so far without being moved to where it might begin elsewhere.
    fn make_room_for(&mut self, more: usize) {
        if self.bytes.len() + more <= self.bytes.capacity() {
            return;
        }
        let capacity = (2 * self.len()).max(self.len() + more) + ALIGNMENT;
        let mut bytes: Vec<u8> = Vec::with_capacity(capacity);
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        bytes.resize(start, 0);
        bytes.extend_from_slice(self.bytes());
        (self.bytes, self.start) = (bytes, start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stays_aligned_however_it_grows() {
        let mut staging = Staging::default();
        let mut model = Vec::new();
        for round in 0..200_usize {
            let more = vec![round as u8; round * 97 % 9000];
            staging.extend(&more);
            model.extend_from_slice(&more);
            staging.pad_to(64);
            model.resize(model.len().next_multiple_of(64), 0);
            if round % 7 == 6 {
                let whole = staging.len() / ALIGNMENT * ALIGNMENT;
                staging.drop_first(whole);
                model.drain(..whole);
            }
            assert_eq!(staging.bytes(), model);
            assert!(staging.len() == 0 || staging.bytes().as_ptr().addr().is_multiple_of(ALIGNMENT));
        }
        staging.drop_first(staging.len());
        assert_eq!(staging.len(), 0);
    }
}
