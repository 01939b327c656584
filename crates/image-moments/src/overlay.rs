//! A qcow2 image (version 3) that has some blocks of its own, and the rest from a backing file. Written once, front to back: the header's
//! cluster, clusters of data, then the tables. Format: QEMU's `docs/interop/qcow2.txt`.
//!
//! Until [`Overlay::finish`] there is no header, and the file is no image.

use crate::BLOCK_BYTES;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const MAGIC: u32 = 0x5146_49fb;
const CLUSTER_BITS: u32 = BLOCK_BYTES.trailing_zeros();
const HEADER_BYTES: u32 = 104;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
/// A cluster with one reference.
const COPIED: u64 = 1 << 63;
/// A cluster of zeros that takes no room.
const ZERO: u64 = 1;
const ENTRIES_IN_L2: u64 = BLOCK_BYTES / 8;
/// References have 16 bits.
const REFERENCES_IN_BLOCK: u64 = BLOCK_BYTES / 2;
const REFCOUNT_ORDER: u32 = 4;
/// The format's own bound.
const BACKING_BYTES_MAX: usize = 1023;

/// Where the rest is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// The file.
    pub path: PathBuf,
    /// Whether it is such an image itself, or raw.
    pub is_overlay: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Overlay {
    file: File,
    size_bytes: u64,
    base: Base,
    /// The cluster of each block that it has; nothing for zeros.
    clusters: BTreeMap<u64, Option<u64>>,
    /// The first cluster that is free.
    next: u64,
}

impl Overlay {
    /// An image of `size_bytes` in an empty file.
    ///
    /// # Errors
    /// When the name of its base is too long for the format.
    pub fn new(file: File, size_bytes: u64, base: Base) -> io::Result<Self> {
        if base.path.as_os_str().len() > BACKING_BYTES_MAX {
            let problem =
                format!("the path {} is longer than the {BACKING_BYTES_MAX} bytes of qcow2", base.path.display());
            return Err(io::Error::other(problem));
        }
        Ok(Overlay { file, size_bytes, base, clusters: BTreeMap::new(), next: 1 })
    }

    /// Puts a block in, or zeros.
    pub(crate) fn put(&mut self, block: u64, content: Option<&[u8]>) -> io::Result<()> {
        let cluster = match content {
            Some(content) => {
                self.file.write_all_at(content, self.next * BLOCK_BYTES)?;
                self.next += 1;
                Some(self.next - 1)
            }
            None => None,
        };
        self.clusters.insert(block, cluster);
        Ok(())
    }

    /// Has bytes changed that are in its blocks. Says whether it has them; what it does not have, or are zeros, is left alone.
    ///
    /// # Errors
    /// When they cannot be read or written, or it has only a part of them ([`crate::BlockSet::keep_together`]).
    pub fn edit<T>(
        &mut self,
        offset: u64,
        bytes: &mut [u8],
        change: impl FnOnce(&mut [u8]) -> io::Result<T>,
    ) -> io::Result<Option<T>> {
        let touched = crate::blocks(offset, bytes.len() as u64);
        let count = touched.clone().filter(|block| self.clusters.contains_key(block)).count() as u64;
        if count == 0 || touched.clone().all(|block| self.clusters.get(&block) == Some(&None)) {
            return Ok(None);
        }
        if count < touched.end - touched.start {
            return Err(io::Error::other(format!("of {} bytes at byte {offset} only a part is in it", bytes.len())));
        }
        let (mut place, mut rest) = (offset, &mut *bytes);
        while !rest.is_empty() {
            let (block, within) = (place / BLOCK_BYTES, place % BLOCK_BYTES);
            let len = rest.len().min((BLOCK_BYTES - within) as usize);
            let (piece, more) = rest.split_at_mut(len);
            match self.clusters.get(&block) {
                Some(Some(cluster)) => self.file.read_exact_at(piece, cluster * BLOCK_BYTES + within)?,
                _ => piece.fill(0),
            }
            (place, rest) = (place + len as u64, more);
        }
        let changed = change(bytes)?;
        self.write(offset, bytes)?;
        Ok(Some(changed))
    }

