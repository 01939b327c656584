//! Wild writes: garbage over metadata in the guest's own page cache, as a stray pointer in its
//! kernel would leave it.
//!
//! Debian's cloud kernel is built with `CONFIG_STRICT_DEVMEM`, so `/dev/mem` does not reach RAM.
//! The page cache of the *block device* does: ext4 keeps its metadata buffers there, the very
//! pages that jbd2 has written to the journal, and a buffered write to the mounted device changes
//! them in place, behind the file system's back. Only blocks that are in the cache anyway are
//! worth scribbling on; the host names them.
//!
//! The garbage must never be written back: the tool turns the kernel's writeback off first, and
//! the host kills the guest when it reads the mark.

use crate::options::Options;
use crate::random::Random;
use crate::report::{CHANNEL, Report};
use crate::{Result, at};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

/// `guest-tools scribble --device /dev/vda --blocks N,N,A-B [--block-bytes N] [--report FILE]`:
/// tells `mark scribbled` when done.
pub fn run(mut options: Options) -> Result<()> {
    let device = options.required("device")?;
    let block_bytes = options.number("block-bytes", 4096, 512..=65536)?;
    let blocks = parse_blocks(&options.required("blocks")?)?;
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    options.finish()?;
    let mut report = Report::open(&channel, "scribble")?;
    for (name, value) in
        [("dirty_writeback_centisecs", "0"), ("dirty_expire_centisecs", "360000"), ("dirty_background_ratio", "90")]
    {
        let path = format!("/proc/sys/vm/{name}");
        std::fs::write(&path, value).map_err(at("write", &path))?;
    }
    let file = OpenOptions::new().write(true).open(&device).map_err(at("open", &device))?;
    let mut garbage = vec![0; usize::try_from(block_bytes).expect("bounded above")];
    Random::new(0xdead).fill(&mut garbage);
    for (first, last) in blocks {
        for block in first..=last {
            file.write_all_at(&garbage, block.saturating_mul(block_bytes)).map_err(at("write", &device))?;
        }
    }
    report.mark("scribbled")?;
    // Closing the device would write its dirty pages back: hold it until the host's kill.
    loop {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
}

/// "5,7-9" is 5..=5 and 7..=9.
fn parse_blocks(text: &str) -> Result<Vec<(u64, u64)>> {
    text.split(',')
        .map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.parse(), last.parse()) {
                (Ok(first), Ok(last)) if first <= last => Ok((first, last)),
                _ => Err(format!("'{part}' is no block number or range of them")),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_lists_are_read() {
        assert_eq!(parse_blocks("5,7-9"), Ok(vec![(5, 5), (7, 9)]));
        assert!(parse_blocks("9-7").is_err() && parse_blocks("").is_err());
    }
}
