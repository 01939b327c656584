//! The cases: what a file system is like, where it is, what is done to it while it works.

use guest_kit::image::{ExtRecipe, Journal};
use guest_kit::workload::Mode;
use guest_tools::random::Random;

/// Where on its disk the file system is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// All of it.
    Whole,
    /// All but its end, for a file system that is to grow.
    Roomy,
    /// The second of two primary partitions of an MBR.
    Primary,
    /// A logical partition.
    Logical,
    /// The second of two partitions of a GPT.
    Gpt,
    /// A partition that begins at sector 63, as those of old did.
    Sector63,
}

/// Which kernel the guest has to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The one that runs natively here.
    Native,
    /// Debian's, with all its features, emulated where it has to be.
    Stock,
    /// That of another suite of Debian's.
    Suite(&'static str),
}

/// One case; a seed decides what it leaves open.
#[derive(Clone, Debug)]
pub struct Case {
    /// "feature/bigalloc".
    pub name: String,
    /// The file system.
    pub recipe: ExtRecipe,
    /// Where it is.
    pub layout: Layout,
    /// MiB of its external journal.
    pub external_mib: Option<u32>,
    /// The journaling modes that it is tried in.
    pub modes: &'static [Mode],
    /// Further mount options.
    pub mount: &'static str,
    /// What the guest does while the workers work, in the words of `script`.
    pub steps: &'static str,
    /// Its kernel.
    pub kernel: Wanted,
    /// QEMU's machine.
    pub machine: &'static str,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// A second disk has a live copy of the file system of another guest, for the steps to put over this one.
    pub has_backup: bool,
    /// The disk is full now and then.
    pub is_full: bool,
    /// Ends by starting another kernel out of the running one, without a word to QEMU.
    pub by_kexec: bool,
    /// What the guest needs beside the usual.
    pub programs: &'static [&'static str],
    /// In `--quick`.
    pub is_quick: bool,
}

impl Case {
    /// Whether its steps have the kernel note an error in the file system.
    pub fn notes_error(&self) -> bool {
        self.steps.contains("trigger_fs_error")
    }

    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            recipe: ExtRecipe::ext4(96, 8),
            layout: Layout::Whole,
            external_mib: None,
            modes: &[Mode::Journal, Mode::Journal, Mode::Ordered],
            mount: "",
            steps: "",
            kernel: Wanted::Native,
            machine: "q35",
            memory_mib: 256,
            has_backup: false,
            is_full: false,
            by_kexec: false,
            programs: &[],
            is_quick: false,
        }
    }

    fn steps(name: &str, steps: &'static str) -> Self {
        Self { steps, ..Self::new(name) }
    }

    /// The placement itself, or what stands in for one that this case cannot have: `nvm` and durability by age are for internal
    /// journals.
    pub fn placement_for(&self, placement: &'static str) -> &'static str {
        match placement {
            "nvm" | "durable" | "durable-0" if self.external_mib.is_some() => "retain",
            placement => placement,
        }
    }

    fn quick(mut self) -> Self {
        self.is_quick = true;
        self
    }

    fn stock(mut self) -> Self {
        self.kernel = Wanted::Stock;
        self
    }

    /// What `random/*` draws: file system, place and steps of three cases.
    pub fn drawn(seed: u64, cases: &[Self]) -> Self {
        let mut random = Random::of(seed, 7);
        let mut pick = |prefixes: &[&str]| {
            let all: Vec<&Self> =
                cases.iter().filter(|case| prefixes.iter().any(|prefix| case.name.starts_with(prefix))).collect();
            all[usize::try_from(random.below(all.len() as u64)).unwrap_or(0)].clone()
        };
        let of = pick(&["feature/", "journal/"]);
        let at = pick(&["partition/", "machine/q35", "machine/pc", "machine/microvm"]);
        let with = pick(&["online/"]);
        let layout = if with.layout == Layout::Roomy { Layout::Roomy } else { at.layout };
        let kernel = if of.kernel == Wanted::Native { at.kernel } else { of.kernel };
        Self {
            name: format!("random/{}+{}+{}", tail(&of.name), tail(&at.name), tail(&with.name)),
            layout,
            steps: with.steps,
            kernel,
            machine: at.machine,
            programs: with.programs,
            is_full: with.is_full,
            by_kexec: false,
            memory_mib: with.memory_mib.min(of.memory_mib),
            modes: if with.modes.len() == 1 { with.modes } else { of.modes },
            is_quick: false,
            ..of
        }
    }
}

