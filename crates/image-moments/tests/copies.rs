//! Copies of an image that others write to meanwhile, against what the image was; overlays are judged by `qemu-img`.

use image_moments::{BLOCK_BYTES, Base, Changes, Moment, Overlay, Record, Target};
use seeded_random::Random;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An image and what it should hold.
struct Image {
    file: File,
    content: Vec<u8>,
    random: Random,
}

impl Image {
    fn new(path: &Path, size: u64) -> Self {
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(size).unwrap();
        Image { file, content: vec![0; size as usize], random: Random::new(1) }
    }

    /// Writes something somewhere, or zeros.
    fn write(&mut self, changes: &Changes) {
        let at = self.random.below(self.content.len() as u64) as usize;
        let len = (1 + self.random.below(200_000) as usize).min(self.content.len() - at);
        let byte = self.random.below(5) as u8;
        self.content[at..at + len].fill(byte);
        changes.begins(at as u64, len as u64);
        self.file.write_all_at(&self.content[at..at + len], at as u64).unwrap();
        changes.ended(at as u64, len as u64);
    }
}

fn qemu_img(arguments: &[&str]) -> String {
    let output = Command::new("qemu-img").args(arguments).output().expect("qemu-img is installed");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "qemu-img {arguments:?}: {said}");
    said
}

/// A whole copy, then one of what changed, and one of what changed since that, each while the image is written on.
#[test]
fn each_copy_is_the_image_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    // The last block is not whole, and the image has more than one table's blocks only in a later test.
    let size = 300 * BLOCK_BYTES + 4096;
    let mut image = Image::new(&path("image"), size);
    let changes = Arc::new(Changes::new(Record::new().unwrap()));
    (0..100).for_each(|_| image.write(&changes));
    let mut base: Option<(Base, u16)> = None;
    for round in 0..4 {
        let expected = image.content.clone();
        let out = path(&format!("copy-{round}"));
        let file = File::options().read(true).write(true).create_new(true).open(&out).unwrap();
        let epoch = changes.record().next_epoch().unwrap();
        let (wanted, target) = match &base {
            None => {
                file.set_len(size).unwrap();
                (None, Target::Whole(file))
            }
            Some((base, since)) => {
                let wanted = changes.record().since(*since, size).unwrap();
                assert!(!wanted.is_empty() && wanted.len() < 250, "{} blocks", wanted.len());
                (Some(wanted), Target::Overlay(Overlay::new(file, size, base.clone()).unwrap()))
            }
        };
        let source = File::open(path("image")).unwrap();
        let moment = Arc::new(Moment::new(source, size, wanted, target));
        let copied = AtomicBool::new(false);
        changes
            .keep_while(&moment, || {
                // One is written before anything is copied: what it overwrites is kept by it.
                image.write(&changes);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        moment.copy().unwrap();
                        copied.store(true, Ordering::Relaxed);
                    });
                    for _ in 0..20 {
                        image.write(&changes);
                    }
                });
                assert!(changes.is_copied());
                let other = Arc::clone(&moment);
                assert!(changes.keep_while(&other, || ()).is_none(), "one at a time");
            })
            .expect("nobody else copies");
        assert!(copied.load(Ordering::Relaxed) && !changes.is_copied());
        let is_overlay = match Arc::into_inner(moment).unwrap().into_target() {
            Target::Whole(file) => {
                file.sync_all().unwrap();
                false
            }
            Target::Overlay(overlay) => {
                overlay.finish().unwrap();
                qemu_img(&["check", &out.to_string_lossy()]);
                true
            }
        };
        let raw = path(&format!("raw-{round}"));
        let format = if is_overlay { "qcow2" } else { "raw" };
        qemu_img(&["convert", "-f", format, "-O", "raw", &out.to_string_lossy(), &raw.to_string_lossy()]);
        assert!(std::fs::read(&raw).unwrap() == expected, "round {round}: the copy is not the image as it was");
        base = Some((Base { path: out, is_overlay }, epoch));
        (0..3).for_each(|_| image.write(&changes));
    }
}

