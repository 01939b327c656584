//! Fast commits need inode and extent logic to be replayed, so such a journal is materialised: when its guest has died it is in its
//! own place, byte for byte as the guest wrote it. A mirror inside the guest gives a second disk, QEMU's own, every write
//! that amberlog's gets; what is on that one is what the guest wrote.

use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{Guest, judge};
use seeded_random::Random;
use std::path::Path;

const MIB: u64 = 48;

/// All blocks of the journal of a file system, the superblock first.
fn journal_of(image: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(image).unwrap();
    let file_system = extfs::discover(&bytes).unwrap().remove(0);
    let block_bytes = u64::from(file_system.superblock.block_size);
    let mut blocks = Vec::new();
    for extent in file_system.journal.extents(&file_system.superblock) {
        for index in 0..u64::from(extent.count) {
            let at = ((extent.physical + index) * block_bytes) as usize;
            blocks.push(bytes[at..at + block_bytes as usize].to_vec());
        }
    }
    blocks
}

/// Does the outcome of one kernel's replay on both images agree: mounted, or not?
fn mounts(bench: &Bench, name: &str, image: &Path) -> bool {
    let script = "if mount -t ext4 /dev/vda /mnt; then ls -R /mnt >/dev/null && umount /mnt && mark mounted; else mark refused; fi";
    let mut spec = bench.spec(name, script, disk_with(image, ",placement=storage"));
    // The kernel that wrote it.
    spec.modules = vec!["dm-mod".to_owned()];
    let mut guest = Guest::start(spec).unwrap();
    let is = |marks: &[String], word: &str| marks.iter().any(|mark| mark == word);
    let mounted = guest
        .await_report("neither mounted nor refused", LIMIT, |reported| {
            if is(&reported.marks, "mounted") { Some(true) } else { is(&reported.marks, "refused").then_some(false) }
        })
        .unwrap();
    kill(&mut guest);
    mounted
}

fn round(seed: u64, mode: &str) -> (bool, bool) {
    let mut random = Random::of(seed, 17);
    let bench = Bench::new();
    let (image, control) = (bench.path("image"), bench.path("control"));
    let recipe = ExtRecipe { features: vec!["fast_commit".to_owned()], ..ExtRecipe::ext4(MIB as u32, 8) };
    recipe.make(&image).unwrap();
    std::fs::copy(&image, &control).unwrap();
    // Full commits now and then, by themselves or by what cannot be done by a fast one.
    let commit = 1 + random.below(6);
    let (mix, records) = (20 + random.below(400), 5 + random.below(60));
    let script = format!(
        "echo '0 {} mirror core 2 1024 nosync 2 /dev/vda 0 /dev/vdb 0' | dmsetup create pair --noudevsync || fail dmsetup
         echo 30 >/proc/sys/vm/dirty_writeback_centisecs
         echo 30 >/proc/sys/vm/dirty_expire_centisecs
         mount -t ext4 -o data={mode},commit={commit} /dev/dm-0 /mnt || fail mount
         guest-tools mix --directory /mnt/mix --seed {seed} --count {mix} &
         guest-tools records --directory /mnt/records --stream records --count {records} --seed {seed}
         wait
         # Nothing goes on by itself any more, and the last is a fast commit.
         mount -o remount,commit=1000 /mnt
         echo 100000 >/proc/sys/vm/dirty_writeback_centisecs
         sleep 2
         for n in $(seq {}); do echo $n >/mnt/last-$n; sync /mnt/last-$n; done
         sleep 1
         mark quiet",
        MIB * 2048,
        1 + random.below(20)
    );
    let mut spec = bench.spec("fast", script, disk(&image));
    spec.modules = ["dm-mod", "dm-mirror"].map(str::to_owned).to_vec();
    spec.programs = vec!["dmsetup"];
    // Not an NVMe drive: Linux 6.1 looks for namespaces a second time soon after it has found them, and may wait there for ever for
    // requests that its own mirror holds back. The address puts this disk behind amberlog's, so that it is vdb.
    let drive = format!("if=none,id=control,format=raw,file={}", control.display());
    spec.qemu_arguments =
        ["-drive", &drive, "-device", "virtio-blk-pci,drive=control,addr=0x1e"].map(Into::into).to_vec();
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("quiet", LIMIT).unwrap();
    kill(&mut guest);
    let report = bench.report();
    drop(guest);

    let (ours, theirs) = (journal_of(&image), journal_of(&control));
    assert_eq!(ours.len(), theirs.len());
    let differing: Vec<usize> = (0..ours.len()).filter(|index| ours[*index] != theirs[*index]).collect();
    let superblock = jbd2::Superblock::decode(&theirs[0]).unwrap();
    assert!(
        differing.is_empty(),
        "seed {seed}, {mode}: log blocks {differing:?} are not as the guest wrote them ({superblock:?})"
    );
    let is_live = !superblock.is_empty();
    assert_eq!(report.status(0), if is_live { "materialised" } else { "clean" }, "seed {seed}, {mode}");
    // One kernel makes of the one what it makes of the other.
    let (ours, theirs) = (mounts(&bench, "ours", &image), mounts(&bench, "theirs", &control));
    assert_eq!(ours, theirs, "seed {seed}, {mode}: one of two equal journals is mounted");
    if ours {
        let verdict = judge::check(&FileSystem::whole(image)).unwrap();
        let control = judge::check(&FileSystem::whole(control)).unwrap();
        assert_eq!(verdict.is_consistent(), control.is_consistent(), "seed {seed}, {mode}: {verdict:?} {control:?}");
    }
    (is_live, ours)
}

#[test]
fn a_journal_with_fast_commits_is_as_its_guest_wrote_it() {
    let (mut live, mut refused) = (0, Vec::new());
    let count = rounds(2);
    for index in 0..count {
        let mode = if index % 4 == 3 { "journal" } else { "ordered" };
        let (is_live, mounted) = round(seed() + index, mode);
        live += u64::from(is_live);
        if !mounted {
            refused.push(seed() + index);
        }
    }
    println!(
        "{count} journals, {live} of them live; seeds that no kernel mounts, on QEMU's own disk neither: {refused:?}"
    );
    assert!(live > 0, "no journal was live");
}
