//! The papers' plain loads: a sequential append, random writes, a source tree unpacked. They make
//! traffic; they promise nothing and acknowledge nothing.

use crate::latency::Latencies;
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
/// unless it is `--existing`. With `--fsync-every`, `phase=run` and the latencies of these calls are told.
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
    let mut syncs = Latencies::new();
    let file = if existing { File::options().write(true).open(&path) } else { File::create(&path) }
        .map_err(at("open", &path))?;
    file.set_len(blocks * BLOCK as u64).map_err(at("set the length of", &path))?;
    let mut random = Random::new(seed);
    let mut bytes = vec![0; BLOCK];
    // The whole block: one that ends in zeros looks like one that is being filled, and is treated as such.
    random.fill(&mut bytes);
    for write in 1..=writes {
        let block = random.below(blocks);
        random.fill(&mut bytes[..64]);
        file.write_all_at(&bytes, block * BLOCK as u64).map_err(at("write", &path))?;
        if every != 0 && write % every == 0 {
            syncs.time(|| file.sync_data()).map_err(at("fdatasync", &path))?;
        }
    }
    finish(&file, &path, sync)?;
    tell("randwrite", writes * BLOCK as u64, started);
    if every != 0 {
        println!("phase=run seconds={:.3}{}", started.elapsed().as_secs_f64(), syncs.words("fsync"));
    }
    Ok(())
}

/// The paper's Linux 2.6.11 tree: files, directories (the tree's own among them), and bytes of all files.
pub const TREE_FILES: u64 = 17_090;
const TREE_DIRECTORIES: u64 = 1_083;
const TREE_BYTES: u64 = 231_000_000;
/// Its smallest and its largest file.
const FILE_BYTES_MIN: u64 = 6;
const FILE_BYTES_MAX: u64 = 853 << 10;
/// From so many files on, the smallest and the largest are among them; fewer would be little else.
const FILES_WITH_EXTREMES: usize = 1000;

/// `guest-tools untar --directory D [--files N] [--seed N] [--sync]`: a tree like the paper's Linux
/// 2.6.11 sources (17,090 files of 6 bytes to 853 KB, 231 MB, in 1,083 directories), scaled: sizes are log-normal within those
/// bounds, and come to just as many bytes a file.
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
    let mut bytes = vec![0; usize::try_from(FILE_BYTES_MAX).unwrap_or(0)];
    Random::new(seed).fill(&mut bytes);
    let mut last = None;
    for (number, size) in (0..files).zip(source_file_bytes(files, seed)) {
        let mut random = Random::of(seed, number);
        // Directories come evenly among the files.
        if directories.len() as u64 <= number * directory_count(files) / files {
            let parent = pick(&directories, &mut random);
            let path = parent.join(format!("directory-{number}"));
            std::fs::create_dir(&path).map_err(at("create", &path))?;
            directories.push(path);
        }
        let path = pick(&directories, &mut random).join(format!("file-{number}"));
        let size = usize::try_from(size).unwrap_or(bytes.len()).min(bytes.len());
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

/// Directories of a tree with so many files, its own among them.
fn directory_count(files: u64) -> u64 {
    ((files * TREE_DIRECTORIES + TREE_FILES / 2) / TREE_FILES).max(1)
}

/// Sizes of a tree's files: log-normal with sigma 1.39, brought to the paper's sum exactly.
fn source_file_bytes(files: u64, seed: u64) -> Vec<u64> {
    // The normal is the sum of twelve uniforms. Sizes are drawn apart from names, so that each file's choices stay its own.
    let drawn = (0..files).map(|number| {
        let mut random = Random::of(!seed, number);
        let normal: f64 = (0..12).map(|_| random.below(1 << 32) as f64 / 4_294_967_296.0).sum::<f64>() - 6.0;
        (normal * 1.39).exp()
    });
    let drawn: Vec<f64> = drawn.collect();
    let fixed: &[u64] = if drawn.len() >= FILES_WITH_EXTREMES { &[FILE_BYTES_MIN, FILE_BYTES_MAX] } else { &[] };
    let target = TREE_BYTES * files / TREE_FILES - fixed.iter().sum::<u64>();
    let factor = target as f64 / drawn[fixed.len()..].iter().sum::<f64>();
    let scaled = drawn.iter().map(|size| ((size * factor) as u64).clamp(FILE_BYTES_MIN, FILE_BYTES_MAX));
    let mut sizes: Vec<u64> = scaled.collect();
    sizes[..fixed.len()].copy_from_slice(fixed);
    // What rounding and the bounds took away or gave is made good, a little in every file.
    let (mut less, mut more) = (0, 0);
    match sizes[fixed.len()..].iter().sum::<u64>() {
        sum if sum > target => more = sum - target,
        sum => less = target - sum,
    }
    while less + more > 0 {
        let before = less + more;
        let share = before.div_ceil(files);
        for size in &mut sizes[fixed.len()..] {
            let add = share.min(less).min(FILE_BYTES_MAX - *size);
            let cut = share.min(more).min(*size - FILE_BYTES_MIN);
            *size = *size + add - cut;
            (less, more) = (less - add, more - cut);
        }
        if less + more == before {
            break;
        }
    }
    sizes
}

fn finish(file: &File, path: &Path, sync: bool) -> Result<()> {
    if sync { file.sync_all().map_err(at("fsync", path)) } else { Ok(()) }
}

fn tell(name: &str, bytes: u64, started: Instant) {
    println!("{name}: {bytes} bytes in {:.3} s", started.elapsed().as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_at_full_size_is_the_papers() {
        for seed in [1, 2, 1_000_003] {
            let sizes = source_file_bytes(TREE_FILES, seed);
            assert_eq!((sizes.len(), sizes.iter().sum::<u64>()), (17_090, 231_000_000));
            assert_eq!((sizes.iter().min(), sizes.iter().max()), (Some(&6), Some(&(853 << 10))));
            assert_eq!(directory_count(TREE_FILES), 1_083);
            let mut sorted = sizes;
            sorted.sort_unstable();
            let median = sorted[sorted.len() / 2];
            assert!((4_500..6_500).contains(&median), "most sources are small: a median of {median}");
        }
        for files in [1, 2, 85, 999, 1000, 1709] {
            let bytes: u64 = source_file_bytes(files, 7).iter().sum();
            let expected = (231_000_000 * files / 17_090).min(files * FILE_BYTES_MAX);
            assert_eq!(bytes, expected, "{files} files");
        }
    }

    #[test]
    fn a_tree_has_the_files_directories_and_bytes_of_its_plan() {
        fn count(directory: &Path) -> (u64, u64, u64) {
            let (mut files, mut directories, mut bytes) = (0, 1, 0);
            for entry in std::fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                let metadata = entry.metadata().unwrap();
                if metadata.is_dir() {
                    let inner = count(&entry.path());
                    (files, directories, bytes) = (files + inner.0, directories + inner.1, bytes + inner.2);
                } else {
                    (files, bytes) = (files + 1, bytes + metadata.len());
                }
            }
            (files, directories, bytes)
        }
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        let words = format!("--directory {} --files 1709", tree.display());
        untar(Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
        assert_eq!(count(&tree), (1709, 108, 23_100_000));
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
