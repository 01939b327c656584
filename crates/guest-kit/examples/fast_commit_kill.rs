//! What becomes of ext4's fast commits when QEMU is killed, without amberlog: the control of everything that is said of them.
//!
//!     cargo run -p guest-kit --example fast_commit_kill -- [--count N] [--mix] [--newer E2FSCK] [--keep DIRECTORY]
//!
//! A guest on QEMU's own disk writes records and makes each durable; QEMU is killed. Of what it left there are copies: one
//! that a kernel mounts, one that e2fsck checks first (again where it fails), one for another e2fsck. A guest then looks for
//! every record that was acknowledged. Each round is done with the feature and without. With `--mix` the guest creates, renames,
//! truncates and removes files beside that, and only a kernel looks at what it left.

use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::{AtEnd, Cache, Drive, Guest, GuestSpec, judge, program};
use guest_tools::options::Options;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const LIMIT: Duration = Duration::from_secs(120);
const ENOUGH: u64 = 40;
/// e2fsck is run so often at most.
const RUNS_MAX: u32 = 3;

/// Over all rounds.
#[derive(Default)]
struct Sum {
    rounds: u32,
    failed: u32,
    acknowledged: u64,
    lost: u64,
    lossy: u32,
    inconsistent: u32,
}

fn main() -> Result<()> {
    let mut options = Options::parse(std::env::args().skip(1))?;
    let count = options.number("count", 10, 1..=1000)?;
    let newer = options.text("newer").map(PathBuf::from);
    let keep = options.text("keep").map(PathBuf::from);
    let is_mixed = options.flag("mix");
    options.finish()?;
    let mut ways: Vec<(&str, Option<PathBuf>)> = vec![("kernel", None)];
    ways.extend((!is_mixed).then(|| ("e2fsck", Some("e2fsck".into()))));
    ways.extend(newer.map(|path| ("newer e2fsck", Some(path))));
    for (feature, features) in [("fast_commit", vec!["fast_commit".to_owned()]), ("none", Vec::new())] {
        let mut sums: Vec<Sum> = ways.iter().map(|_| Sum::default()).collect();
        for index in 0..count {
            let cache = if index % 2 == 0 { Cache::None } else { Cache::Unsafe };
            let kept = keep.as_ref().map(|keep| keep.join(format!("{feature}-{index}.img")));
            round(&features, cache, is_mixed.then_some(index), kept.as_deref(), &ways, &mut sums)
                .map_err(|error| format!("{feature}, round {index}: {error}"))?;
        }
        for ((way, _), sum) in ways.iter().zip(&sums) {
            println!(
                "{feature}, {way}: {} kills, {} of {} acknowledged records lost, in {} rounds; e2fsck failed in {} \
                 rounds; {} file systems not whole afterwards",
                sum.rounds, sum.lost, sum.acknowledged, sum.lossy, sum.failed, sum.inconsistent
            );
        }
    }
    Ok(())
}

fn round(
    features: &[String],
    cache: Cache,
    mix: Option<u64>,
    keep: Option<&Path>,
    ways: &[(&str, Option<PathBuf>)],
    sums: &mut [Sum],
) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let image = directory.path().join("image");
    ExtRecipe { features: features.to_vec(), ..ExtRecipe::ext4(256, 8) }.make(&image)?;
    let mix = mix.map_or_else(String::new, |seed| {
        format!("guest-tools mix --directory /mnt/mix --seed {seed} --count {} &\n", 50 + seed * 37 % 400)
    });
    let script = format!(
        "mount -t ext4 -o data=ordered /dev/vda /mnt || fail mount
         {mix}guest-tools records --directory /mnt/records --stream records --forever"
    );
    let mut spec = GuestSpec::new("killed", script).drives(vec![Drive::new(&image, cache)]);
    spec.at_end = AtEnd::Stay;
    let mut guest = Guest::start(spec)?;
    guest.wait_acknowledged("records", ENOUGH, LIMIT)?;
    guest.kill_qemu()?;
    guest.wait_end(LIMIT)?;
    let last = guest.final_report().acknowledged.get("records").and_then(|stream| stream.last);
    let last = last.ok_or("nothing was acknowledged")?;
    guest.forgive();
    if let Some(keep) = keep {
        copy_image(&image, keep)?;
    }
    let mut drives = Vec::new();
    let mut script = String::new();
    let mut words = Vec::new();
    for (index, ((way, checker), sum)) in ways.iter().zip(&mut *sums).enumerate() {
        let copy = directory.path().join(format!("copy-{index}"));
        copy_image(&image, &copy)?;
        if let Some(checker) = checker {
            let (codes, said) = check(checker, &copy)?;
            sum.failed += u32::from(codes.iter().any(|code| *code >= 4));
            words.push(format!("{way} {codes:?} {said}"));
        }
        script.push_str(&format!(
            "mkdir -p /tmp/m{index}
             if mount -t ext4 /dev/vd{letter} /tmp/m{index}; then
                 set -- $(guest-tools records --directory /tmp/m{index}/records --verify {last})
                 mark result {index} $*
                 umount /tmp/m{index}
             else
                 mark result {index} expected={} faults={}
                 mark refused $(dmesg | grep -e JBD2 -e EXT4 | tail -n 4)
             fi\n",
            last + 1,
            last + 1,
            letter = ["a", "b", "c"][index],
        ));
        drives.push(Drive::new(copy, Cache::Writeback));
    }
    let images: Vec<PathBuf> = drives.iter().map(|drive| drive.image.clone()).collect();
    let reported = Guest::run(GuestSpec::new("after", script).drives(drives), LIMIT)?;
    for (index, sum) in sums.iter_mut().enumerate() {
        let found = |name: &str| {
            let start = format!("result {index} ");
            let line = reported.marks.iter().find_map(|mark| mark.strip_prefix(&start))?;
            line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse::<u64>().ok())
        };
        let (expected, lost) = found("expected").zip(found("faults")).ok_or("the guest told nothing")?;
        sum.rounds += 1;
        sum.acknowledged += expected;
        sum.lost += lost;
        sum.lossy += u32::from(lost > 0);
        // What e2fsck cannot even open is not whole.
        let problems = judge::check(&FileSystem::whole(&images[index])).map(|verdict| verdict.problems);
        let problems = problems.unwrap_or_else(|error| vec![error.to_string()]);
        sum.inconsistent += u32::from(!problems.is_empty());
        let first: Vec<&String> = problems.iter().take(2).collect();
        words.push(format!("{}: {lost} of {expected} lost, {} complaints {first:?}", ways[index].0, problems.len()));
    }
    words.extend(reported.marks.iter().filter(|mark| mark.starts_with("refused")).cloned());
    println!("{features:?} {cache:?}: {}", words.join("; "));
    Ok(())
}

/// The exit codes of all runs, and why the first of them failed.
fn check(checker: &Path, image: &Path) -> Result<(Vec<i32>, String)> {
    let name = checker.to_str().filter(|name| !name.contains('/'));
    let (mut codes, mut said) = (Vec::new(), String::new());
    while codes.len() < RUNS_MAX as usize && codes.last().is_none_or(|code| *code >= 4) {
        let mut tool = match name {
            Some(name) => program::command(name)?,
            None => Command::new(checker),
        };
        let output = tool.arg("-fy").arg(image).output()?;
        codes.push(output.status.code().unwrap_or(-1));
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let why = text.lines().find(|line| line.contains("while trying") || line.contains("superblock"));
        said = if said.is_empty() { why.unwrap_or_default().to_owned() } else { said };
    }
    Ok((codes, said))
}
