//! A region that was damaged is refused with a sentence or read for what it still is; it never panics, and never gives
//! away a version that was not committed.

use nvm_journal::medium::{Durability, Medium, SimulatedMedium};
use nvm_journal::{ATTACHMENT_BYTES, Found, Journal, JournalOptions, Owner};
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCK_BYTES: usize = 512;

fn owner() -> Owner {
    Owner {
        file_system: [1; 16],
        journal: [2; 16],
        home_start: 4096,
        home_blocks: 1000,
        mark_checksum: 5,
        is_left: false,
        attachment: [9; ATTACHMENT_BYTES],
    }
}

fn journal(medium: SimulatedMedium) -> Journal<SimulatedMedium> {
    Journal::claim(medium, 0, BLOCK_BYTES as u32, &owner(), 7, JournalOptions::default()).expect("a free region")
}

/// A region with first, second and updated versions, holes, and a crash in the middle of a commit.
fn region() -> (Vec<u8>, BTreeMap<u64, Vec<u8>>) {
    let mut journal = journal(SimulatedMedium::new(60_000));
    let mut model = BTreeMap::new();
    for round in 0..6u64 {
        for home in (0..12).filter(|home| (home + round) % 3 != 0) {
            let mut content = vec![home as u8; BLOCK_BYTES];
            content[(round * 8) as usize] = 100 + round as u8;
            journal.put(home, &content).expect("room");
            model.insert(home, content);
        }
        journal.publish().expect("the medium works");
    }
    journal.release([3, 4]).expect("the medium works");
    model.retain(|home, _| ![3, 4].contains(home));
    journal.put(3, &[77; BLOCK_BYTES]).expect("room");
    (journal.into_medium().crash_images().image(&mut |count| count - 1), model)
}

fn contents(region: &[u8], found: &Found) -> BTreeMap<u64, Vec<u8>> {
    found.latest.iter().map(|(home, header)| (*home, found.content(region, header).to_vec())).collect()
}

#[test]
fn every_single_flipped_bit_is_refused_or_harmless() {
    let (region, model) = region();
    let whole = Found::read(&region).expect("whole").expect("a region");
    whole.verify(&region).expect("whole");
    assert_eq!(contents(&region, &whole), model);
    assert_eq!((whole.owner, whole.sequence), (Some(owner()), 13));
    let mut refused = 0;
    let mut damaged = region.clone();
    for byte in 0..region.len() {
        for bit in [byte % 8, (byte + 3) % 8] {
            damaged[byte] ^= 1 << bit;
            match Found::read(&damaged).and_then(|found| {
                if let Some(found) = &found {
                    found.verify(&damaged)?;
                }
                Ok(found)
            }) {
                Err(error) => {
                    assert!(error.is_refusal() && error.to_string().contains("NVM region"), "{error}");
                    refused += 1;
                }
                // The first word is what makes it a region.
                Ok(None) => assert!(byte < 8),
                Ok(Some(found)) => assert_eq!(contents(&damaged, &found), model, "byte {byte}, bit {bit}"),
            }
            damaged[byte] ^= 1 << bit;
        }
    }
    assert!(refused > 1000, "only {refused}");
}

/// A region that an amberlog has claimed which does not know of prepared transactions, around whatever lay there.
#[test]
fn what_nobody_has_prepared_is_no_damage() {
    let (mut region, model) = region();
    region[0x58..0x68].copy_from_slice(&[0x5a; 16]);
    let found = Found::read(&region).expect("whole").expect("a region");
    assert!(found.prepared.is_none() && contents(&region, &found) == model);
    // Half of it is there: that was written by who knows of it.
    region[0x60..0x68].copy_from_slice(&(u64::from(!7u32) << 32 | 7).to_le_bytes());
    assert!(Found::read(&region).is_err_and(|error| error.is_refusal()));
}

/// Whoever claims it next may not know of prepared transactions.
#[test]
fn a_region_that_is_given_back_has_nothing_prepared() {
    let mut journal = journal(SimulatedMedium::new(60_000));
    journal.put(3, &[7; BLOCK_BYTES]).expect("room");
    journal.prepare(b"its appends").expect("room");
    journal.publish().expect("the medium works");
    let medium = journal.give_back().expect("given back").expect("the medium works");
    let durable = medium.crash_images().image(&mut |_| 0);
    assert_eq!(durable[0x58..0x60], [0; 8]);
}

/// A medium that fails at a fence.
struct Failing {
    medium: SimulatedMedium,
    /// How many fences go well before.
    fences: u32,
}

impl Medium for Failing {
    fn bytes(&self) -> &[u8] {
        self.medium.bytes()
    }

    fn store_word(&mut self, offset: u64, value: u64) {
        self.medium.store_word(offset, value);
    }

    fn write_back(&mut self, offset: u64, len: u64) {
        self.medium.write_back(offset, len);
    }

    fn stream(&mut self, offset: u64, bytes: &[u8]) {
        self.medium.stream(offset, bytes);
    }

    fn fence(&mut self) -> std::io::Result<()> {
        self.medium.fail_fences(self.fences == 0);
        self.fences = self.fences.saturating_sub(1);
        self.medium.fence()
    }

    fn durability(&self) -> Durability {
        self.medium.durability()
    }
}

