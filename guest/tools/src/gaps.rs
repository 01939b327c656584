//! A stream of 4 KB writes, each past the guest's cache or made durable, one after the other; how long the longest wait between two
//! completions was.

use crate::options::Options;
use crate::random::Random;
use crate::report::{CHANNEL, Report};
use crate::{Result, at};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
/// `O_DIRECT` of x86 and RISC-V alike.
const O_DIRECT: i32 = 0o40000;
/// How often the longest gap since the last time is told.
const INTERVAL: Duration = Duration::from_millis(250);

/// `guest-tools gaps --file F [--file-mib N] [--seed N] [--mark WORD] [--durable]`: runs until it is ended; tells `mark WORD MICROSECONDS`
/// four times a second (`gap` if no word is given). With `--durable` each write goes through the cache and is followed by a flush.
pub fn run(mut options: Options) -> Result<()> {
    let path = PathBuf::from(options.required("file")?);
    let blocks = options.number("file-mib", 16, 1..=1 << 20)? * (1 << 20) / BLOCK;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let mark = options.text("mark").unwrap_or_else(|| "gap".to_owned());
    let is_durable = options.flag("durable");
    options.finish()?;
    let mut report = Report::open(CHANNEL, "gaps")?;
    let file = std::fs::File::create(&path).map_err(at("create", &path))?;
    let mut random = Random::new(seed);
    // Direct writes want memory at a multiple of a block.
    let mut memory = vec![0; 2 * BLOCK as usize];
    let begin = memory.as_ptr().align_offset(BLOCK as usize);
    let block = &mut memory[begin..begin + BLOCK as usize];
    random.fill(block);
    for index in 0..blocks {
        file.write_all_at(block, index * BLOCK).map_err(at("write", &path))?;
    }
    file.sync_all().map_err(at("write", &path))?;
    drop(file);
    let flags = if is_durable { 0 } else { O_DIRECT };
    let file = std::fs::File::options().write(true).custom_flags(flags).open(&path).map_err(at("open", &path))?;
    let (mut last, mut told, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
    loop {
        let number = random.below(blocks);
        block[..8].copy_from_slice(&number.to_le_bytes());
        file.write_all_at(block, number * BLOCK).map_err(at("write", &path))?;
        if is_durable {
            file.sync_data().map_err(at("make durable", &path))?;
        }
        let now = Instant::now();
        longest = longest.max(now.duration_since(last));
        last = now;
        if now.duration_since(told) >= INTERVAL {
            report.mark(&format!("{mark} {}", longest.as_micros()))?;
            // Telling is slow, and no disk's fault.
            (told, last, longest) = (now, Instant::now(), Duration::ZERO);
        }
    }
}
