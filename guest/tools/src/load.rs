//! The papers' plain loads: a sequential append, random writes, a source tree unpacked. They make
//! traffic; they promise nothing and acknowledge nothing.

use crate::options::Options;
use crate::random::Random;
use crate::{Result, at};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// `guest-tools append --file F [--mib N] [--write-bytes N] [--sync]`: the paper's seq_write, 8 KB
/// appended at a time (600 MB there).
pub fn append(mut options: Options) -> Result<()> {
    let path = PathBuf::from(options.required("file")?);
    let total = options.number("mib", 16, 1..=1 << 20)? * MIB;
    let write_bytes = options.number("write-bytes", 8192, 1..=1 << 24)?;
    let sync = options.flag("sync");
    options.finish()?;
    let started = Instant::now();
    let mut file = File::create(&path).map_err(at("create", &path))?;
    let mut bytes = vec![0; usize::try_from(write_bytes).expect("bounded above")];
    Random::new(1).fill(&mut bytes);
    let mut written = 0u64;
    while written < total {
        // Distinct content in every write, so that a misplaced block shows.
        let stamp = written.to_le_bytes();
        let length = bytes.len().min(stamp.len());
        bytes[..length].copy_from_slice(&stamp[..length]);
        file.write_all(&bytes).map_err(at("write", &path))?;
        written += write_bytes;
    }
    finish(&file, &path, sync)?;
    tell("append", written, started);
    Ok(())
}

/// `guest-tools randwrite --file F [--file-mib N] [--mib N] [--seed N] [--fsync-every N] [--existing] [--sync]`:
/// the paper's rnd_write, 4 KB at random places (128 MB into 512 MB there). The file is made anew, without blocks,
/// unless it is `--existing`.
pub fn random_write(mut options: Options) -> Result<()> {
    const BLOCK: usize = 4096;
    let path = PathBuf::from(options.required("file")?);
    let blocks = options.number("file-mib", 16, 1..=1 << 20)? * MIB / BLOCK as u64;
    let writes = options.number("mib", 4, 1..=1 << 20)? * MIB / BLOCK as u64;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let every = options.number("fsync-every", 0, 0..=u64::MAX)?;
    let existing = options.flag("existing");
    let sync = options.flag("sync");
    options.finish()?;
    let started = Instant::now();
    let file = if existing { File::options().write(true).open(&path) } else { File::create(&path) }
        .map_err(at("open", &path))?;
    file.set_len(blocks * BLOCK as u64).map_err(at("set the length of", &path))?;
    let mut random = Random::new(seed);
    let mut bytes = vec![0; BLOCK];
    for write in 1..=writes {
        let block = random.below(blocks);
        random.fill(&mut bytes[..64]);
        file.write_all_at(&bytes, block * BLOCK as u64).map_err(at("write", &path))?;
        if every != 0 && write % every == 0 {
            file.sync_data().map_err(at("fdatasync", &path))?;
        }
    }
    finish(&file, &path, sync)?;
    tell("randwrite", writes * BLOCK as u64, started);
    Ok(())
}

/// `guest-tools untar --directory D [--files N] [--seed N] [--sync]`: a tree like the paper's Linux
/// 2.6.11 sources (17,090 files of 6 bytes to 853 KB, 231 MB, in 1,083 directories), scaled: the
/// sizes are log-normal with that mean and those bounds.
pub fn untar(mut options: Options) -> Result<()> {
    let root = PathBuf::from(options.required("directory")?);
    let files = options.number("files", 1000, 1..=1_000_000)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let sync = options.flag("sync");
    options.finish()?;
    let started = Instant::now();
    let mut written = 0;
    let mut directories = vec![root];
    let root = directories[0].clone();
    std::fs::create_dir_all(&root).map_err(at("create", &root))?;
    let mut bytes = vec![0; 853 << 10];
    Random::new(seed).fill(&mut bytes);
    let mut last = None;
    for number in 0..files {
        let mut random = Random::of(seed, number);
        // 16 files a directory, as in that tree.
        if number % 16 == 15 {
            let parent = pick(&directories, &mut random);
            let path = parent.join(format!("directory-{number}"));
            std::fs::create_dir(&path).map_err(at("create", &path))?;
            directories.push(path);
        }
        let path = pick(&directories, &mut random).join(format!("file-{number}"));
        let size = source_file_bytes(&mut random);
        let start = usize::try_from(random.below((bytes.len() - size + 1) as u64)).unwrap_or(0);
        let mut file = File::create(&path).map_err(at("create", &path))?;
        file.write_all(&bytes[start..start + size]).map_err(at("write", &path))?;
        written += size as u64;
        last = Some((file, path));
    }
    if let Some((file, path)) = last {
        if sync {
            rustix::fs::syncfs(&file).map_err(|error| format!("cannot sync: {error}"))?;
        }
        finish(&file, &path, false)?;
    }
    tell("untar", written, started);
    Ok(())
}

fn pick<'a>(directories: &'a [PathBuf], random: &mut Random) -> &'a Path {
    let index = usize::try_from(random.below(directories.len() as u64)).unwrap_or(0);
    &directories[index]
}

/// Log-normal with median 5.3 KB and sigma 1.39, hence a mean of 13.9 KB; the normal is the sum of
/// twelve uniforms.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn source_file_bytes(random: &mut Random) -> usize {
    let normal: f64 = (0..12).map(|_| random.below(1 << 32) as f64 / 4_294_967_296.0).sum::<f64>() - 6.0;
    let bytes = 5300.0 * (normal * 1.39).exp();
    bytes.clamp(6.0, f64::from(853 << 10)) as usize
}

fn finish(file: &File, path: &Path, sync: bool) -> Result<()> {
    if sync { file.sync_all().map_err(at("fsync", path)) } else { Ok(()) }
}

#[allow(clippy::cast_precision_loss)]
fn tell(name: &str, bytes: u64, started: Instant) {
    println!("{name}: {bytes} bytes in {:.3} s", started.elapsed().as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_like_the_papers() {
        let mut random = Random::new(1);
        let sizes: Vec<usize> = (0..17_090).map(|_| source_file_bytes(&mut random)).collect();
        let mean = sizes.iter().sum::<usize>() / sizes.len();
        assert!((12_000..16_000).contains(&mean), "231 MB in 17090 files is 13.9 KB a file, not {mean}");
    }

    #[test]
    fn loads_write_what_they_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let options = |words: String| Options::parse(words.split(' ').map(str::to_owned)).unwrap();
        let file = directory.path().join("file");
        append(options(format!("--file {} --mib 2", file.display()))).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 2 * MIB);
        random_write(options(format!("--file {} --file-mib 3 --mib 1 --sync", file.display()))).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 3 * MIB);
        let tree = directory.path().join("tree");
        untar(options(format!("--directory {} --files 100", tree.display()))).unwrap();
        assert!(std::fs::read_dir(tree).unwrap().count() > 10);
    }
}
