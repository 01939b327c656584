//! Formats of image files that are no raw disks, known by their first or last bytes.
//!
//! A disk that is served as it is lets the guest write over the first block. In a qcow2 image that block is the map of all others,
//! so what is not a raw disk must be known before. The marks are those that QEMU's own drivers probe for, those at the end
//! of a file for which QEMU does not look (fixed VHD, DMG), and those of what images are shipped in: compressed files, archives.
//!
//! The mark may also be a guest's: nothing keeps one from writing it to its disk. So a refusal says how to go on, and a disk
//! that amberlog has served itself is not asked again for as long as it is known to be the same.
//!
//! What is *not* refused: any content that a mark does not name. A disk may hold anything, so there is no list of what is raw.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// As much as QEMU looks at (`BLOCK_PROBE_BUF_SIZE`), in bytes.
const HEAD_BYTES: usize = 512;
/// Where trailers are, in bytes: a footer of 512 bytes, and a last sector that is not whole.
const TAIL_BYTES: usize = 1024;
const FOOTER_BYTES: usize = 512;

/// A format that is not raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// What `qemu-img` calls by this name, and can convert.
    Image(&'static str),
    /// A container that hides the disk's content: `luks`.
    Encrypted(&'static str),
    /// A file that was packed with this program; the disk is inside.
    Packed(&'static str),
    /// A file of which the disk is only a part, called so.
    Archive(&'static str),
}

/// An image that is not raw, and what to do about it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}", sentence(path, *format))]
pub struct OtherFormat {
    /// The image.
    pub path: PathBuf,
    /// What it is.
    pub format: Format,
}

fn sentence(path: &Path, format: Format) -> String {
    let path = path.display();
    let (what, instead) = match format {
        Format::Image(name) => {
            (format!("a {name} image"), format!("convert it (qemu-img convert -f {name} -O raw {path} NEW)"))
        }
        Format::Encrypted("luks") => (
            "a LUKS container".to_owned(),
            "open it first and serve what is inside (cryptsetup open, or qemu-img convert)".to_owned(),
        ),
        Format::Encrypted(name) => {
            (format!("a {name} container"), "open it first, and serve what is inside".to_owned())
        }
        Format::Packed(name) => (format!("packed with {name}"), "unpack it first".to_owned()),
        Format::Archive(name) => (name.to_owned(), "take the disk out of it first, and convert that to raw".to_owned()),
    };
    format!(
        "{path} is {what} and not a raw disk: a guest would see the wrong content and write over it. Nothing was changed; \
         {instead}. If a guest has written that to its own raw disk, say format=raw"
    )
}

/// Says what an image is if it is known to be something else than a raw disk.
///
/// # Errors
/// When it cannot be read.
pub fn probe(image: &File) -> io::Result<Option<Format>> {
    let size = (&*image).seek(SeekFrom::End(0))?;
    let mut head = [0; HEAD_BYTES];
    let head_bytes = usize::try_from(size).unwrap_or(HEAD_BYTES).min(HEAD_BYTES);
    image.read_exact_at(&mut head[..head_bytes], 0)?;
    let mut tail = [0; TAIL_BYTES];
    let tail_bytes = usize::try_from(size).unwrap_or(TAIL_BYTES).min(TAIL_BYTES);
    image.read_exact_at(&mut tail[..tail_bytes], size - tail_bytes as u64)?;
    Ok(recognise(&head[..head_bytes], &tail[..tail_bytes]))
}

/// Marks at a fixed place of the first bytes.
const MARKS: &[(usize, &[u8], Format)] = &[
    (0, b"KDMV", Format::Image("vmdk")),
    (0, b"COWD", Format::Image("vmdk")),
    (64, &[0x7f, 0x10, 0xda, 0xbe], Format::Image("vdi")),
    (0, b"vhdxfile", Format::Image("vhdx")),
    (0, b"conectix", Format::Image("vpc")),
    (0, b"QED\0", Format::Image("qed")),
    (0, b"WithoutFreeSpace", Format::Image("parallels")),
    (0, b"WithouFreSpacExt", Format::Image("parallels")),
    (0, b"Bochs Virtual HD Image", Format::Image("bochs")),
    (0, b"#!/bin/sh\n#V2.0 Format\n", Format::Image("cloop")),
    // Both versions: QEMU opens only the first, but of neither is the content what a guest is to see.
    (0, b"LUKS\xba\xbe", Format::Encrypted("luks")),
    (0, b"\x1f\x8b\x08", Format::Packed("gzip")),
    (0, b"\xfd7zXZ\0", Format::Packed("xz")),
    (0, b"\x28\xb5\x2f\xfd", Format::Packed("zstd")),
    (0, b"\x04\x22\x4d\x18", Format::Packed("lz4")),
    (0, b"PK\x03\x04", Format::Archive("a zip archive")),
    (0, b"7z\xbc\xaf\x27\x1c", Format::Archive("a 7z archive")),
    (0, b"VMA\0", Format::Archive("a VMA backup (Proxmox)")),
    (0, b"MSWIM\0\0\0", Format::Archive("a WIM archive (Windows)")),
    (0, b"LibvirtQemudSave", Format::Archive("a VM saved by libvirt")),
    (0, b"LibvirtQemudPart", Format::Archive("a VM that libvirt has saved in part")),
    (0, b"QEVM", Format::Archive("a migration stream of QEMU")),
];

fn recognise(head: &[u8], tail: &[u8]) -> Option<Format> {
    let is_at = |at: usize, mark: &[u8]| head.get(at..at + mark.len()) == Some(mark);
    if let Some((.., format)) = MARKS.iter().find(|(at, mark, _)| is_at(*at, mark)) {
        return Some(*format);
    }
    if is_at(0, b"QFI\xfb") {
        return Some(Format::Image(if is_at(4, &1u32.to_be_bytes()) { "qcow" } else { "qcow2" }));
    }
    if is_at(0, b"BZh") && is_at(4, b"1AY&SY") {
        return Some(Format::Packed("bzip2"));
    }
    if is_vmdk_descriptor(head) {
        return Some(Format::Image("vmdk"));
    }
    // An OVA is a tar of which the first member describes the VM. Another tar may be what a guest has on its disk: people carry
    // files from one machine to another that way.
    if is_at(257, b"ustar") {
        let name = head.get(..100)?;
        let name = name.split(|byte| *byte == 0).next()?;
        return name.to_ascii_lowercase().ends_with(b".ovf").then_some(Format::Archive("an OVA archive"));
    }
    // The footer is the last 512 bytes; VHDs from old programs lack the very last one.
    let footer = |mark: &[u8], late: usize| {
        let from = tail.len().checked_sub(FOOTER_BYTES - late)?;
        tail.get(from..from + mark.len()).filter(|found| *found == mark)
    };
    if footer(b"conectix", 0).or_else(|| footer(b"conectix", 1)).is_some() {
        return Some(Format::Image("vpc"));
    }
    // Signature, version 4, 512 bytes.
    if footer(b"koly\0\0\0\x04\0\0\x02\0", 0).is_some() {
        return Some(Format::Image("dmg"));
    }
    None
}

/// The text that describes a VMDK of several files: comments and empty lines, then `version=1` to `3`, as QEMU has it.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    for line in head.split(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match line {
            [b'#', ..] => {}
            _ if line.iter().all(|byte| *byte == b' ') => {}
            _ => return matches!(line, b"version=1" | b"version=2" | b"version=3"),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::Command;

    const MIB: usize = 1 << 20;

    fn probe_bytes(bytes: &[u8]) -> Option<Format> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        std::fs::write(&path, bytes).expect("written");
        probe(&File::open(path).expect("opens")).expect("can be read")
    }

    fn probe_path(path: &Path) -> Option<Format> {
        probe(&File::open(path).expect("opens")).expect("can be read")
    }

    fn disk_with(marks: &[(usize, &[u8])]) -> Vec<u8> {
        let mut disk = vec![0; MIB];
        for (at, mark) in marks {
            disk[*at..*at + mark.len()].copy_from_slice(mark);
        }
        disk
    }

    /// Formats that QEMU can read and write by their driver's name, of `qemu-img create -f`. What it cannot make is below, by hand.
    #[test]
    fn whatever_qemu_img_can_make_is_known() {
        let directory = tempfile::tempdir().expect("a directory");
        let help = Command::new("qemu-img").arg("--help").output().expect("qemu-img is installed").stdout;
        let help = String::from_utf8(help).expect("text");
        let formats = help.split_once("Supported formats:").expect("it lists them").1;
        let formats: Vec<&str> = formats.lines().next().expect("a line").split_whitespace().collect();
        let mut made = Vec::new();
        for format in formats {
            let variants: &[&str] = match format {
                "vmdk" => &[
                    "subformat=monolithicSparse",
                    "subformat=monolithicFlat",
                    "subformat=twoGbMaxExtentSparse",
                    "subformat=twoGbMaxExtentFlat",
                    "subformat=streamOptimized",
                ],
                "vpc" => &["subformat=dynamic", "subformat=fixed", "subformat=fixed,force_size=on"],
                "vhdx" => &["subformat=dynamic", "subformat=fixed"],
                "vdi" => &["static=off", "static=on"],
                "qcow2" => &["compat=0.10", "compat=1.1", "extended_l2=on"],
                _ => &[""],
            };
            for (number, options) in variants.iter().enumerate() {
                let path = directory.path().join(format!("{format}-{number}"));
                let mut command = Command::new("qemu-img");
                command.args(["create", "-q", "-f", format]);
                if format == "luks" {
                    command.args(["--object", "secret,id=s,data=secret", "-o", "key-secret=s,iter-time=10"]);
                } else if !options.is_empty() {
                    command.args(["-o", options]);
                }
                command.arg(&path).arg("4M");
                let mut output = command.output().expect("qemu-img starts");
                // On a busy machine it cannot always find out how long a key takes.
                for _ in 0..20 {
                    if format != "luks" || output.status.success() {
                        break;
                    }
                    output = command.output().expect("qemu-img starts");
                }
                if !output.status.success() || !path.is_file() {
                    continue;
                }
                let found = probe_path(&path);
                match format {
                    "raw" | "file" => assert_eq!(found, None, "{format} {options}"),
                    "luks" => assert_eq!(found, Some(Format::Encrypted("luks")), "{options}"),
                    _ => assert!(
                        matches!(found, Some(Format::Image(name)) if name == format),
                        "{format} {options}: {found:?}"
                    ),
                }
                made.push(format.to_owned());
            }
        }
        for format in ["qcow", "qcow2", "vmdk", "vdi", "vhdx", "vpc", "qed", "parallels", "luks", "raw"] {
            assert!(made.iter().any(|name| name == format), "qemu-img made no {format}: {made:?}");
        }
    }

    /// QEMU's own probing is asked, too: whatever it does not call raw is refused.
    #[test]
    fn what_qemu_does_not_call_raw_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        for (marks, name) in by_hand() {
            let image = disk_with(&marks);
            std::fs::write(&path, &image).expect("written");
            let found = probe_path(&path);
            assert_eq!(found, Some(name), "{marks:?}");
            let told = Command::new("qemu-img").args(["info", "--output=json"]).arg(&path).output().expect("it starts");
            let told = String::from_utf8(told.stdout).expect("text");
            if !told.is_empty() && !told.contains("\"format\": \"raw\"") {
                assert!(found.is_some(), "{told}");
            }
        }
    }

    type Marks = Vec<(usize, &'static [u8])>;

    fn by_hand() -> Vec<(Marks, Format)> {
        vec![
            (vec![(0, b"QFI\xfb\0\0\0\x01")], Format::Image("qcow")),
            (vec![(0, b"QFI\xfb\0\0\0\x02")], Format::Image("qcow2")),
            (vec![(0, b"QFI\xfb\0\0\0\x03")], Format::Image("qcow2")),
            (vec![(0, b"KDMV\x01\0\0\0")], Format::Image("vmdk")),
            (vec![(0, b"COWD\x01\0\0\0")], Format::Image("vmdk")),
            (vec![(0, b"# Disk DescriptorFile\nversion=1\nCID=1\n")], Format::Image("vmdk")),
            (vec![(0, b"#\r\n\r\n  \r\nversion=3\r\n")], Format::Image("vmdk")),
            (vec![(0, b"<<< Oracle VM VirtualBox Disk Image >>>\n"), (64, b"\x7f\x10\xda\xbe")], Format::Image("vdi")),
            (vec![(0, b"vhdxfile")], Format::Image("vhdx")),
            (vec![(0, b"conectix")], Format::Image("vpc")),
            (vec![(MIB - 512, b"conectix")], Format::Image("vpc")),
            (vec![(MIB - 511, b"conectix")], Format::Image("vpc")),
            (vec![(0, b"QED\0")], Format::Image("qed")),
            (vec![(0, b"WithoutFreeSpace\x02\0\0\0")], Format::Image("parallels")),
            (vec![(0, b"WithouFreSpacExt\x02\0\0\0")], Format::Image("parallels")),
            (
                vec![(0, b"Bochs Virtual HD Image"), (32, b"Redolog"), (48, b"Growing"), (64, b"\0\0\x02\0")],
                Format::Image("bochs"),
            ),
            (
                vec![(0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n")],
                Format::Image("cloop"),
            ),
            (vec![(MIB - 512, b"koly\0\0\0\x04\0\0\x02\0")], Format::Image("dmg")),
            (vec![(0, b"LUKS\xba\xbe\0\x01")], Format::Encrypted("luks")),
            (vec![(0, b"LUKS\xba\xbe\0\x02")], Format::Encrypted("luks")),
            (vec![(0, b"\x1f\x8b\x08\0")], Format::Packed("gzip")),
            (vec![(0, b"BZh91AY&SY")], Format::Packed("bzip2")),
            (vec![(0, b"disk.OVF\0"), (257, b"ustar")], Format::Archive("an OVA archive")),
        ]
    }

    /// What a guest makes of its disk with usual programs, and what looks a little like a mark.
    #[test]
    fn disks_are_disks() {
        for marks in [
            vec![],
            // A boot sector, a GPT, ext4's and btrfs's magic, XFS, NTFS, FAT, swap, LVM, a RAID, ZFS, ISO 9660, squashfs, F2FS, LUKS's
            // second header, bcache.
            vec![(0, &b"\xeb\x63\x90"[..]), (510, b"\x55\xaa")],
            vec![(510, b"\x55\xaa"), (512, b"EFI PART")],
            vec![(1024 + 56, b"\x53\xef")],
            vec![(65536 + 64, b"_BHRfS_M")],
            vec![(0, b"XFSB")],
            vec![(0, b"\xeb\x52\x90NTFS    "), (510, b"\x55\xaa")],
            vec![(0, b"\xeb\x3c\x90mkfs.fat"), (510, b"\x55\xaa")],
            vec![(4086, b"SWAPSPACE2")],
            vec![(512, b"LABELONE"), (536, b"LVM2 001")],
            vec![(4096, b"\xfc\x4e\x2b\xa9")],
            vec![(32769, b"CD001")],
            vec![(0, b"hsqs")],
            vec![(1024, b"\x10\x20\xf5\xf2")],
            vec![(16384, b"SKUL\xba\xbe\0\x02")],
            vec![(0, b"hello.txt\0"), (257, b"ustar")],
            vec![(0, b"#!/bin/sh\necho a script for the guest\n")],
            vec![(0, b"# a comment\nversion=4\n")],
            vec![(0, b"BZh9 is how bzip2 begins")],
            vec![(512, b"conectix")],
            vec![(MIB - 512, b"koly no trailer")],
        ] {
            assert_eq!(probe_bytes(&disk_with(&marks)), None, "{marks:?}");
        }
        for bytes in [&b""[..], b"Q", b"QFI", b"conecti", b"#", b"ver", &[0xff; 511]] {
            assert_eq!(probe_bytes(bytes), None, "{bytes:?}");
        }
    }

    /// File systems, swap and partitions by the programs that are installed here.
    #[test]
    fn what_the_usual_programs_make_is_raw() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut made = 0;
        for words in [
            &["mke2fs", "-q", "-F", "-t", "ext2"][..],
            &["mke2fs", "-q", "-F", "-t", "ext3"],
            &["mke2fs", "-q", "-F", "-t", "ext4"],
            &["mke2fs", "-q", "-F", "-O", "journal_dev"],
            &["mkswap"],
            &["mkfs.xfs", "-q", "-f"],
            &["mkfs.btrfs", "-q", "-f"],
            &["mkfs.vfat"],
            &["mkfs.ntfs", "-q", "-F", "-f"],
            &["mkfs.f2fs", "-q", "-f"],
            &["mkfs.exfat"],
            &["sfdisk", "-q", "--label", "gpt"],
            &["sfdisk", "-q", "--label", "dos"],
        ] {
            let path = directory.path().join("disk");
            let file = File::create(&path).expect("made");
            file.set_len(320 << 20).expect("sparse");
            let partitions = directory.path().join("partitions");
            std::fs::write(&partitions, ",,L\n").expect("written");
            let input = File::open(&partitions).expect("opens");
            let path_variable = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
            let run = Command::new("env")
                .arg(format!("PATH={path_variable}"))
                .args(words)
                .arg(&path)
                .stdin(input)
                .output()
                .expect("env starts");
            if run.status.success() {
                made += 1;
                assert_eq!(probe_path(&path), None, "{words:?}");
            }
        }
        assert!(made >= 4, "only {made} of these programs are installed");
    }

    #[test]
    fn the_sentence_says_what_to_do() {
        let sentence = OtherFormat { path: "/srv/a.qcow2".into(), format: Format::Image("qcow2") }.to_string();
        for part in
            ["/srv/a.qcow2 is a qcow2 image", "qemu-img convert -f qcow2 -O raw", "format=raw", "Nothing was changed"]
        {
            assert!(sentence.contains(part), "{sentence}");
        }
    }
}