/// What is cleared in a region that is nobody's any more is nobody's loss: only that it is not to be used again is said.
#[test]
fn a_region_is_given_back_once_nobody_has_it() {
    let owned = || {
        let medium = Failing { medium: SimulatedMedium::new(60_000), fences: u32::MAX };
        Journal::claim(medium, 0, BLOCK_BYTES as u32, &owner(), 7, JournalOptions::default()).expect("a free region")
    };
    for fences in 0..3 {
        let mut medium = owned().into_medium();
        medium.fences = fences;
        let forgotten = nvm_journal::forget(&mut medium);
        let durable = medium.medium.crash_images().image(&mut |_| 0);
        let is_nobodys = Found::read(&durable).expect("whole").expect("a region").owner.is_none();
        assert_eq!((forgotten.is_ok(), is_nobodys), (fences > 0, fences > 0), "{fences} fences");
        let mut journal = owned();
        journal.medium_mut().fences = fences;
        let given_back = journal.give_back();
        let medium = given_back.map(|medium| medium.is_some()).map_err(|error| error.to_string());
        match fences {
            0 => assert!(medium.is_err_and(|error| error.contains("giving the NVM region back")), "it has an owner"),
            1 => assert_eq!(medium, Ok(false), "it has failed"),
            _ => assert_eq!(medium, Ok(true)),
        }
    }
}

/// A medium that loses a line reads as zeros there: that is refused, or touches nothing that counts.
#[test]
fn every_line_that_reads_as_zeros_is_refused_or_harmless() {
    let (region, model) = region();
    let mut refused = 0;
    for line_bytes in [8, 64, 4096] {
        for start in (0..region.len()).step_by(line_bytes) {
            let mut damaged = region.clone();
            let end = damaged.len().min(start + line_bytes);
            damaged[start..end].fill(0);
            match Found::read(&damaged).and_then(|found| {
                if let Some(found) = &found {
                    found.verify(&damaged)?;
                }
                Ok(found)
            }) {
                Err(error) => {
                    assert!(error.is_refusal(), "{error}");
                    refused += 1;
                }
                // The first word is what makes it a region.
                Ok(None) => assert_eq!(start, 0),
                Ok(Some(found)) => {
                    assert_eq!(contents(&damaged, &found), model, "{line_bytes} bytes from byte {start}");
                }
            }
        }
    }
    assert!(refused > 500, "only {refused}");
}

#[test]
fn what_is_owned_damaged_foreign_or_small_is_not_claimed_and_not_changed() {
    let (owned, _) = region();
    let mut damaged = owned.clone();
    damaged[0x12] ^= 1;
    let mut foreign = vec![0; 60_000];
    foreign[100] = 1;
    for (image, words) in [
        (owned, "holds committed blocks"),
        (damaged, "damaged"),
        (foreign, "not amberlog's"),
        (vec![0; 20_000], "too small"),
    ] {
        let mut medium = SimulatedMedium::from_image(image.clone());
        let seen = image.clone();
        medium.observe(Some(Box::new(move |images| assert_eq!(images.current, &seen[..], "it was changed"))));
        let claimed = Journal::claim(medium, 0, BLOCK_BYTES as u32, &owner(), 0, JournalOptions::default());
        let error = claimed.expect_err("refused");
        assert!(error.is_refusal() && error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_medium_that_fails_fails_for_good_and_keeps_what_was_committed() {
    let mut journal = journal(SimulatedMedium::new(60_000));
    journal.put(1, &[1; BLOCK_BYTES]).expect("room");
    journal.publish().expect("the medium works");
    journal.put(1, &[2; BLOCK_BYTES]).expect("room");
    journal.medium_mut().fail_fences(true);
    assert!(journal.publish().is_err());
    journal.medium_mut().fail_fences(false);
    for error in [
        journal.put(2, &[3; BLOCK_BYTES]),
        journal.revoke(1),
        journal.publish(),
        journal.release([1]),
        journal.collect().map(|_| ()),
        journal.set_sequence(9),
    ] {
        assert!(error.is_err_and(|error| !error.is_refusal()));
    }
    let medium = journal.into_medium();
    let image = medium.crash_images().image(&mut |_| 0);
    let found = Found::read(&image).expect("whole").expect("a region");
    assert_eq!(contents(&image, &found), BTreeMap::from([(1, vec![1; BLOCK_BYTES])]));
    assert!(!medium.is_empty());
}

#[test]
fn a_full_region_says_so_and_goes_on_after_a_release() {
    let mut journal = journal(SimulatedMedium::new(4 * 4096 + 16 * 532));
    let blocks = u64::from(journal.geometry().blocks);
    for home in 0..blocks {
        journal.put(home, &[1; BLOCK_BYTES]).expect("room");
    }
    assert!(journal.put(99, &[2; BLOCK_BYTES]).is_err_and(|error| !error.is_refusal()));
    journal.publish().expect("the medium works");
    assert_eq!(journal.room(), 0);
    journal.release(0..blocks / 2).expect("the medium works");
    assert_eq!(journal.collect().expect("the medium works"), (blocks / 2) as u32);
    journal.put(99, &[2; BLOCK_BYTES]).expect("room");
    journal.publish().expect("the medium works");
    assert_eq!(journal.latest(99), Some(&[2; BLOCK_BYTES][..]));
    assert_eq!(journal.check(), Ok(()));
}

proptest! {
    #[test]
    fn no_region_makes_anything_panic(writes in prop::collection::vec((0usize..60_000, any::<u64>()), 1..40)) {
        let (mut region, _) = region();
        for (at, value) in writes {
            let at = at.min(region.len() - 8);
            region[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        if let Ok(Some(found)) = Found::read(&region) {
            let _ = found.verify(&region);
            prop_assert!(found.latest.len() <= found.geometry.blocks as usize);
        }
    }
}
