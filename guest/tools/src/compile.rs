//! A load like the compilation of a kernel, without a compiler: reads sources, writes objects, links them. The
//! processor's work is a pause, since only what reaches the disk matters here.
//!
//! Per unit: its source and a few headers are read; `.unit.o.d` (dependencies), `unit.o` in pieces of 4 KB and
//! `.unit.o.cmd` are written, and the `.d` is removed, as the kernel's own makefiles do. Per directory of 16 units
//! the objects are read back and joined into `built-in.o`; at the end those become `vmlinux`, and a part of that
//! `bzImage`. It makes traffic; it promises nothing and acknowledges nothing.

use crate::options::Options;
use crate::random::Random;
use crate::{Result, at};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Units whose objects share a directory.
const UNITS_PER_DIRECTORY: u64 = 16;
/// Headers that a unit includes, and how many there are.
const HEADERS_PER_UNIT: u64 = 12;
const HEADERS: u64 = 1500;
/// Of all bytes written, objects are this share: they are written once each as units, as `built-in.o` and as
/// `vmlinux`, and 0.4 of them as the compressed image.
const OBJECT_SHARE: f64 = 1.0 / 3.4;
const PIECE_BYTES: usize = 4096;

/// `guest-tools compile --sources TREE --objects DIRECTORY [--units N] [--mib N] [--pause-ms N] [--seed N]`: TREE is one
/// that `untar` made; `--mib` is the size of all objects and images together (25 MB in the paper), `--pause-ms`
/// what a unit's compilation takes.
pub fn run(mut options: Options) -> Result<()> {
    let tree = PathBuf::from(options.required("sources")?);
    let objects = PathBuf::from(options.required("objects")?);
    let units = options.number("units", 900, 1..=100_000)?;
    let mib = options.number("mib", 25, 1..=1 << 14)?;
    let pause = Duration::from_millis(options.number("pause-ms", 0, 0..=60_000)?);
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    options.finish()?;

    let mut sources = Vec::new();
    list(&tree, &mut sources)?;
    let count = sources.len() as u64;
    if count == 0 {
        return Err(format!("{} holds no files to compile", tree.display()));
    }
    let mean_bytes = (((mib << 20) as f64 * OBJECT_SHARE) / units as f64) as u64;
    let mut linked = Vec::new();
    let mut directory = objects.clone();
    let mut joined = Vec::new();
    for unit in 0..units {
        let mut random = Random::of(seed, unit);
        if unit % UNITS_PER_DIRECTORY == 0 {
            directory = objects.join(format!("directory-{}", unit / UNITS_PER_DIRECTORY));
            std::fs::create_dir_all(&directory).map_err(at("create", &directory))?;
        }
        read(&sources[index(unit * count / units)])?;
        for _ in 0..HEADERS_PER_UNIT {
            read(&sources[index(random.below(count.min(HEADERS)))])?;
        }
        std::thread::sleep(pause);
        // Uniform from a quarter to seven quarters of the mean.
        let bytes = mean_bytes / 4 + random.below(mean_bytes * 3 / 2 + 1);
        joined.extend(compile(&directory, unit, bytes, &mut random)?);
        if unit % UNITS_PER_DIRECTORY == UNITS_PER_DIRECTORY - 1 || unit == units - 1 {
            linked.push(link(&joined, &directory.join("built-in.o"))?);
            joined.clear();
        }
    }
    let kernel = link(&linked, &objects.join("vmlinux"))?;
    let mut image = read(&kernel)?;
    image.truncate(image.len() * 2 / 5);
    write(&objects.join("bzImage"), &image, 1 << 16)
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Writes what a compiler and the kernel's makefiles write for a unit; gives the object.
fn compile(directory: &Path, unit: u64, bytes: u64, random: &mut Random) -> Result<Option<PathBuf>> {
    let mut content = vec![0; index(bytes)];
    random.fill(&mut content);
    let dependencies = directory.join(format!(".unit-{unit}.o.d"));
    let object = directory.join(format!("unit-{unit}.o"));
    let mut text = vec![b' '; 2000];
    write(&dependencies, &text, PIECE_BYTES)?;
    write(&object, &content, PIECE_BYTES)?;
    text.resize(2600, b'\n');
    write(&directory.join(format!(".unit-{unit}.o.cmd")), &text, PIECE_BYTES)?;
    std::fs::remove_file(&dependencies).map_err(at("remove", &dependencies))?;
    Ok(Some(object))
}

/// Joins files into one, as a linker would: each is read, and the result written in pieces of 64 KB.
fn link(parts: &[PathBuf], to: &Path) -> Result<PathBuf> {
    let mut joined = Vec::new();
    for part in parts {
        joined.extend(read(part)?);
    }
    write(to, &joined, 1 << 16)?;
    Ok(to.to_owned())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut file = File::open(path).map_err(at("open", path))?;
    file.read_to_end(&mut bytes).map_err(at("read", path))?;
    Ok(bytes)
}

fn write(path: &Path, bytes: &[u8], piece: usize) -> Result<()> {
    let mut file = File::create(path).map_err(at("create", path))?;
    bytes.chunks(piece).try_for_each(|piece| file.write_all(piece)).map_err(at("write", path))
}

/// All files below a directory, in the order of their paths.
fn list(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(at("read", directory))? {
        entries.push(entry.map_err(at("read", directory))?.path());
    }
    entries.sort();
    for path in entries {
        let kind = path.symlink_metadata().map_err(at("look at", &path))?.file_type();
        if kind.is_dir() {
            list(&path, files)?;
        } else if kind.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_and_images_have_the_size_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let [tree, objects] = ["tree", "objects"].map(|name| directory.path().join(name));
        let options = |words: String| Options::parse(words.split(' ').map(str::to_owned)).unwrap();
        crate::load::untar(options(format!("--directory {} --files 60", tree.display()))).unwrap();
        let words = format!("--sources {} --objects {} --units 100 --mib 3", tree.display(), objects.display());
        run(options(words)).unwrap();
        let mut files = Vec::new();
        list(&objects, &mut files).unwrap();
        let size = |path: &PathBuf| std::fs::metadata(path).unwrap().len();
        let small = |path: &&PathBuf| path.to_string_lossy().ends_with(".cmd");
        let total: u64 = files.iter().filter(|path| !small(path)).map(size).sum();
        assert!((2_800_000..3_500_000).contains(&total), "{total}");
        // 100 objects and their commands, 7 directories' joined objects, vmlinux, bzImage; no dependencies are left.
        assert_eq!(files.len(), 100 + 100 + 7 + 2);
        assert_eq!(size(&objects.join("vmlinux")) * 2 / 5, size(&objects.join("bzImage")));
    }
}
