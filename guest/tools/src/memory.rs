//! Memory of a program, written and read for as long as the guest runs: whatever the host does to the pages below it (makes huge ones of them, moves
//! them, swaps them out, protects some of them), they have to read as they were written.
//!
//! The memory is given back and taken anew again and again, so that a page is the page cache's at one time and this program's at another.

use crate::Result;
use crate::options::Options;
use crate::random::Random;
use crate::report::{CHANNEL, DAMAGED, Report};
use std::time::Duration;

const PAGE_BYTES: usize = 4096;
/// How often all pages are looked at before they are given back.
const LOOKS: u64 = 8;
/// After so many pages the other programs have their turn.
const PAGES_AT_ONCE: usize = 256;
const PAUSE: Duration = Duration::from_millis(10);

/// `guest-tools memory [--mib N] [--seed N] [--looks N] [--report FILE]`: acknowledges each look at all of the memory on the stream `memory`, from 1;
/// without `--looks` there is no last one. A page that is not as it was written is told as a mark, and ends it.
pub fn run(mut options: Options) -> Result<()> {
    let mib = options.number("mib", 8, 1..=1 << 12)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let looks = options.number("looks", u64::MAX, 1..=u64::MAX)?;
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    options.finish()?;
    let mut report = Report::open(&channel, "memory")?;
    let mut random = Random::new(seed);
    let count = (mib << 20) as usize / PAGE_BYTES;
    let mut pages = Pages::new(count, &mut random);
    for look in 1..=looks {
        if let Err(problem) = pages.look(&mut random) {
            report.mark(&format!("{DAMAGED} memory of a program: {problem}"))?;
            return Err(problem);
        }
        report.acknowledge(look)?;
        if look % LOOKS == 0 {
            // Not both at once.
            drop(std::mem::take(&mut pages));
            pages = Pages::new(count, &mut random);
        }
    }
    Ok(())
}

/// Pages, and from what their content follows.
#[derive(Debug, Default)]
struct Pages {
    bytes: Vec<u8>,
    stamps: Vec<u64>,
}

impl Pages {
    fn new(count: usize, random: &mut Random) -> Self {
        let mut pages = Self { bytes: vec![0; count * PAGE_BYTES], stamps: vec![0; count] };
        (0..count).for_each(|page| pages.write(page, random.bits()));
        pages
    }

    fn write(&mut self, page: usize, stamp: u64) {
        Random::new(stamp).fill(&mut self.bytes[page * PAGE_BYTES..(page + 1) * PAGE_BYTES]);
        self.stamps[page] = stamp;
    }

    /// Reads all pages, and writes some of them anew.
    fn look(&mut self, random: &mut Random) -> Result<()> {
        for page in 0..self.stamps.len() {
            // What was written is really read.
            std::hint::black_box(&mut self.bytes);
            self.check(page)?;
            if random.below(4) == 0 {
                self.write(page, random.bits());
            }
            if page % PAGES_AT_ONCE == 0 {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn check(&self, page: usize) -> Result<()> {
        let mut expected = [0; PAGE_BYTES];
        Random::new(self.stamps[page]).fill(&mut expected);
        let found = &self.bytes[page * PAGE_BYTES..(page + 1) * PAGE_BYTES];
        let Some(at) = expected.iter().zip(found).position(|(one, other)| one != other) else { return Ok(()) };
        let is_empty = found.iter().all(|byte| *byte == 0);
        let how = if is_empty { "is zeroes".to_owned() } else { format!("differs from byte {at} on") };
        Err(format!("page {page} {how}, and was not written since"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_not_as_it_was_written_is_seen() {
        let mut random = Random::new(3);
        let mut pages = Pages::new(5, &mut random);
        assert_eq!((0..3).try_for_each(|_| pages.look(&mut random)), Ok(()));
        pages.bytes[2 * PAGE_BYTES + 9] ^= 1;
        assert_eq!(pages.look(&mut random), Err("page 2 differs from byte 9 on, and was not written since".to_owned()));
        pages.bytes[2 * PAGE_BYTES..3 * PAGE_BYTES].fill(0);
        assert_eq!(pages.check(2), Err("page 2 is zeroes, and was not written since".to_owned()));
    }

    #[test]
    fn each_look_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let told = directory.path().join("told");
        std::fs::write(&told, "").unwrap();
        let words = format!("--mib 1 --looks 2 --report {}", told.display());
        run(Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
        assert_eq!(std::fs::read_to_string(&told).unwrap(), "ack memory 1\nack memory 2\n");
    }
}
