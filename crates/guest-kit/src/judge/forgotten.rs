//! What ext4 itself leaves of orphans when it mounts a file system that has an error noted.

use super::{Verdict, debugfs};
use crate::error::Result;
use crate::image::FileSystem;
use std::collections::{BTreeMap, BTreeSet};

/// Of a file system with an error noted, or whose kernel said that it cleared a list of orphans: takes out of the problems what
/// follows from just that.
///
/// ext4 empties the list of orphans, and ends none of them, when it mounts a file system that has an error noted, and e2fsck
/// does the same. They stay as they are until a full check: no links, no time of deletion (or the next of the list in its place),
/// in use by the bitmaps, with their blocks and the block of their attributes, directories among them counted as such; or, where
/// a file was being cut short, with their new size and blocks beyond it. Whoever stops a journal between an unlink and its
/// inode's end, or between a file's new size and the end of its last block, gets that on any disk. Nothing else is forgiven:
/// not a bit that is missing, no inode that is not such an orphan by its own words or blocks, no block that is none of theirs,
/// no count that is off by anything but just these. (The last of a list says nothing of it in its own inode.)
pub fn forgive_forgotten_orphans(verdict: &mut Verdict, file_system: &FileSystem) -> Result<()> {
    let inodes: BTreeSet<u64> = verdict.problems.iter().filter_map(|line| forgotten_orphan(line)).collect();
    let cut = cut_short(&verdict.problems, |inode| size_of(file_system, inode))?;
    if inodes.is_empty() && cut.lines.is_empty() {
        return Ok(());
    }
    let (mut blocks, mut directories) = (cut.blocks, 0);
    for inode in &inodes {
        let text = debugfs(file_system, &format!("blocks <{inode}>"))?;
        blocks.extend(text.split_whitespace().filter_map(|word| word.parse::<u64>().ok()));
        let text = debugfs(file_system, &format!("stat <{inode}>"))?;
        let field = |name: &str| text.split_once(name).and_then(|(_, rest)| rest.split_whitespace().next());
        blocks.extend(field("File ACL: ").and_then(|word| word.parse::<u64>().ok()).filter(|block| *block > 0));
        directories += u64::from(field("Type: ") == Some("directory"));
    }
    let surplus = |name: &str, known: &BTreeSet<u64>| -> Option<(String, u64)> {
        let line = verdict.problems.iter().find(|line| line.starts_with(name))?;
        let bits = surplus_bits(line.strip_prefix(name)?)?;
        bits.is_subset(known).then(|| (line.clone(), bits.len() as u64))
    };
    let of_inodes = surplus("Inode bitmap differences:", &inodes);
    let of_blocks = surplus("Block bitmap differences:", &blocks);
    // What a count is off by: said of each group, and to be as much as there are in all.
    let counts = |name: &str, expected: u64| -> Vec<String> {
        let lines = verdict.problems.iter().filter(|line| line.starts_with(name)).cloned().collect::<Vec<_>>();
        let sum = lines.iter().map(|line| surplus_count(line)).sum::<Option<u64>>();
        if expected > 0 && sum == Some(expected) { lines } else { Vec::new() }
    };
    let bits = |surplus: &Option<(String, u64)>| surplus.as_ref().map_or(0, |(_, bits)| *bits);
    let mut forgiven = counts("Free blocks count wrong for group #", bits(&of_blocks));
    forgiven.extend(counts("Free inodes count wrong for group #", bits(&of_inodes)));
    forgiven.extend(counts("Directories count wrong for group #", directories));
    forgiven.extend([of_inodes, of_blocks].into_iter().flatten().map(|(line, _)| line));
    let mut at = 0;
    let is_of = |line: &String| {
        at += 1;
        cut.lines.contains(&(at - 1))
            || forgotten_orphan(line).is_some()
            // Of one that was cut short it says so once more.
            || inode_in_use_with_dtime(line).is_some_and(|inode| inodes.contains(&inode))
            || line.starts_with("Inodes that were part of a corrupted orphan linked list found.")
            || forgiven.contains(line)
    };
    let (forgotten, problems) = std::mem::take(&mut verdict.problems).into_iter().partition(is_of);
    (verdict.forgotten, verdict.problems) = (forgotten, problems);
    Ok(())
}

