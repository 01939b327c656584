//! Reading and writing the little-endian fields of frames and records, with every bound checked.

/// Reads fields one after the other; nothing at all once one is cut short.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from the beginning of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    /// One byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A string of bytes after its length (two bytes).
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.array().map(u16::from_le_bytes)?;
        self.take(len.into())
    }

    /// Text after its length (two bytes).
    pub fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    /// What has not been read.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Whether everything has been read.
    pub fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }
}

/// Appends a string of bytes after its length (two bytes); what is longer than that can say is cut.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(usize::from(u16::MAX))];
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}