/// What lies over the end of a block is changed whole, though one half of it was written and the other is its base's, or zeros.
#[test]
fn what_is_in_two_blocks_is_changed_in_both() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let base = path("base");
    let at = BLOCK_BYTES - 512;
    // Three such places; the third has zeros behind the block's end.
    let places = [at, at + 2 * BLOCK_BYTES, at + 4 * BLOCK_BYTES];
    let size = 8 * BLOCK_BYTES;
    let mut before = vec![7; 5 * BLOCK_BYTES as usize];
    before.resize(size as usize, 0);
    std::fs::write(&base, &before).unwrap();
    std::fs::write(path("image"), &before).unwrap();
    let source = File::options().read(true).write(true).open(path("image")).unwrap();
    let changes = Changes::new(Record::new().unwrap());
    for (place, of) in places.into_iter().zip([0, 512, 0]) {
        changes.begins(place + of, 512);
        source.write_all_at(&[9; 512], place + of).unwrap();
        changes.ended(place + of, 512);
    }
    let mut wanted = changes.record().since(1, size).unwrap();
    let written = wanted.len();
    let file = |name: &str| File::options().read(true).write(true).create_new(true).open(path(name)).unwrap();
    let overlay = |name: &str, wanted| {
        let overlay = Overlay::new(file(name), size, Base { path: base.clone(), is_overlay: false }).unwrap();
        let source = source.try_clone().unwrap();
        let moment = Moment::new(source, size, Some(wanted), Target::Overlay(overlay));
        moment.copy().unwrap();
        let Target::Overlay(overlay) = moment.into_target() else { panic!("it was an overlay") };
        overlay
    };
    let mut bytes = [0; 1024];
    let mut halved = overlay("halved", wanted.clone());
    assert!(halved.edit(places[0], &mut bytes, |_| Ok(())).is_err(), "half of it is its base's");
    for place in places {
        wanted.keep_together(place, 1024);
    }
    wanted.keep_together(7 * BLOCK_BYTES - 512, 1024);
    assert_eq!(wanted.len(), written + 3, "and nothing of which no part was written");
    let mut whole = overlay("whole", wanted);
    for (place, expected) in places.into_iter().zip([[9, 7], [7, 9], [9, 0]]) {
        let edited = whole.edit(place, &mut bytes, |bytes| {
            assert_eq!([bytes[0], bytes[1023]], expected);
            bytes.fill(8);
            Ok(())
        });
        assert_eq!(edited.unwrap(), Some(()));
    }
    whole.finish().unwrap();
    let out = path("whole").to_string_lossy().into_owned();
    qemu_img(&["check", &out]);
    for place in places {
        qemu_io(&out, &format!("read -P 8 {place} 1024"));
        qemu_io(&out, &format!("read -P 7 {} 512", place - 512));
    }
}

/// A large image: more tables than one, and a base that is shorter.
#[test]
fn an_overlay_reaches_far() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let base = path("base");
    File::create(&base).unwrap().write_all(&[7; 8192]).unwrap();
    let size = 1 << 40;
    let source = File::options().read(true).write(true).create_new(true).open(path("image")).unwrap();
    source.set_len(size).unwrap();
    let changes = Changes::new(Record::new().unwrap());
    let places = [0, 5_000_000_000, (1 << 40) - 512];
    for at in places {
        changes.begins(at, 512);
        source.write_all_at(&[9; 512], at).unwrap();
        changes.ended(at, 512);
    }
    let wanted = changes.record().since(1, size).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(path("out")).unwrap();
    let overlay = Overlay::new(file, size, Base { path: base, is_overlay: false }).unwrap();
    let moment = Moment::new(source, size, Some(wanted), Target::Overlay(overlay));
    moment.copy().unwrap();
    let Target::Overlay(mut overlay) = moment.into_target() else { panic!("it was an overlay") };
    assert_eq!(overlay.len(), 3);
    let mut bytes = [0; 512];
    let edited = overlay.edit(5_000_000_000, &mut bytes, |bytes| {
        assert_eq!(bytes, [9; 512]);
        bytes.fill(8);
        Ok(())
    });
    assert_eq!(edited.unwrap(), Some(()));
    assert_eq!(overlay.edit(1 << 30, &mut bytes, |_| Ok(())).unwrap(), None, "what it has not is the base's");
    overlay.finish().unwrap();
    let out = path("out").to_string_lossy().into_owned();
    qemu_img(&["check", &out]);
    let read = |at: u64| qemu_io(&out, &format!("read -P {} {at} 512", if at == 5_000_000_000 { 8 } else { 9 }));
    places.into_iter().for_each(read);
    qemu_io(&out, "read -P 0 65536 512");
}

fn qemu_io(image: &str, command: &str) {
    let output = Command::new("qemu-io").args(["-r", "-f", "qcow2", "-c", command, image]).output().expect("qemu-io");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("failed"), "{command}: {said}");
}

/// A copy that cannot be made fails, and those who write are not held up.
#[test]
fn a_copy_that_fails_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let size = 8 * BLOCK_BYTES;
    let mut image = Image::new(&path("image"), size);
    let changes = Changes::new(Record::new().unwrap());
    image.file.write_all_at(&[1], 0).unwrap();
    File::create(path("out")).unwrap();
    let read_only = File::open(path("out")).unwrap();
    let moment = Arc::new(Moment::new(File::open(path("image")).unwrap(), size, None, Target::Whole(read_only)));
    let copied = changes.keep_while(&moment, || {
        changes.begins(0, 1);
        image.file.write_all_at(&[2], 0).unwrap();
        changes.ended(0, 1);
        image.write(&changes);
        moment.copy()
    });
    copied.unwrap().unwrap_err();
}

/// Whoever wants no copy any more ends it.
#[test]
fn a_copy_that_is_not_wanted_ends() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let size = 8 * BLOCK_BYTES;
    let mut image = Image::new(&path("image"), size);
    let changes = Changes::new(Record::new().unwrap());
    (0..10).for_each(|_| image.write(&changes));
    let out = File::options().read(true).write(true).create_new(true).open(path("out")).unwrap();
    let moment = Arc::new(Moment::new(File::open(path("image")).unwrap(), size, None, Target::Whole(out)));
    moment.stop();
    let copied = changes.keep_while(&moment, || moment.copy()).unwrap();
    assert!(copied.unwrap_err().to_string().contains("has ended"));
    // What was written is forgotten with the record, and noted anew.
    assert!(!changes.record().since(1, size).unwrap().is_empty());
    changes.begin_anew(Record::new().unwrap());
    assert!(changes.record().since(1, size).unwrap().is_empty());
    image.write(&changes);
    assert!(!changes.record().since(1, size).unwrap().is_empty());
}