/// By how much a group's count says that more is in use than was counted: `… (20762, counted=20788).` of what is free, the other
/// way round of directories.
fn surplus_count(line: &str) -> Option<u64> {
    let (said, counted) = line.rsplit_once('(')?.1.strip_suffix(").")?.split_once(", counted=")?;
    let (said, counted): (u64, u64) = (said.parse().ok()?, counted.parse().ok()?);
    if line.starts_with("Directories") { said.checked_sub(counted) } else { counted.checked_sub(said) }
}

/// The inode of which a line says that it was on a list of orphans that is lost.
fn forgotten_orphan(line: &str) -> Option<u64> {
    let last = line.strip_prefix("Deleted inode ").and_then(|rest| rest.split_once(" has zero dtime."));
    let other =
        || line.strip_prefix("Inode ").and_then(|rest| rest.split_once(" was part of the orphaned inode list."));
    last.or_else(other)?.0.parse().ok()
}

/// The inode of which a line says that it has a time of deletion, or the next of a list in its place, and is in use.
fn inode_in_use_with_dtime(line: &str) -> Option<u64> {
    line.strip_prefix("Inode ")?.split_once(" is in use, but has dtime set.")?.0.parse().ok()
}

/// The bits of ` -30 -(41--43)`, which are set and should not be; `None` where one should be, or anything is not understood.
fn surplus_bits(differences: &str) -> Option<BTreeSet<u64>> {
    /// More than any of these file systems has.
    const BITS_MAX: u64 = 1 << 24;
    let mut bits = BTreeSet::new();
    for word in differences.split_whitespace() {
        let word = word.strip_prefix('-')?;
        let (first, last) = match word.strip_prefix('(').and_then(|range| range.strip_suffix(')')) {
            Some(range) => range.split_once("--")?,
            None => (word, word),
        };
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        if last >= BITS_MAX {
            return None;
        }
        bits.extend(first..=last);
    }
    Some(bits)
}

/// What e2fsck says of files that were being cut short.
#[derive(Debug, Default)]
struct CutShort {
    /// Which of its lines.
    lines: BTreeSet<usize>,
    /// The blocks that it takes from them.
    blocks: BTreeSet<u64>,
}

/// The size of an inode and of the file system's blocks, in bytes.
fn size_of(file_system: &FileSystem, inode: u64) -> Result<Option<(u64, u64)>> {
    let field =
        |text: &str, name: &str| -> Option<u64> { text.split_once(name)?.1.split_whitespace().next()?.parse().ok() };
    let of_inode = debugfs(file_system, &format!("stat <{inode}>"))?;
    let of_all = debugfs(file_system, "show_super_stats -h")?;
    let size = of_inode.contains("Type: regular").then(|| field(&of_inode, "Size: ")).flatten();
    Ok(size.zip(field(&of_all, "Block size:")).filter(|(_, block)| *block > 0))
}

