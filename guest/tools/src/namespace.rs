//! Work on names and nothing else: empty files are renamed, removed and made anew, and a directory is made durable now and
//! then, as a mail spool or a package manager does. All that it writes is metadata.

use crate::options::Options;
use crate::random::Random;
use crate::{Result, at};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Operations between two fsyncs.
const OPERATIONS_PER_FSYNC: u64 = 8;

/// `guest-tools namespace --directory D --phase create|run [--files N] [--directories N] [--operations N] [--seed N]`: `create`
/// makes the files, `run` works on them. Each file stays in its directory of the moment, under its own name.
pub fn run(mut options: Options) -> Result<()> {
    let root = PathBuf::from(options.required("directory")?);
    let phase = options.required("phase")?;
    let files = options.number("files", 4000, 1..=1_000_000)?;
    let directories = options.number("directories", 40, 1..=10_000)?;
    let operations = options.number("operations", 10_000, 1..=1 << 40)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    options.finish()?;
    match phase.as_str() {
        "create" => {
            for directory in 0..directories {
                let path = root.join(directory.to_string());
                std::fs::create_dir_all(&path).map_err(at("create", &path))?;
            }
            (0..files).try_for_each(|file| create(&path_of(&root, file % directories, file)))
        }
        "run" => {
            let mut random = Random::new(seed);
            let mut places: Vec<u64> = (0..files).map(|file| file % directories).collect();
            for operation in 0..operations {
                let file = random.below(files);
                let place = &mut places[usize::try_from(file).map_err(|error| error.to_string())?];
                let path = path_of(&root, *place, file);
                if random.below(2) == 0 {
                    std::fs::remove_file(&path).map_err(at("remove", &path))?;
                    create(&path)?;
                } else {
                    *place = random.below(directories);
                    let to = path_of(&root, *place, file);
                    std::fs::rename(&path, &to).map_err(at("rename", &path))?;
                }
                if operation % OPERATIONS_PER_FSYNC == OPERATIONS_PER_FSYNC - 1 {
                    let directory = root.join(place.to_string());
                    File::open(&directory)
                        .and_then(|directory| directory.sync_all())
                        .map_err(at("fsync", &directory))?;
                }
            }
            Ok(())
        }
        other => Err(format!("--phase is '{other}'; it must be create or run")),
    }
}

fn path_of(root: &Path, directory: u64, file: u64) -> PathBuf {
    root.join(format!("{directory}/file-{file:08}"))
}

fn create(path: &Path) -> Result<()> {
    File::create_new(path).map(drop).map_err(at("create", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_there_once_afterwards() {
        let directory = tempfile::tempdir().unwrap();
        for phase in ["create", "run"] {
            let words = format!(
                "--directory {} --phase {phase} --files 50 --directories 4 --operations 400",
                directory.path().display()
            );
            run(Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
        }
        let mut names: Vec<_> = (0..4)
            .flat_map(|place: u64| std::fs::read_dir(directory.path().join(place.to_string())).unwrap())
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let expected: Vec<_> = (0..50).map(|file| format!("file-{file:08}")).collect();
        assert_eq!(names, expected);
    }
}
