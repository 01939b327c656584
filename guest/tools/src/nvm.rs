//! Transactions on persistent memory of the guest's own: a DAX file or a devdax device, as QEMU gives one to a guest. The host
//! kills QEMU in their midst, boots another guest on the same memory, and has what is there compared with what was
//! acknowledged.

use crate::Result;
use crate::options::Options;
use crate::random::Random;
use nvm_journal::medium::{MappedMedium, Medium, MediumFile, OpenOptions};
use nvm_journal::{ATTACHMENT_BYTES, Found, Journal, JournalOptions, Owner};
use std::io::Write;

const BLOCK_BYTES: usize = 4096;
/// Home blocks that are written over and over.
const HOMES: u64 = 200;
/// Blocks of a transaction.
const BLOCKS_EACH: u64 = 5;

/// `guest-tools nvm --region PATH --name NAME --mark FILE [--create MIB] [--transactions N]` writes, and tells FILE what the
/// memory is (`mark NAME is persistent, stores by clwb`) and each transaction that is durable (`mark NAME 17`). With `--verify`
/// it reads instead, and tells the last one that is there whole (`mark NAME holds 17`).
pub fn run(mut options: Options) -> Result<()> {
    let region = options.required("region")?;
    let name = options.required("name")?;
    let told = options.required("mark")?;
    let create_mib = options.number("create", 0, 0..=1 << 20)?;
    let transactions = options.number("transactions", 1 << 30, 1..=1 << 30)?;
    let verify = options.flag("verify");
    options.finish()?;
    let mut told = std::fs::OpenOptions::new().write(true).open(&told).map_err(crate::at("open", &told))?;
    let mut tell = |text: String| {
        told.write_all(format!("mark {name} {text}\n").as_bytes()).map_err(|error| format!("telling the host: {error}"))
    };
    let create_bytes = (create_mib > 0).then_some(create_mib << 20);
    let options = OpenOptions { create_bytes, ..OpenOptions::new(&region) };
    let medium = MediumFile::open(options).and_then(MediumFile::map).map_err(|error| error.to_string())?;
    if verify {
        return verified(&medium).and_then(|last| tell(format!("holds {last}")));
    }
    tell(format!("is {}, stores by {}", medium.durability().name(), medium.store_kind().name()))?;
    write(medium, transactions, &mut |sequence| tell(sequence.to_string()))
}

/// What a transaction writes: home blocks, each once, and their contents, which share most with the versions before.
fn transaction(sequence: u32) -> Vec<(u64, Vec<u8>)> {
    let mut random = Random::of(u64::from(sequence), 0x6e76);
    let first = random.below(HOMES);
    (0..BLOCKS_EACH)
        .map(|index| {
            let home = (first + index * 37) % HOMES;
            let mut content = vec![home as u8; BLOCK_BYTES];
            let at = (random.below(BLOCK_BYTES as u64 / 8) * 8) as usize;
            content[at..at + 8].copy_from_slice(&(u64::from(sequence) << 32 | home).to_le_bytes());
            (home, content)
        })
        .collect()
}

fn write(medium: MappedMedium, transactions: u64, told: &mut dyn FnMut(u32) -> Result<()>) -> Result<()> {
    let sentence = |error: nvm_journal::Error| error.to_string();
    let owner = Owner {
        file_system: [1; 16],
        journal: [2; 16],
        home_start: 0,
        home_blocks: HOMES,
        mark_checksum: 3,
        is_left: false,
        attachment: [0; ATTACHMENT_BYTES],
    };
    let mut journal =
        Journal::claim(medium, 0, BLOCK_BYTES as u32, &owner, 0, JournalOptions::default()).map_err(sentence)?;
    for _ in 0..transactions {
        let sequence = journal.sequence() + 1;
        if journal.room() < BLOCKS_EACH as u32 {
            journal.collect().map_err(sentence)?;
        }
        for (home, content) in transaction(sequence) {
            journal.put(home, &content).map_err(sentence)?;
        }
        journal.publish().map_err(sentence)?;
        told(sequence)?;
    }
    Ok(())
}

/// The last transaction that is there, if every block is as it left it.
fn verified(medium: &MappedMedium) -> Result<u32> {
    let bytes = medium.bytes();
    let found = Found::read(bytes).map_err(|error| error.to_string())?.ok_or("there is no region")?;
    found.verify(bytes).map_err(|error| error.to_string())?;
    let mut expected = std::collections::BTreeMap::new();
    for sequence in 1..=found.sequence {
        expected.extend(transaction(sequence));
    }
    if !found.latest.keys().eq(expected.keys()) {
        return Err(format!("{} home blocks are there, and {} were written", found.latest.len(), expected.len()));
    }
    for (home, header) in &found.latest {
        if found.content(bytes, header) != expected[home] {
            return Err(format!("block {home} is not as transaction {} or one before left it", found.sequence));
        }
    }
    Ok(found.sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_is_found_and_another_content_is_not_taken() {
        let directory = tempfile::tempdir().unwrap();
        let (region, told) = (directory.path().join("region"), directory.path().join("told"));
        std::fs::write(&told, "").unwrap();
        let words = |more: &str| {
            let words = format!("--region {} --name file --mark {} {more}", region.display(), told.display());
            run(Options::parse(words.split_whitespace().map(str::to_owned)).unwrap())
        };
        words("--create 4 --transactions 300").unwrap();
        words("--verify").unwrap();
        let text = std::fs::read_to_string(&told).unwrap();
        assert!(text.starts_with("mark file holds 300\n"), "{text}");
        let mut bytes = std::fs::read(&region).unwrap();
        let found = Found::read(&bytes).unwrap().unwrap();
        let at = found.geometry.block(found.latest[&7].block) as usize;
        bytes[at + 100] ^= 1;
        std::fs::write(&region, bytes).unwrap();
        let error = words("--verify").unwrap_err();
        assert!(error.contains("damaged"), "{error}");
    }
}