/// Looks for regular files with blocks beyond their size. e2fsck says of one whose extents are all in its inode that its size should be
/// larger, of any other that extents end where they may not, and that it has as many blocks more as are in those.
fn cut_short(problems: &[String], size_of: impl Fn(u64) -> Result<Option<(u64, u64)>>) -> Result<CutShort> {
    let of_inode = |line: &str| -> Option<(u64, String)> {
        let (inode, rest) = line.strip_prefix("Inode ")?.split_once(", ")?;
        Some((inode.parse().ok()?, rest.to_owned()))
    };
    let two = |text: &str, first: &str| -> Option<(u64, u64)> {
        let (one, other) = text.strip_prefix(first)?.split_once(", should be ")?;
        Some((one.parse().ok()?, other.split_once('.')?.0.parse().ok()?))
    };
    let mut found = CutShort::default();
    let mut taken_bytes = BTreeMap::<u64, u64>::new();
    for (at, line) in problems.iter().enumerate() {
        let Some((inode, rest)) = of_inode(line) else { continue };
        let is_larger = two(&rest, "i_size is ").filter(|(is, should_be)| should_be > is);
        let extent = (rest == "end of extent exceeds allowed value").then(|| problems.get(at + 1)).flatten();
        let extent = extent.and_then(|line| extent_of(line));
        if is_larger.is_none() && extent.is_none() {
            continue;
        }
        let Some((size, block_bytes)) = size_of(inode)? else { continue };
        if is_larger.is_some_and(|(is, should_be)| is == size && should_be % block_bytes == 0) {
            found.lines.insert(at);
        }
        if let Some((logical, physical, count)) = extent
            && logical + count > size.div_ceil(block_bytes)
        {
            found.lines.extend([at, at + 1]);
            found.blocks.extend(physical..physical + count);
            *taken_bytes.entry(inode).or_default() += count * block_bytes;
        }
    }
    for (at, line) in problems.iter().enumerate() {
        let Some((inode, rest)) = of_inode(line) else { continue };
        let fewer_bytes =
            two(&rest, "i_blocks is ").and_then(|(is, should_be)| is.checked_sub(should_be)?.checked_mul(512));
        if taken_bytes.get(&inode).is_some_and(|taken| fewer_bytes == Some(*taken)) {
            found.lines.insert(at);
        }
    }
    Ok(found)
}

/// `(logical block 0, physical block 6414, len 16)`.
fn extent_of(line: &str) -> Option<(u64, u64, u64)> {
    /// More than an extent has.
    const BLOCKS_MAX: u64 = 1 << 16;
    let rest = line.strip_prefix("(logical block ")?.strip_suffix(')')?;
    let (logical, rest) = rest.split_once(", physical block ")?;
    let (physical, count) = rest.split_once(", len ")?;
    let (logical, physical, count) =
        (logical.parse::<u64>().ok()?, physical.parse::<u64>().ok()?, count.parse::<u64>().ok()?);
    let is_possible = count <= BLOCKS_MAX && logical < 1 << 32 && physical < 1 << 48;
    is_possible.then_some((logical, physical, count))
}

#[cfg(test)]
mod tests {
    use super::super::check;
    use super::super::tests::{content, directory};
    use super::*;
    use crate::image::ExtRecipe;
    use crate::program::{command, run};
    use std::os::unix::fs::FileExt;