    /// Puts bytes into blocks that it has, whatever is there.
    ///
    /// # Errors
    /// When it does not have them, or they cannot be written.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let (block, within) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let len = (bytes.len() - done).min((BLOCK_BYTES - within) as usize);
            let cluster = match self.clusters.get(&block) {
                Some(Some(cluster)) => *cluster,
                Some(None) => {
                    // The file is longer by zeros then.
                    self.next += 1;
                    self.file.set_len(self.next * BLOCK_BYTES)?;
                    self.clusters.insert(block, Some(self.next - 1));
                    self.next - 1
                }
                None => return Err(io::Error::other(format!("the block of byte {at} is not in it"))),
            };
            self.file.write_all_at(&bytes[done..done + len], cluster * BLOCK_BYTES + within)?;
            done += len;
        }
        Ok(())
    }

    /// How many blocks it has of its own.
    pub fn len(&self) -> usize {
        self.clusters.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.clusters.is_empty()
    }

    /// Makes it an image, durably.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self) -> io::Result<()> {
        let blocks = self.size_bytes.div_ceil(BLOCK_BYTES);
        let l1_entries = blocks.div_ceil(ENTRIES_IN_L2).max(1);
        let mut l1 = vec![0u64; l1_entries as usize];
        let mut l2: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (block, cluster) in &self.clusters {
            let table = l2.entry(block / ENTRIES_IN_L2).or_insert_with(|| vec![0; ENTRIES_IN_L2 as usize]);
            table[(block % ENTRIES_IN_L2) as usize] = cluster.map_or(ZERO, |cluster| (cluster * BLOCK_BYTES) | COPIED);
        }
        for (number, table) in l2 {
            l1[number as usize] = (self.next * BLOCK_BYTES) | COPIED;
            self.write_words(&table)?;
        }
        let l1_at = self.next;
        self.write_words(&l1)?;
        // Tables of references, for themselves too.
        let (mut table_clusters, mut reference_blocks) = (1, 1);
        let used = loop {
            let used = self.next + table_clusters + reference_blocks;
            let needed = used.div_ceil(REFERENCES_IN_BLOCK);
            let table = (needed * 8).div_ceil(BLOCK_BYTES);
            if (needed, table) == (reference_blocks, table_clusters) {
                break used;
            }
            (reference_blocks, table_clusters) = (needed, table);
        };
        let table_at = self.next;
        let table: Vec<u64> =
            (0..reference_blocks).map(|number| (table_at + table_clusters + number) * BLOCK_BYTES).collect();
        self.write_words(&table)?;
        for number in 0..reference_blocks {
            let count = (used - number * REFERENCES_IN_BLOCK).min(REFERENCES_IN_BLOCK);
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            bytes[..2 * count as usize].chunks_exact_mut(2).for_each(|pair| pair.copy_from_slice(&1u16.to_be_bytes()));
            self.file.write_all_at(&bytes, self.next * BLOCK_BYTES)?;
            self.next += 1;
        }
        self.file.sync_all()?;
        let header = self.header(l1_at, l1_entries, table_at, table_clusters);
        self.file.write_all_at(&header, 0)?;
        self.file.sync_all()
    }

    /// Writes words into the next clusters, whole.
    fn write_words(&mut self, words: &[u64]) -> io::Result<()> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.resize((bytes.len() as u64).next_multiple_of(BLOCK_BYTES) as usize, 0);
        self.file.write_all_at(&bytes, self.next * BLOCK_BYTES)?;
        self.next += bytes.len() as u64 / BLOCK_BYTES;
        Ok(())
    }

    fn header(&self, l1_at: u64, l1_entries: u64, table_at: u64, table_clusters: u64) -> Vec<u8> {
        let name = self.base.path.as_os_str().as_bytes();
        let format: &[u8] = if self.base.is_overlay { b"qcow2" } else { b"raw" };
        let mut extensions = Vec::new();
        extensions.extend(EXTENSION_BACKING_FORMAT.to_be_bytes());
        extensions.extend((format.len() as u32).to_be_bytes());
        extensions.extend(format);
        extensions.resize(extensions.len().next_multiple_of(8), 0);
        extensions.extend([0; 8]);
        let name_at = u64::from(HEADER_BYTES) + extensions.len() as u64;
        let mut header = Vec::new();
        header.extend(MAGIC.to_be_bytes());
        header.extend(3u32.to_be_bytes());
        header.extend(name_at.to_be_bytes());
        header.extend((name.len() as u32).to_be_bytes());
        header.extend(CLUSTER_BITS.to_be_bytes());
        header.extend(self.size_bytes.to_be_bytes());
        // No encryption.
        header.extend(0u32.to_be_bytes());
        header.extend((l1_entries as u32).to_be_bytes());
        header.extend((l1_at * BLOCK_BYTES).to_be_bytes());
        header.extend((table_at * BLOCK_BYTES).to_be_bytes());
        header.extend((table_clusters as u32).to_be_bytes());
        // No snapshots in it, and no features: incompatible, compatible, to be cleared.
        header.extend([0; 12]);
        header.extend([0; 24]);
        header.extend(REFCOUNT_ORDER.to_be_bytes());
        header.extend(HEADER_BYTES.to_be_bytes());
        debug_assert_eq!(header.len(), HEADER_BYTES as usize);
        header.extend(extensions);
        header.extend(name);
        header
    }
}
