//! What an earlier amberlog left in a region is brought home by this one: images and regions as commit c6360c63 of this repository (version
//! 0.2.0 in the making, with a route of its own for NVM) left them, killed between two transactions. In `fixtures/nvm`, compressed by zstd:
//! the image, the region, and the blocks that a complete journal would leave (number, length, content, numbers as 64-bit little-endian
//! words).

use nvm_journal::medium::{OpenOptions, RegionChoice};
use placement::recover_image;
use recovery::{Access, Disk, Status};
use std::path::Path;

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nvm").join(format!("{name}.zst"));
    zstd::decode_all(&std::fs::read(path).expect("a fixture")[..]).expect("compressed by zstd")
}

fn expected(bytes: &[u8]) -> Vec<(u64, &[u8])> {
    let mut blocks = Vec::new();
    let mut rest = bytes;
    while let Some((home, after)) = rest.split_first_chunk() {
        let (len, after) = after.split_first_chunk().expect("a length");
        let (content, after) = after.split_at(u64::from_le_bytes(*len) as usize);
        blocks.push((u64::from_le_bytes(*home), content));
        rest = after;
    }
    blocks
}

fn recovered(name: &str) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let (image, region) = (directory.path().join("image"), directory.path().join("region"));
    let before = fixture(&format!("{name}.image"));
    std::fs::write(&image, &before).expect("written");
    std::fs::write(&region, fixture(&format!("{name}.region"))).expect("written");
    let options =
        OpenOptions { path: region, region: RegionChoice::default(), create_bytes: None, delay: None, stores: None };
    let disk = Disk::open(&image, Access::Write).expect("an image");
    let finished = recover_image(&disk, options.clone(), Access::Write).expect("they belong together");
    let finished = finished.expect("something is owed");
    assert_eq!(finished.recovery.status, Status::Recovered);
    assert!(finished.recovery.blocks_written > 0);
    let after = std::fs::read(&image).expect("read");
    let blocks = fixture(&format!("{name}.expected"));
    let mut brought = 0;
    for (home, content) in expected(&blocks) {
        let at = home as usize * content.len();
        assert!(after[at..at + content.len()] == *content, "block {home} of {name}");
        brought += usize::from(before[at..at + content.len()] != *content);
    }
    assert!(brought > 0, "nothing of {name} was in the region only");
    let again = recover_image(&disk, options, Access::Write).expect("nothing is wrong");
    assert!(again.is_none(), "the region is nobody's any more: {again:?}");
}

#[test]
fn a_region_of_an_earlier_amberlog_is_brought_home() {
    recovered("blocks-4096");
}

/// The mark is not counted on there.
#[test]
fn a_region_of_an_earlier_amberlog_with_small_blocks_is_brought_home() {
    recovered("blocks-1024");
}