    #[test]
    fn orphans_that_a_kernel_forgot_are_forgiven_and_nothing_beside_them() {
        let (directory, content) = (directory(), content());
        std::fs::write(content.path().join("inner/last"), vec![7; 70_000]).unwrap();
        std::fs::create_dir(content.path().join("inner/gone")).unwrap();
        let image = directory.path().join("image");
        let recipe = ExtRecipe { content: Some(content.path().to_owned()), ..ExtRecipe::ext3(16, 4) };
        let file_system = recipe.make(&image).unwrap();
        let requests = |requests: &[&str]| {
            let mut said = String::new();
            for request in requests {
                let output = run(command("debugfs").unwrap().args(["-w", "-R", request]).arg(&image), &[0]).unwrap();
                said.push_str(&String::from_utf8_lossy(&output.stdout));
            }
            said
        };
        let number = |path: &str| -> u64 {
            let said = requests(&[&format!("stat {path}")]);
            said.split("Inode: ").nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap()
        };
        let (first, last) = (number("/inner/file"), number("/inner/last"));
        let directory_gone = number("/inner/gone");
        // As ext4 leaves them: no names, no links, and what the one said of the other, but no list that begins with it.
        requests(&[
            "unlink /inner/file",
            "unlink /inner/last",
            &format!("sif <{first}> links_count 0"),
            &format!("sif <{last}> links_count 0"),
            &format!("sif <{first}> dtime @{last}"),
            "unlink /inner/gone",
            &format!("sif <{directory_gone}> links_count 0"),
            &format!("sif <{directory_gone}> dtime @{last}"),
            &format!("sif <{}> links_count 2", number("/inner")),
        ]);
        // Its attributes have a block of their own.
        let attributes = directory.path().join("attributes");
        std::fs::write(&attributes, vec![b'x'; 700]).unwrap();
        requests(&[&format!("ea_set -f {} <{last}> user.large", attributes.display())]);
        let judged = || {
            let mut verdict = check(&file_system).unwrap();
            assert!(!verdict.is_consistent(), "{verdict:?}");
            forgive_forgotten_orphans(&mut verdict, &file_system).unwrap();
            verdict
        };
        let verdict = judged();
        assert!(verdict.is_consistent() && !verdict.is_clean(), "{verdict:?}");
        assert!(verdict.forgotten.len() >= 4, "{verdict:?}");
        let counted =
            |verdict: &Verdict| verdict.forgotten.iter().any(|line| line.starts_with("Directories count wrong"));
        assert!(counted(&verdict), "{verdict:?}");
        let directories = |change: i64| {
            let said = String::from_utf8(run(command("dumpe2fs").unwrap().arg(&image), &[0]).unwrap().stdout).unwrap();
            let before = said.split_once(" directories").unwrap().0.rsplit(' ').next().unwrap().parse::<i64>().unwrap();
            requests(&[&format!("set_bg 0 used_dirs_count {}", before + change)]);
        };
        directories(1);
        let verdict = judged();
        assert!(!counted(&verdict) && !verdict.is_consistent(), "{verdict:?}");
        directories(-1);
        assert!(counted(&judged()));
        // A bit too many, and one that is missing: of a block, of an inode.
        let used = requests(&["bmap /inner 0"]);
        let used = used.trim();
        let surplus_inode = last + 3;
        for (harm, mend) in [
            ("setb 4000".to_owned(), "freeb 4000".to_owned()),
            (format!("freeb {used}"), format!("setb {used}")),
            (format!("seti <{surplus_inode}>"), format!("freei <{surplus_inode}>")),
        ] {
            requests(&[&harm]);
            let verdict = judged();
            assert!(verdict.problems.iter().any(|line| line.contains(" bitmap differences:")), "{harm}: {verdict:?}");
            requests(&[&mend]);
            assert!(judged().is_consistent(), "{mend}");
        }
    }

    #[test]
    fn only_surplus_bits_are_read_as_such() {
        assert_eq!(surplus_count("Free blocks count wrong for group #0 (20762, counted=20788)."), Some(26));
        assert_eq!(surplus_count("Directories count wrong for group #0 (50, counted=49)."), Some(1));
        for text in
            ["Free blocks count wrong for group #0 (5, counted=4).", "Directories count wrong (1, counted=2).", "x"]
        {
            assert_eq!(surplus_count(text), None, "{text}");
        }
        assert_eq!(surplus_bits("  -30 -(41--43)"), Some(BTreeSet::from([30, 41, 42, 43])));
        for text in [" +30", " -30 +(41--43)", " -(1--99999999999)", " -x", " 5"] {
            assert_eq!(surplus_bits(text), None, "{text}");
        }
    }