fn tail(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

const JOURNAL_ALONE: &[Mode] = &[Mode::Journal];
const ALL_MODES: &[Mode] = &[Mode::Journal, Mode::Ordered, Mode::Writeback];

/// All cases, the random ones excepted.
pub fn all() -> Vec<Case> {
    let mut cases = vec![Case { modes: ALL_MODES, ..Case::new("plain/ext4") }.quick()];
    cases.extend(features());
    cases.extend(journals());
    for (name, layout) in [
        ("partition/primary", Layout::Primary),
        ("partition/logical", Layout::Logical),
        ("partition/gpt", Layout::Gpt),
        ("partition/sector-63", Layout::Sector63),
    ] {
        cases.push(Case { layout, is_quick: layout == Layout::Sector63, ..Case::new(name) });
    }
    cases.extend(online());
    cases.extend(again());
    for (name, machine) in [("machine/q35", "q35"), ("machine/pc", "pc"), ("machine/microvm", "microvm,pcie=on")] {
        cases.push(Case { machine, ..Case::new(name) });
    }
    let kexec = Case { programs: &["kexec"], memory_mib: 1024, by_kexec: true, ..Case::new("machine/kexec") };
    cases.push(Case { modes: ALL_MODES, ..kexec.stock() });
    for (name, kernel) in [
        ("kernel/stock", Wanted::Stock),
        ("kernel/bookworm-backports", Wanted::Suite("bookworm-backports")),
        ("kernel/trixie", Wanted::Suite("trixie")),
        ("kernel/sid", Wanted::Suite("sid")),
    ] {
        cases.push(Case { kernel, modes: ALL_MODES, ..Case::new(name) });
        let steps = Case { kernel, ..Case::steps(&format!("{name}-shutdown"), SHUTDOWN_WITHOUT_FLUSH) };
        cases.push(Case { programs: &["perl"], ..steps });
    }
    cases
}

fn features() -> Vec<Case> {
    let with = |name: &str, block_bytes: u32, features: &[&str], arguments: &[&str]| {
        let mut case = Case::new(&format!("feature/{name}"));
        case.recipe.block_bytes = block_bytes;
        case.recipe.features = features.iter().map(|word| (*word).to_owned()).collect();
        case.recipe.arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        case
    };
    let ext3 = |name: &str, block_bytes: u32| {
        let mut case = Case::new(&format!("feature/{name}"));
        case.recipe = ExtRecipe { block_bytes, ..ExtRecipe::ext3(96, 8) };
        case
    };
    // Blocks larger than a page of memory are for kernels from 6.19 on.
    let mut large = with("block-64k", 65536, &[], &[]);
    (large.recipe.size_mib, large.recipe.journal, large.kernel) = (1024, Journal::Internal(64), Wanted::Suite("sid"));
    let mut sixteen = with("block-16k", 16384, &[], &[]);
    (sixteen.recipe.size_mib, sixteen.recipe.journal, sixteen.kernel) =
        (512, Journal::Internal(16), Wanted::Suite("sid"));
    let mut meta_bg = with("meta_bg", 1024, &["meta_bg", "^resize_inode"], &[]);
    meta_bg.recipe.size_mib = 192;
    vec![
        with("block-1k", 1024, &[], &[]).quick(),
        with("block-2k", 2048, &[], &[]),
        sixteen,
        large,
        with("bigalloc", 4096, &["bigalloc"], &["-C", "65536"]),
        with("inline_data", 4096, &["inline_data"], &["-I", "512"]).quick(),
        with("large_dir", 4096, &["large_dir"], &[]),
        with("ea_inode", 4096, &["ea_inode"], &[]),
        with("metadata_csum_seed", 4096, &["metadata_csum_seed"], &[]),
        with("no-metadata_csum", 4096, &["^metadata_csum"], &[]),
        with("no-64bit", 4096, &["^64bit"], &[]),
        with("no-extents", 4096, &["^extents", "^64bit"], &[]),
        with("orphan_file", 4096, &["orphan_file"], &[]),
        meta_bg,
        with("sparse_super2", 4096, &["sparse_super2"], &[]),
        with("no-flex_bg", 4096, &["^flex_bg"], &[]),
        with("uninit_bg", 4096, &["uninit_bg", "^metadata_csum"], &[]),
        with("inode-128", 4096, &[], &["-I", "128"]),
        with("inode-1024", 4096, &[], &["-I", "1024"]),
        ext3("ext3", 4096),
        ext3("ext3-1k", 1024),
        with("quota", 4096, &["quota", "project"], &[]).stock(),
        with("casefold", 4096, &["casefold"], &[]).stock(),
        with("verity", 4096, &["verity"], &[]).stock(),
        with("encrypt", 4096, &["encrypt"], &[]).stock(),
        with("stable_inodes", 4096, &["stable_inodes"], &[]),
        with("mmp", 4096, &["mmp"], &[]),
        with("fast_commit", 4096, &["fast_commit"], &[]),
    ]
}

fn journals() -> Vec<Case> {
    let internal = |name: &str, block_bytes: u32, size_mib: u32, journal_mib: u32| {
        let mut case = Case::new(&format!("journal/{name}"));
        case.recipe = ExtRecipe { block_bytes, ..ExtRecipe::ext4(size_mib, journal_mib) };
        case
    };
    let external = |name: &str, block_bytes: u32, journal_mib: u32| {
        let mut case = Case::new(&format!("journal/{name}"));
        case.recipe.block_bytes = block_bytes;
        case.external_mib = Some(journal_mib);
        case
    };
    let options = |name: &str, mount: &'static str| Case { mount, ..Case::new(&format!("journal/{name}")) };
    vec![
        internal("1024-blocks-of-1k", 1024, 96, 1),
        internal("1024-blocks", 4096, 96, 4),
        internal("256-mib", 4096, 1024, 256),
        external("external", 4096, 16).quick(),
        external("external-1k", 1024, 8),
        external("external-5-mib", 4096, 5),
        options("checksum", "journal_checksum"),
        Case { modes: &[Mode::Journal, Mode::Writeback], ..options("async-commit", "journal_async_commit") },
        options("commit-1", "commit=1"),
        options("commit-300", "commit=300"),
        options("nobarrier", "nobarrier"),
        Case { modes: &[Mode::Ordered, Mode::Writeback], ..options("nodelalloc", "nodelalloc") },
    ]
}

fn online() -> Vec<Case> {
    let case = |name: &str, steps| Case::steps(&format!("online/{name}"), steps);
    let mut full = Case { is_full: true, ..case("no-space", FULL) };
    full.recipe.size_mib = 48;
    vec![
        Case { layout: Layout::Roomy, ..case("resize2fs", RESIZE) }.quick(),
        case("tune2fs", TUNE),
        case("remount", REMOUNT),
        case("fsfreeze", FREEZE),
        Case { modes: &[Mode::Ordered], ..case("chattr-j", CHATTR) },
        case("fstrim", TRIM),
        Case { mount: "discard", ..case("discard", TRIM) },
        Case { programs: &["e4defrag"], modes: &[Mode::Ordered, Mode::Journal], ..case("e4defrag", DEFRAGMENT) },
        Case { memory_mib: 192, ..case("swap-file", SWAP) },
        case("truncations", TRUNCATIONS),
        case("loop-inside", LOOP),
        case("mount-storm", STORM),
        case("journal-removed-and-added", JOURNAL_AGAIN),
        case("mke2fs", MKE2FS),
        full,
        case("postmark", POSTMARK),
        Case { machine: "pc", ..case("suspend", SUSPEND).stock() },
        case("drop-caches", DROP_CACHES),
    ]
}

/// A file system that was mounted, was not unmounted in good order, and is mounted again by the same kernel.
fn again() -> Vec<Case> {
    let case = |name: &str, steps| {
        let case = Case::steps(&format!("again/{name}"), steps);
        Case { mount: "errors=remount-ro,commit=300", programs: &["perl"], ..case }
    };
    let backup = |name: &str, steps| Case { has_backup: true, modes: JOURNAL_ALONE, ..case(name, steps) };
    vec![
        case("umount", UMOUNT),
        Case { modes: &[Mode::Ordered], ..case("other-modes", OTHER_MODES) },
        case("abort", ABORT),
        case("abort-with-orphans", ABORT_WITH_ORPHANS),
        case("abort-amid-truncations", ABORT_AMID_TRUNCATIONS),
        case("shutdown-full", SHUTDOWN),
        case("shutdown-with-flush", SHUTDOWN_WITH_FLUSH),
        case("shutdown-without-flush", SHUTDOWN_WITHOUT_FLUSH),
        case("shutdown-many", SHUTDOWN_MANY),
        case("lazy-umount", LAZY),
        case("e2fsck", E2FSCK),
        case("loop-device", LOOP_OVER),
        backup("backup-1m", BACKUP_1M),
        backup("backup-64k", BACKUP_64K),
        backup("backup-4k", BACKUP_4K),
        backup("backup-direct", BACKUP_DIRECT),
        backup("backup-backwards", BACKUP_BACKWARDS),
        backup("backup-e2fsck", BACKUP_E2FSCK),
    ]
}

const RESIZE: &str = "settle
resize2fs $DISK >/tmp/out 2>&1 || bad damaged resize2fs: $(said /tmp/out)";

const TUNE: &str = "for n in 1 2 3 4 5; do
    settle 16
    /bin/tune2fs -L round-$n -c $n -r $((n * 10)) -E mount_opts=acl $DISK >/tmp/out 2>&1 || bad damaged tune2fs: $(said /tmp/out)
done";

const REMOUNT: &str = "for n in 1 2 3 4 5; do
    settle 16
    mount -o remount,commit=$n,noatime,min_batch_time=$n /mnt || bad damaged 'cannot be remounted'
done
stop; mount -o remount,ro /mnt || bad damaged 'cannot be remounted read-only'
verify_all; mount -o remount,rw /mnt || bad damaged 'cannot be remounted writable'
next";

const FREEZE: &str = "for n in 1 2 3 4 5; do
    settle 16
    fsfreeze --freeze /mnt || cannot fsfreeze; sleep 0.2; fsfreeze --unfreeze /mnt
done";

const CHATTR: &str = "for n in 1 2 3 4 5 6; do
    settle 16
    case $n in 1|3|5) flag=+j;; *) flag=-j;; esac
    # Files come and go meanwhile.
    chattr $flag /mnt/*/d*/f* /mnt/*/ledger 2>/dev/null
done";

const TRIM: &str = "for n in 1 2 3 4 5; do settle 16; fstrim /mnt || cannot fstrim; done";

const DEFRAGMENT: &str = "for n in 1 2 3; do settle 24; e4defrag /mnt >/tmp/out 2>&1; done";

const SWAP: &str = "dd if=/dev/urandom of=/mnt/swap bs=1M count=24 2>/dev/null; sync; chmod 600 /mnt/swap
mkswap /mnt/swap >/dev/null; swapon /mnt/swap || cannot swapon: $(last_words)
dd if=/dev/zero of=/tmp/ballast bs=1M count=60 2>/dev/null
settle; settle; rm /tmp/ballast
swapoff /mnt/swap && rm /mnt/swap; settle";

const LOOP: &str = "truncate -s 24M /mnt/inner; /bin/mke2fs -q -F -t ext4 /mnt/inner || cannot mke2fs; mkdir /tmp/inner
mount -t ext4 -o loop,data=journal /mnt/inner /tmp/inner || cannot loop: $(last_words)
guest-tools mix --directory /tmp/inner/mix --seed 5 --stream inner --count 400
settle; umount /tmp/inner || bad damaged 'the inner file system cannot be unmounted'
e2fsck -fn /mnt/inner >/tmp/out 2>&1 || bad damaged inner: $(said /tmp/out)";

const STORM: &str = "for n in 1 2 3 4 5 6; do settle 16; again; done";

const UMOUNT: &str = "settle; again; settle; again";

const JOURNAL_AGAIN: &str = "settle; stop; umount /mnt || bad damaged umount
case $MOUNT in *journal_path*) cannot 'the journal is not its own';; esac
/bin/tune2fs -O ^has_journal $DISK >/tmp/out 2>&1 || cannot $(said /tmp/out)
mount -t ext4 $DISK /mnt && umount /mnt || bad damaged 'cannot be mounted without a journal'
/bin/tune2fs -j -J size=8 $DISK >/tmp/out 2>&1 || cannot $(said /tmp/out)
up || bad damaged cannot be mounted again: $(last_words)
verify_all; next";

const MKE2FS: &str = "settle; stop; umount /mnt || bad damaged umount
case $MOUNT in *journal_path*) cannot 'the journal is not its own';; esac
/bin/mke2fs -F -q -t ext4 -b 1024 -J size=4 $DISK 64M >/tmp/out 2>&1 || cannot $(said /tmp/out)
up || bad damaged the new one cannot be mounted: $(last_words)
forget; next";

const FULL: &str = "for n in 1 2 3; do
    dd if=/dev/zero of=/mnt/filler bs=256k 2>/dev/null; sleep 0.3; sync; rm /mnt/filler; settle 8
done";

const POSTMARK: &str = "mkdir /mnt/postmark
printf 'set location /mnt/postmark\\nset seed 7\\nset number 300\\nset transactions 1000000\\nrun\\n' | postmark >/dev/null &
settle; settle";

/// The clock wakes it; its devices are started anew, and its kernel goes on where it was.
const SUSPEND: &str = "for n in 1 2 3; do
    settle 24
    echo +3 >/sys/class/rtc/rtc0/wakealarm || cannot wakealarm
    echo mem >/sys/power/state || cannot suspend
    dmesg | grep -q 'suspend exit' || cannot 'it was not suspended'
done";

const DROP_CACHES: &str = "for n in 1 2 3 4 5 6 7 8; do settle 16; echo 3 >/proc/sys/vm/drop_caches; done";

const OTHER_MODES: &str = "settle; stop; umount /mnt || bad damaged umount
for mode in ordered writeback journal; do
    mount -t ext4 -o data=$mode$REST $DISK /mnt || cannot $mode: $(last_words)
    verify_all
    next; settle 24; stop; umount /mnt || bad damaged umount
done
up || bad damaged cannot be mounted again: $(last_words)
verify_all; next";

const ABORT: &str = "settle
echo 1 >/sys/fs/ext4/${DISK##*/}/trigger_fs_error || cannot trigger_fs_error
again";

