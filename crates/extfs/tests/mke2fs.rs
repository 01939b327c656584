//! File systems that the real mke2fs made, read by us and by the real debugfs.

use extfs::{Allocation, FileSystem, FreedBlocks, Journal, JournalExtent, LayoutScore, discover, group, layout_score};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn run(command: &mut Command) -> String {
    let output = command.env("LC_ALL", "C").output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn mke2fs(directory: &Path, options: &[&str], size: &str) -> PathBuf {
    let path = directory.join("image");
    let _ = std::fs::remove_file(&path);
    run(Command::new("mke2fs")
        .args(["-q", "-F", "-E", "nodiscard,lazy_itable_init=1"])
        .args(options)
        .arg(&path)
        .arg(size));
    path
}

fn debugfs(image: &Path, command: &str) -> String {
    run(Command::new("debugfs").args(["-R", command]).arg(image))
}

fn only(image: &Path) -> FileSystem {
    let bytes = std::fs::read(image).expect("an image");
    let mut found = discover(&bytes).expect("memory");
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn numbers(text: &str) -> Vec<u64> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// Every group that debugfs lists: its number, and where its block bitmap, inode bitmap and inode table are.
fn groups(stats: &str) -> Vec<[u64; 4]> {
    // " Group  3: block bitmap at 259, inode bitmap at 275, inode table at 1284"; "Group descriptor size:" is none.
    stats
        .lines()
        .filter(|line| line.trim_start().starts_with("Group") && line.contains(": block bitmap at"))
        .map(|line| numbers(&line.replace([',', ':'], " ")).try_into().expect("four numbers"))
        .collect()
}

/// Compares the journal's map with debugfs, block for block.
fn check_journal(image: &Path, what: &str) -> (Vec<JournalExtent>, Vec<u64>) {
    let found = only(image);
    let Journal::Internal { inode, blocks, extents, map_blocks } = found.journal else {
        panic!("{what}: {:?}", found.journal);
    };
    assert_eq!(inode, 8, "{what}");
    let mut position = 0;
    for extent in &extents {
        assert_eq!(extent.log, position, "{what}");
        position += extent.count;
        for log in [extent.log, extent.log + extent.count - 1] {
            let physical = numbers(&debugfs(image, &format!("bmap <8> {log}")))[0];
            assert_eq!(physical, extent.physical + u64::from(log - extent.log), "{what}: log block {log}");
        }
    }
    assert_eq!(position, blocks, "{what}");
    let ours: BTreeSet<u64> = extents
        .iter()
        .flat_map(|extent| extent.physical..extent.physical + u64::from(extent.count))
        .chain(map_blocks.iter().copied())
        .collect();
    let theirs: BTreeSet<u64> = numbers(&debugfs(image, "blocks <8>")).into_iter().collect();
    assert_eq!(ours, theirs, "{what}");
    (extents, map_blocks)
}

#[test]
fn journals_of_every_shape() {
    let directory = scratch();
    for (options, size) in [
        (["-t", "ext4", "-b", "1024", "-J", "size=1"].as_slice(), "8M"),
        (&["-t", "ext4", "-b", "4096", "-O", "64bit"], "64M"),
        (&["-t", "ext4", "-b", "4096", "-O", "^64bit,^metadata_csum,^extent"], "64M"),
        (&["-t", "ext3", "-b", "1024"], "64M"),
        (&["-t", "ext3", "-b", "2048", "-J", "size=40"], "128M"),
        (&["-t", "ext4", "-b", "4096", "-O", "meta_bg,^resize_inode"], "300M"),
        (&["-t", "ext4", "-b", "4096", "-O", "bigalloc"], "300M"),
        (&["-t", "ext4", "-b", "1024", "-O", "bigalloc"], "64M"),
        (&["-t", "ext4", "-b", "4096", "-O", "sparse_super2"], "300M"),
        (&["-t", "ext4", "-b", "65536", "-J", "size=64"], "300M"),
        (&["-t", "ext3", "-I", "128", "-b", "4096"], "64M"),
    ] {
        let image = mke2fs(directory.path(), options, size);
        let what = format!("{options:?}");
        let (_, map_blocks) = check_journal(&image, &what);
        let mapped_by_blocks = options.contains(&"ext3") || options.contains(&"^64bit,^metadata_csum,^extent");
        assert!(!mapped_by_blocks || !map_blocks.is_empty(), "{what}: there are indirect blocks");
    }
}

#[test]
fn a_journal_in_many_pieces() {
    for (kind, depth) in [("ext4", true), ("ext3", false)] {
        let directory = scratch();
        let image = mke2fs(directory.path(), &["-t", kind, "-b", "1024", "-O", "^has_journal"], "8M");
        // Every third free block is taken, so that a journal made now is in pieces.
        let mut commands = String::new();
        for block in (700..8100).step_by(3) {
            commands += &format!("setb {block}\n");
        }
        let mut child = Command::new("debugfs")
            .arg("-w")
            .arg(&image)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("debugfs starts");
        child.stdin.take().expect("a pipe").write_all(commands.as_bytes()).expect("debugfs reads");
        assert!(child.wait().expect("debugfs ends").success());
        run(Command::new("tune2fs").args(["-J", "size=1"]).arg(&image));
        let (extents, map_blocks) = check_journal(&image, kind);
        assert!(extents.len() > 300, "{}", extents.len());
        assert!(map_blocks.len() > 3, "{}", map_blocks.len());
        if depth {
            let header = debugfs(&image, "extents <8>");
            assert!(header.contains("1/ 1") || header.contains("/ 2"), "the tree has levels: {header}");
        }
    }
}

/// Runs debugfs on a list of commands; gives what it printed.
fn debugfs_all(image: &Path, commands: &str) -> String {
    let list = image.with_extension("commands");
    std::fs::write(&list, commands).expect("a list of commands");
    run(Command::new("debugfs").arg("-w").arg("-f").arg(&list).arg(image))
}

/// The layout score of the root directory's files, by debugfs's own account of every block of theirs.
fn score_by_debugfs(image: &Path, files: &[(String, u64)]) -> LayoutScore {
    let mut score = LayoutScore::default();
    for (name, blocks) in files {
        let commands: String = (0..*blocks).map(|block| format!("bmap /{name} {block}\n")).collect();
        let text = debugfs_all(image, &commands);
        let physical: Vec<u64> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
        assert_eq!(physical.len() as u64, *blocks, "{name}");
        let there = physical.iter().filter(|block| **block != 0).count() as u64;
        let pairs = || physical.windows(2).filter(|pair| pair[0] != 0 && pair[1] != 0);
        score.files += u64::from(there > 0);
        score.blocks += there;
        score.pairs += pairs().count() as u64;
        score.adjacent += pairs().filter(|pair| pair[1] == pair[0] + 1).count() as u64;
    }
    score
}

#[test]
fn layout_scores_are_what_debugfs_says() {
    let directory = scratch();
    for options in
        [["-t", "ext4", "-b", "1024"].as_slice(), &["-t", "ext3", "-b", "1024"], &["-t", "ext4", "-b", "4096"]]
    {
        let image = mke2fs(directory.path(), options, "24M");
        let block_bytes: u64 = options[3].parse().expect("a number");
        let bytes = std::fs::read(&image).expect("an image");
        let superblock = only(&image).superblock;
        assert_eq!(
            layout_score(&bytes, &superblock).expect("memory").score(),
            None,
            "{options:?}: an empty one has none"
        );

        // One file in one piece (600 blocks: into the double indirect map of 1 KB blocks), then a comb whose holes are one and
        // two blocks, files into that, one with a hole of its own, and a directory, which does not count.
        let source = directory.path().join("source");
        let files: Vec<(String, u64)> =
            [600, 1, 13, 100, 400].iter().zip(0..).map(|(n, i)| (format!("f{i}"), *n)).collect();
        let write = |name: &str, blocks: u64| {
            std::fs::write(&source, vec![7; usize::try_from(blocks * block_bytes).expect("small")]).expect("a file");
            debugfs_all(&image, &format!("write {} {name}\n", source.display()));
        };
        write(&files[0].0, files[0].1);
        let whole = std::fs::read(&image).expect("an image");
        let score = layout_score(&whole, &superblock).expect("memory");
        let first = score_by_debugfs(&image, &files[..1]);
        assert_eq!(score, first, "{options:?}");
        assert_eq!((score.files, score.blocks, score.pairs), (1, 600, 599));
        assert!(score.score() > Some(0.99), "{options:?}: in one piece but for blocks of its map, {score:?}");

        let comb: String = (superblock.blocks_count / 4..superblock.blocks_count - 8)
            .step_by(5)
            .map(|block| format!("setb {block} 2\nsetb {} 1\n", block + 3))
            .collect();
        debugfs_all(&image, &format!("setb 1 {}\n{comb}", superblock.blocks_count / 4 - 1));
        for (name, blocks) in &files[1..] {
            write(name, *blocks);
        }
        debugfs_all(&image, "mkdir /a\npunch /f3 40 49\n");
        let bytes = std::fs::read(&image).expect("an image");
        let score = layout_score(&bytes, &superblock).expect("memory");
        assert_eq!(score, score_by_debugfs(&image, &files), "{options:?}");
        assert_eq!((score.files, score.blocks), (5, 600 + 1 + 13 + 90 + 400), "{options:?}");
        assert!(score.score() < Some(0.8), "{options:?}: {score:?}");

        // Whatever a map says, it is an error or a score.
        let mut hostile = bytes.clone();
        for at in (0..hostile.len()).step_by(997) {
            hostile[at] ^= 0x81;
        }
        let _ = layout_score(&hostile, &superblock);
    }
}

#[test]
fn superblock_fields() {
    let directory = scratch();
    let id = "01234567-89ab-cdef-0123-456789abcdef";
    let image = mke2fs(directory.path(), &["-t", "ext4", "-b", "4096", "-U", id], "64M");
    let found = only(&image);
    let superblock = &found.superblock;
    superblock.check().expect("a good superblock");
    assert_eq!((found.offset, found.length, found.partition), (0, 64 << 20, None));
    assert_eq!((superblock.block_size, superblock.blocks_count, superblock.bytes()), (4096, 16384, 64 << 20));
    assert_eq!(superblock.uuid[..4], [1, 0x23, 0x45, 0x67]);
    assert!(!superblock.needs_recovery() && !superblock.is_journal_device() && superblock.has_metadata_checksums());
    let stats = debugfs(&image, "stats");
    let field = |name: &str| {
        let line = stats.lines().find(|line| line.trim_start().starts_with(name)).expect("a line");
        numbers(&line.replace([',', ':'], " "))[0]
    };
    assert_eq!(u64::from(superblock.inodes_count), field("Inode count"));
    let bytes = std::fs::read(&image).expect("an image");
    let first = group(&bytes, superblock, 0).expect("memory").expect("group 0");
    assert_eq!(groups(&stats), [[0, first.block_bitmap, first.inode_bitmap, first.inode_table]]);
    assert!(group(&bytes, superblock, 1).expect("memory").is_none(), "there is one group only");
}

#[test]
fn groups_are_where_debugfs_says() {
    let directory = scratch();
    for features in ["64bit", "meta_bg,^resize_inode", "sparse_super2,^64bit", "^flex_bg"] {
        let image = mke2fs(directory.path(), &["-t", "ext4", "-b", "1024", "-O", features], "400M");
        let bytes = std::fs::read(&image).expect("an image");
        let superblock = only(&image).superblock;
        let listed = groups(&debugfs(&image, "stats"));
        for [number, places @ ..] in &listed {
            let group = group(&bytes, &superblock, *number as u32).expect("memory").expect("a group");
            let ours = [group.block_bitmap, group.inode_bitmap, group.inode_table];
            assert_eq!(ours, *places, "{features}: group {number}");
        }
        assert_eq!(listed.len() as u64, superblock.groups_count(), "{features}");
        assert!(listed.len() > 40, "{features}: {} groups", listed.len());
    }
}

#[test]
fn an_external_journal_and_its_file_system() {
    let directory = scratch();
    let id = "12345678-9abc-def0-1234-56789abcdef0";
    for (block_size, superblock_block) in [("1024", 2), ("4096", 1)] {
        let device = mke2fs(directory.path(), &["-b", block_size, "-O", "journal_dev", "-U", id], "2048");
        let found = only(&device);
        assert_eq!(found.journal, Journal::JournalDevice { superblock_block });
        assert_eq!(found.journal.extents(&found.superblock)[0].count, 2048);
    }
    let image = mke2fs(directory.path(), &["-t", "ext4", "-O", "^has_journal"], "16M");
    assert_eq!(only(&image).journal, Journal::None);
    for command in ["feature has_journal", &format!("ssv journal_uuid {id}"), "ssv journal_inum 0"] {
        run(Command::new("debugfs").args(["-w", "-R", command]).arg(&image));
    }
    assert!(matches!(only(&image).journal, Journal::External { uuid } if uuid[..2] == [0x12, 0x34]));
}

#[test]
fn an_edited_superblock_is_good() {
    let directory = scratch();
    let image = mke2fs(directory.path(), &["-t", "ext4"], "16M");
    run(Command::new("debugfs").args(["-w", "-R", "feature needs_recovery"]).arg(&image));
    let mut bytes = std::fs::read(&image).expect("an image");
    assert!(only(&image).superblock.needs_recovery());
    let older = bytes[1024..2048].to_vec();
    let mut edit = extfs::SuperblockEdit::new(&mut bytes[1024..2048]).expect("a superblock");
    edit.keep_error_record(&older).expect("a superblock").clear_needs_recovery().set_error().clear_valid().seal();
    std::fs::write(&image, bytes).expect("room");
    let superblock = only(&image).superblock;
    superblock.check().expect("a sealed superblock");
    assert!(!superblock.needs_recovery());
    assert_eq!(superblock.state & 3, extfs::state::ERROR);
    assert!(debugfs(&image, "stats").contains("with errors"));
}

/// Damage anywhere in the metadata: an answer, and no panic.
#[test]
fn damaged_metadata_is_survived() {
    let directory = scratch();
    for options in [["-t", "ext4", "-b", "1024"], ["-t", "ext3", "-b", "1024"]] {
        let image = mke2fs(directory.path(), &[&options[..], &["-O", "^metadata_csum"]].concat(), "8M");
        let bytes = std::fs::read(&image).expect("an image");
        let found = only(&image);
        let Journal::Internal { map_blocks, .. } = &found.journal else { panic!("{:?}", found.journal) };
        let table = group(&bytes, &found.superblock, 0).expect("memory").expect("group 0").inode_table;
        let inode = table as usize * 1024 + 7 * usize::from(found.superblock.inode_size);
        let mut places: Vec<usize> = (1024..2048).chain(2048..2048 + 64).chain(inode..inode + 128).collect();
        places.extend(map_blocks.iter().take(2).flat_map(|block| *block as usize * 1024..*block as usize * 1024 + 64));
        let mut answers = BTreeSet::new();
        for place in places {
            for value in [0u8, 1, 0x7f, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[place] = value;
                let found = discover(&damaged).expect("memory never fails, so nothing is read beyond it");
                answers.insert(found.first().map(|one| std::mem::discriminant(&one.journal)).is_some());
                for one in found {
                    let extents = one.journal.extents(&one.superblock);
                    let end = |extent: &JournalExtent| extent.physical + u64::from(extent.count);
                    assert!(extents.iter().all(|extent| end(extent) <= one.superblock.blocks_count));
                }
            }
        }
        assert_eq!(answers.len(), 2, "some damage hides the file system, some does not");
    }
}

/// Free blocks as dumpe2fs lists them, from the bitmaps.
fn free_blocks(image: &Path) -> BTreeSet<u64> {
    let mut free = BTreeSet::new();
    // A range ends with the first block of its last cluster.
    let rest = u64::from(only(image).superblock.cluster_blocks) - 1;
    for line in run(Command::new("dumpe2fs").arg(image)).lines() {
        // Those of a group are indented; the superblock's total is not.
        let Some(list) = line.strip_prefix("  Free blocks: ") else { continue };
        for part in list.split(", ").filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            free.extend(first.parse::<u64>().expect("a number")..=last.parse::<u64>().expect("a number") + rest);
        }
    }
    free
}

#[test]
fn a_block_that_is_called_free_is_free() {
    let directory = scratch();
    for (options, size, share) in [
        (["-t", "ext4", "-b", "1024", "-J", "size=4"].as_slice(), "64M", 80),
        (&["-t", "ext4", "-b", "4096", "-J", "size=4"], "300M", 90),
        (&["-t", "ext4", "-b", "4096", "-J", "size=4", "-O", "^flex_bg,^resize_inode"], "300M", 90),
        (&["-t", "ext4", "-b", "4096", "-J", "size=4", "-O", "meta_bg,^resize_inode"], "300M", 20),
        (&["-t", "ext4", "-b", "4096", "-J", "size=4", "-O", "bigalloc", "-C", "65536"], "300M", 80),
        (&["-t", "ext4", "-b", "1024", "-J", "size=4", "-O", "bigalloc"], "64M", 40),
        (&["-t", "ext4", "-b", "4096", "-J", "size=4", "-O", "sparse_super2"], "300M", 90),
        (&["-t", "ext3", "-b", "4096", "-J", "size=4"], "300M", 95),
    ] {
        let image = mke2fs(directory.path(), options, size);
        let content = directory.path().join("content");
        std::fs::write(&content, vec![1; 3 << 20]).expect("written");
        run(Command::new("debugfs").args(["-w", "-R", &format!("write {} f", content.display())]).arg(&image));
        let theirs = free_blocks(&image);
        let bytes = std::fs::read(&image).expect("an image");
        let found = only(&image).superblock;
        let mut allocation = Allocation::default();
        let mut ours = 0;
        for block in 0..found.blocks_count + 10 {
            if allocation.is_free(&bytes, block).expect("memory") {
                assert!(theirs.contains(&block), "{options:?}: block {block} is in use");
                ours += 1;
            }
        }
        assert!(ours * 100 >= theirs.len() * share, "{options:?}: {ours} of {} are found free", theirs.len());
    }
}

#[test]
fn a_bitmap_that_changes_changes_the_answer() {
    let directory = scratch();
    let image = mke2fs(directory.path(), &["-t", "ext4", "-b", "4096", "-J", "size=4"], "64M");
    let mut bytes = std::fs::read(&image).expect("an image");
    let superblock = only(&image).superblock;
    let free = *free_blocks(&image).last().expect("one is free");
    let bitmap = group(&bytes, &superblock, 0).expect("memory").expect("there").block_bitmap;
    let mut allocation = Allocation::default();
    assert!(allocation.is_free(&bytes, free).expect("memory"));
    let at = (bitmap * 4096 + free / 8) as usize;
    bytes[at] |= 1 << (free % 8);
    assert!(allocation.is_free(&bytes, free).expect("memory"), "nobody said that it changed");
    let block = bytes[(bitmap * 4096) as usize..][..4096].to_vec();
    allocation.changed(bitmap, Some(&block));
    assert!(!allocation.is_free(&bytes, free).expect("memory"));
    bytes[at] &= !(1 << (free % 8));
    allocation.changed(bitmap, None);
    assert!(allocation.is_free(&bytes, free).expect("memory"), "read again");
    // A superblock that ends the file system before the block.
    bytes[1024 + 4..1024 + 8].copy_from_slice(&(free as u32).to_le_bytes());
    let block = bytes[..4096].to_vec();
    allocation.changed(0, Some(&block));
    assert!(!allocation.is_free(&bytes, free).expect("memory"));
}

/// What a removal by debugfs changes, as one transaction, frees the blocks of the file, and no others but blocks of its map.
/// A kernel that puts the first block into a group writes its bitmap, and that it is there.
#[test]
fn a_group_descriptor_that_changes_changes_the_answer() {
    let directory = scratch();
    let image = mke2fs(directory.path(), &["-t", "ext4", "-b", "4096", "-J", "size=4", "-g", "2048"], "128M");
    let mut bytes = std::fs::read(&image).expect("an image");
    let superblock = only(&image).superblock;
    let groups = superblock.groups_count() as u32;
    let group_of = |bytes: &Vec<u8>, index| group(bytes, &superblock, index).expect("memory").expect("there");
    let index = (0..groups).find(|index| group_of(&bytes, *index).flags & 2 != 0).expect("one without a bitmap");
    let block = u64::from(superblock.blocks_per_group) * u64::from(index + 1) - 1;
    let mut allocation = Allocation::default();
    assert!(allocation.is_free(&bytes, block).expect("memory"));
    // All of it is in use. The flags are at byte 18 of a descriptor; descriptors begin in the second block.
    let bitmap = group_of(&bytes, index).block_bitmap as usize * 4096;
    bytes[bitmap..bitmap + 4096].fill(0xff);
    bytes[4096 + index as usize * superblock.descriptor_size as usize + 18] &= !2;
    assert_eq!(group_of(&bytes, index).flags & 2, 0);
    assert!(allocation.is_free(&bytes, block).expect("memory"), "nobody said that it changed");
    let descriptors = bytes[4096..8192].to_vec();
    allocation.changed(1, Some(&descriptors));
    assert!(!allocation.is_free(&bytes, block).expect("memory"));
}

#[test]
fn a_bitmap_tells_what_was_freed() {
    let directory = scratch();
    let files = directory.path().join("files");
    std::fs::create_dir(&files).expect("a directory");
    for (name, len) in [("small", 3000), ("large", 700_000), ("kept", 90_000)] {
        std::fs::write(files.join(name), vec![7; len]).expect("a file");
    }
    let root = files.to_str().expect("a plain name").to_owned();
    let variants: [(&[&str], &str); 6] = [
        (&["-t", "ext4"], "40M"),
        (&["-t", "ext4", "-b", "1024", "-O", "^flex_bg,^64bit"], "20M"),
        (&["-t", "ext3", "-b", "1024", "-O", "sparse_super,^uninit_bg"], "20M"),
        (&["-t", "ext4", "-b", "1024", "-O", "meta_bg,^resize_inode"], "40M"),
        (&["-t", "ext4", "-O", "bigalloc", "-C", "16384"], "60M"),
        (&["-t", "ext2", "-b", "4096", "-O", "has_journal"], "20M"),
    ];
    for (options, size) in variants {
        let image = mke2fs(directory.path(), &[options, &["-d", &root]].concat(), size);
        let superblock = only(&image).superblock;
        let block_bytes = superblock.block_size as usize;
        let mut freed = FreedBlocks::default();
        for name in ["small", "large"] {
            let before = std::fs::read(&image).expect("an image");
            let own: BTreeSet<u64> = debugfs(&image, &format!("blocks /{name}"))
                .split_whitespace()
                .map(|number| number.parse().expect("a number"))
                .collect();
            run(Command::new("debugfs").args(["-w", "-R", &format!("rm /{name}")]).arg(&image));
            let after = std::fs::read(&image).expect("an image");
            let changed: Vec<(u64, &[u8])> = (0..)
                .zip(before.chunks_exact(block_bytes).zip(after.chunks_exact(block_bytes)))
                .filter(|(_, (old, new))| old != new)
                .map(|(block, (_, new))| (block, new))
                .collect();
            let ranges = freed.of(&before, &changed).expect("memory").expect("understood");
            let told: BTreeSet<u64> = ranges.into_iter().flatten().collect();
            assert!(
                own.is_subset(&told) && !own.is_empty(),
                "{options:?} {name}: {own:?} are freed, told are {told:?}"
            );
            // A cluster is freed as a whole; of a map there are a few blocks.
            let more = told.len() - own.len();
            assert!(more <= 8 + superblock.cluster_blocks as usize, "{options:?} {name}: {more} more are told");
        }
        let kept = debugfs(&image, "blocks /kept");
        assert!(!kept.trim().is_empty());
    }
    assert_eq!(FreedBlocks::default().of(&vec![0; 1 << 20], &[]).expect("memory"), None, "no file system");
}

/// A guest that frees every other block: what is told stays short, and has all of them.
#[test]
fn many_ranges_that_are_freed_are_told_together() {
    let directory = scratch();
    let image = mke2fs(directory.path(), &["-t", "ext4", "-b", "4096"], "128M");
    let mut bytes = std::fs::read(&image).expect("an image");
    let (superblock, mut allocation) = (only(&image).superblock, Allocation::default());
    let first = group(&bytes, &superblock, 0).expect("memory").expect("a group");
    let at = first.block_bitmap as usize * 4096;
    bytes[at..at + 4096].fill(0xff);
    let after = vec![0xaa; 4096];
    let ranges =
        FreedBlocks::default().of(&bytes, &[(first.block_bitmap, &after)]).expect("memory").expect("understood");
    assert!(ranges.len() <= 1025, "{} ranges", ranges.len());
    bytes[at..at + 4096].copy_from_slice(&after);
    for block in 0..superblock.blocks_per_group.into() {
        let is_free = allocation.is_free(&bytes, block).expect("memory");
        assert!(!is_free || ranges.iter().any(|range| range.contains(&block)), "block {block} was freed");
    }
}
