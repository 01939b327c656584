//! The compile load: the real GCC and the real linker, as the kernel's makefiles call them. Sources are those of
//! [`crate::sources`].
//!
//! Per unit: gcc writes the object and `.unit.o.d`; `.unit.o.cmd` is written and the `.d` removed. The objects of 16 units
//! are linked into `built-in.o`; at the end those become `vmlinux`, and its compressed form is `bzImage`. It makes
//! traffic; it promises nothing and acknowledges nothing. A compiler that fails ends it with the compiler's words on the console.

use crate::options::Options;
use crate::sources::{INCLUDE, unit_path};
use crate::{Result, at};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Units whose objects share a directory.
const UNITS_PER_DIRECTORY: u64 = 16;
/// As the kernel is compiled, without what needs a C library.
const FLAGS: [&str; 9] = [
    "-c",
    "-O2",
    "-pipe",
    "-ffreestanding",
    "-fno-stack-protector",
    "-fno-pic",
    "-fno-asynchronous-unwind-tables",
    "-fcf-protection=none",
    "-MD",
];

/// `guest-tools build --sources D --objects O [--units N]`: compiles and links the first N (400) units of D.
pub fn run(mut options: Options) -> Result<()> {
    let sources = PathBuf::from(options.required("sources")?);
    let objects = PathBuf::from(options.required("objects")?);
    let units = options.number("units", 400, 1..=100_000)?;
    options.finish()?;
    let started = Instant::now();
    let mut bytes = 0;
    let mut linked = Vec::new();
    let mut directory = objects.clone();
    let mut of_directory = Vec::new();
    for unit in 0..units {
        if unit % UNITS_PER_DIRECTORY == 0 {
            directory = objects.join(format!("directory-{}", unit / UNITS_PER_DIRECTORY));
            std::fs::create_dir_all(&directory).map_err(at("create", &directory))?;
        }
        let object = compile(&sources, &directory, unit)?;
        bytes += length(&object)?;
        of_directory.push(object);
        if unit % UNITS_PER_DIRECTORY == UNITS_PER_DIRECTORY - 1 || unit == units - 1 {
            let joined = directory.join("built-in.o");
            link(&["-r"], &of_directory, &joined)?;
            bytes += length(&joined)?;
            linked.push(joined);
            of_directory.clear();
        }
    }
    let kernel = objects.join("vmlinux");
    link(&["--entry=_start"], &linked, &kernel)?;
    let image = objects.join("bzImage");
    let output = File::create(&image).map_err(at("create", &image))?;
    finish(Command::new("gzip").arg("-c").arg(&kernel).stdout(Stdio::from(output)))?;
    bytes += length(&kernel)? + length(&image)?;
    println!("phase=run units={units} object_bytes={bytes} seconds={:.3}", started.elapsed().as_secs_f64());
    Ok(())
}

fn compile(sources: &Path, directory: &Path, unit: u64) -> Result<PathBuf> {
    let object = directory.join(format!("unit-{unit}.o"));
    let dependencies = directory.join(format!(".unit-{unit}.o.d"));
    let mut gcc = Command::new("gcc");
    gcc.args(FLAGS).arg("-MF").arg(&dependencies).arg("-I").arg(sources.join(INCLUDE));
    gcc.arg("-o").arg(&object).arg(unit_path(sources, unit));
    finish(&mut gcc)?;
    let mut text = std::fs::read(&dependencies).map_err(at("read", &dependencies))?;
    text.extend(format!("{gcc:?}\n").bytes());
    let commands = directory.join(format!(".unit-{unit}.o.cmd"));
    std::fs::write(&commands, text).map_err(at("write", &commands))?;
    std::fs::remove_file(&dependencies).map_err(at("remove", &dependencies))?;
    Ok(object)
}

fn link(flags: &[&str], parts: &[PathBuf], to: &Path) -> Result<()> {
    finish(Command::new("ld").args(flags).arg("-o").arg(to).args(parts))
}

fn finish(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.stdin(Stdio::null()).status().map_err(|error| format!("cannot run {name}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{name} ended with {status}; its words are above: {command:?}")) }
}

fn length(path: &Path) -> Result<u64> {
    path.metadata().map(|metadata| metadata.len()).map_err(at("look at", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sources_compile_and_link_into_a_program() {
        let directory = tempfile::tempdir().unwrap();
        let [sources, objects] = ["sources", "objects"].map(|name| directory.path().join(name));
        let options = |words: String| Options::parse(words.split(' ').map(str::to_owned)).unwrap();
        crate::sources::run(options(format!("--directory {} --units 18 --seed 2", sources.display()))).unwrap();
        run(options(format!("--sources {} --objects {} --units 18", sources.display(), objects.display()))).unwrap();
        let bytes = |name: &str| std::fs::read(objects.join(name)).unwrap();
        assert_eq!(&bytes("vmlinux")[..4], b"\x7fELF");
        assert_eq!(&bytes("bzImage")[..2], [0x1f, 0x8b]);
        for name in
            ["directory-0/unit-15.o", "directory-0/built-in.o", "directory-1/unit-17.o", "directory-1/.unit-16.o.cmd"]
        {
            assert!(!bytes(name).is_empty(), "{name}");
        }
        assert!(!objects.join("directory-0/.unit-0.o.d").exists());
        let text = unit_path(&sources, 3);
        let size = length(&text).unwrap();
        assert!((8_000..30_000).contains(&size), "a unit has {size} bytes");
        // Sources are the same from the same seed; one that does not compile is an error.
        let before = std::fs::read(&text).unwrap();
        crate::sources::run(options(format!("--directory {} --units 18 --seed 2", sources.display()))).unwrap();
        assert_eq!(std::fs::read(&text).unwrap(), before);
        std::fs::write(&text, "int nonsense(").unwrap();
        let again = format!("--sources {} --objects {} --units 18", sources.display(), objects.display());
        assert!(run(options(again)).unwrap_err().contains("gcc ended"));
    }
}