    /// As ext4 leaves a file that it was cutting short: with its new size, and with blocks beyond it.
    #[test]
    fn files_that_were_being_cut_short_are_forgiven_their_blocks_and_nothing_else() {
        let (directory, content) = (directory(), directory());
        // More extents than an inode has room for, and few.
        let file = std::fs::File::create(content.path().join("many")).unwrap();
        for at in 0..12 {
            file.write_all_at(&[7; 8192], at * 65_536).unwrap();
        }
        std::fs::write(content.path().join("few"), vec![7; 20_480]).unwrap();
        let image = directory.path().join("image");
        let recipe = ExtRecipe { content: Some(content.path().to_owned()), ..ExtRecipe::ext4(16, 4) };
        let file_system = recipe.make(&image).unwrap();
        let set = |request: &str| {
            run(command("debugfs").unwrap().args(["-w", "-R", request]).arg(&image), &[0]).unwrap();
        };
        let judged = || {
            let mut verdict = check(&file_system).unwrap();
            assert!(!verdict.is_consistent(), "{verdict:?}");
            forgive_forgotten_orphans(&mut verdict, &file_system).unwrap();
            verdict
        };
        set("sif /many size 8865");
        set("sif /few size 8865");
        let verdict = judged();
        assert!(verdict.is_consistent() && !verdict.is_clean(), "{verdict:?}");
        let is_said = |text: &str| verdict.forgotten.iter().any(|line| line.contains(text));
        assert!(is_said("i_size is 8865, should be ") && is_said("exceeds allowed value") && is_said("i_blocks"));
        // One that says which is the next of the list, in the place of its time of deletion; a true time is none of that.
        set("sif /few dtime @20");
        let verdict = judged();
        assert!(verdict.is_consistent(), "{verdict:?}");
        assert!(verdict.forgotten.iter().any(|line| line.contains("is in use, but has dtime set")), "{verdict:?}");
        set("sif /few dtime 20250101");
        assert!(!judged().is_consistent());
        set("sif /few dtime @0");
        // Not a file that has more than it should elsewhere, nor one without what it should have.
        for (harm, mend) in [("sif /few blocks 400", "sif /few blocks 40"), ("sif /many blocks 2", "")] {
            set(harm);
            let verdict = judged();
            assert!(verdict.problems.iter().any(|line| line.contains("i_blocks is")), "{harm}: {verdict:?}");
            if !mend.is_empty() {
                set(mend);
                assert!(judged().is_consistent(), "{mend}");
            }
        }
    }

    #[test]
    fn only_blocks_beyond_a_files_size_are_those_of_a_cut() {
        let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let of = |text: &[&str], size| cut_short(&lines(text), |_| Ok(size)).unwrap();
        let extent = ["Inode 9, end of extent exceeds allowed value", "(logical block 8, physical block 50, len 4)"];
        assert_eq!(of(&extent, Some((8865, 1024))).blocks, (50..54).collect());
        assert_eq!(of(&extent, Some((8865, 1024))).lines, BTreeSet::from([0, 1]));
        // It ends where the file does; it is no file's.
        assert!(of(&extent, Some((12 * 1024, 1024))).lines.is_empty() && of(&extent, None).lines.is_empty());
        // As many sectors as those four blocks have, of that inode.
        for (line, lines) in [
            ("Inode 9, i_blocks is 100, should be 92.  Fix? no", BTreeSet::from([0, 1, 2])),
            ("Inode 9, i_blocks is 100, should be 90.  Fix? no", BTreeSet::from([0, 1])),
            ("Inode 8, i_blocks is 100, should be 92.  Fix? no", BTreeSet::from([0, 1])),
        ] {
            assert_eq!(of(&[extent[0], extent[1], line], Some((8865, 1024))).lines, lines, "{line}");
        }
        let size =
            ["Inode 9, i_size is 8865, should be 20480.  Fix? no", "Inode 9, i_blocks is 9, should be 40.  Fix? no"];
        assert_eq!(of(&size, Some((8865, 1024))).lines, BTreeSet::from([0]));
        for (is, should_be) in [(8866, 20_480), (20_480, 8865), (8865, 20_481)] {
            let line = format!("Inode 9, i_size is {is}, should be {should_be}.  Fix? no");
            assert!(of(&[&line], Some((8865, 1024))).lines.is_empty(), "{line}");
        }
        for text in ["(logical block 8, physical block 50, len 4", "(logical block x, physical block 50, len 4)", "x"] {
            assert_eq!(extent_of(text), None, "{text}");
        }
        assert_eq!(extent_of("(logical block 8, physical block 50, len 99999999)"), None);
    }
}