/// Files, one with a block of attributes, and a directory that are open and have no name any more: the next kernel forgets them, as an error is noted.
const ABORT_WITH_ORPHANS: &str = "settle
exec 7>/mnt/held 8>/mnt/other; dd if=/dev/urandom bs=4k count=20 >&7 2>/dev/null; echo other >&8
perl -e 'my ($f, $n, $v) = (\"/mnt/held\", \"user.large\", \"x\" x 600); syscall(188, $f, $n, $v, 600, 0) == 0 or die $!' ||
    cannot setxattr
mkdir /mnt/gone; exec 9</mnt/gone; rmdir /mnt/gone
rm /mnt/held /mnt/other; sync
echo 1 >/sys/fs/ext4/${DISK##*/}/trigger_fs_error || cannot trigger_fs_error
exec 7>&- 8>&- 9<&-
again";

/// Files of several extents are written, and cut short while that is written back. At the end of a page: of a page that stays, Linux 6.12 zeroes the rest
/// past its journal, after it has counted the checksum of what is on its way there (`data=journal`), on any disk.
const TRUNCATIONS: &str = "settle
for n in 1 2 3 4; do
    perl -e 'while (1) {
        open(my $f, \"+>\", \"/mnt/cut$ARGV[0]\") or exit;
        for my $i (0 .. 11) { sysseek($f, $i * 131072, 0) and syswrite($f, \"x\" x 65536) or exit; }
        syscall(277, fileno($f), 0, 0, 2) == 0 or exit;
        truncate($f, 8192) or exit;
        syscall(74, fileno($f)) == 0 or exit;
    }' $n &
    cutters=\"$cutters $!\"
done
settle 200";

/// Files of several extents are cut short all the while: an inode that is being cut is an orphan until its last block is free. A kernel waits
/// for what is being written beyond its new size before it begins with that, and a commit may come meanwhile.
const ABORT_AMID_TRUNCATIONS: &str = "settle
for n in 1 2 3 4; do
    perl -e 'while (1) {
        open(my $f, \"+>\", \"/mnt/cut$ARGV[0]\") or exit;
        for my $i (0 .. 11) { sysseek($f, $i * 131072, 0) and syswrite($f, \"x\" x 65536) or exit; }
        syscall(277, fileno($f), 0, 0, 2) == 0 or exit;
        truncate($f, 8192) or exit;
        syscall(74, fileno($f)) == 0 or exit;
    }' $n &
    cutters=\"$cutters $!\"
done
sleep 1
echo 1 >/sys/fs/ext4/${DISK##*/}/trigger_fs_error || cannot trigger_fs_error
sleep 0.3; kill $cutters 2>/dev/null; wait $cutters 2>/dev/null
again";

const SHUTDOWN: &str = "settle; shutdown_flavour 0; again; settle; shutdown_flavour 0; again";
const SHUTDOWN_WITH_FLUSH: &str = "settle; shutdown_flavour 1; again; settle; shutdown_flavour 1; again";
const SHUTDOWN_WITHOUT_FLUSH: &str = "settle; shutdown_flavour 2; again; settle; shutdown_flavour 2; again";
const SHUTDOWN_MANY: &str = "for n in 1 2 3 4 5 6; do settle 24; shutdown_flavour $((n % 3)); again; done";

const LAZY: &str = "settle; exec 7>/mnt/held; stop; umount -l /mnt; echo more >&7; sync; exec 7>&-; sleep 0.3
up || bad damaged cannot be mounted again: $(last_words)
verify_all; next";

const E2FSCK: &str = "settle; shutdown_flavour 2; stop; umount /mnt || bad damaged umount
case $MOUNT in *journal_path*) with='-j /dev/vdb';; esac
e2fsck -fy $with $DISK >/tmp/out 2>&1; [ $? -le 1 ] || bad damaged e2fsck: $(said /tmp/out)
up || bad damaged cannot be mounted again: $(last_words)
verify_all; next";

const LOOP_OVER: &str = "settle; shutdown_flavour 2; stop; umount /mnt || bad damaged umount
losetup /dev/loop0 $DISK || cannot losetup
mount $MOUNT /dev/loop0 /mnt || bad damaged cannot be mounted by way of a loop device: $(last_words)
verify_all; next";

const BACKUP_1M: &str = "settle; stop; umount /mnt || bad damaged umount
dd if=$BACKUP of=$DISK bs=1M 2>/dev/null || bad damaged 'the copy failed'; sync
restored; next";
const BACKUP_64K: &str = "settle; stop; umount /mnt || bad damaged umount
dd if=$BACKUP of=$DISK bs=64k 2>/dev/null || bad damaged 'the copy failed'; sync
restored; next";
const BACKUP_4K: &str = "settle; stop; umount /mnt || bad damaged umount
dd if=$BACKUP of=$DISK bs=4k conv=fsync 2>/dev/null || bad damaged 'the copy failed'
restored; next";
const BACKUP_DIRECT: &str = "settle; stop; umount /mnt || bad damaged umount
dd if=$BACKUP of=$DISK bs=64k oflag=direct 2>/dev/null || cannot 'dd oflag=direct'
restored; next";
const BACKUP_BACKWARDS: &str = "settle; stop; umount /mnt || bad damaged umount
piece=$(( $(cat /sys/block/${DISK##*/}/size) / 2048 - 1 ))
while [ $piece -ge 0 ]; do
    dd if=$BACKUP of=$DISK bs=1M count=1 skip=$piece seek=$piece conv=notrunc,fsync 2>/dev/null || bad damaged 'the copy failed'
    piece=$((piece - 1))
done
restored; next";
const BACKUP_E2FSCK: &str = "settle; stop; umount /mnt || bad damaged umount
dd if=$BACKUP of=$DISK bs=1M 2>/dev/null || bad damaged 'the copy failed'; sync
e2fsck -fy $DISK >/tmp/out 2>&1; [ $? -le 1 ] || bad damaged e2fsck: $(said /tmp/out)
restored; next";

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_seeds_draw_combinations() {
        let cases = all();
        let names: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names.len(), cases.len());
        assert!(cases.iter().filter(|case| case.is_quick).count() >= 5);
        let drawn: BTreeSet<String> = (0..100).map(|seed| Case::drawn(seed, &cases).name).collect();
        assert!(drawn.len() > 50, "{drawn:?}");
        assert_eq!(Case::drawn(3, &cases).name, Case::drawn(3, &cases).name);
    }
}
