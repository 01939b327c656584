//! What a dead process left outlives it, and another one reads it. Whatever the files say by then, that one refuses or
//! recovers, ends, and writes nothing beyond the file system that they are about.
//!
//! Two tests: one forges field by field what was left just now, the other runs the kept corpus `area`
//! (fuzz/src/exercise.rs) and mutations of it.

use super::*;
use std::cell::RefCell;

#[path = "../../../../fuzz/src/exercise.rs"]
mod exercise;

/// The numbers that matter to somebody who forges a file.
const EXTREMES: [u64; 14] = [
    0,
    1,
    7,
    511,
    1024,
    4096,
    1 << 20,
    (1 << 29) - 1,
    u32::MAX as u64 - 1,
    u32::MAX as u64,
    1 << 40,
    i64::MAX as u64,
    u64::MAX - 4095,
    u64::MAX,
];

struct Random(seeded_random::Random);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound as u64) as usize
    }
}

/// Changes one number, text or list somewhere in a description.
fn forge(value: &mut serde_json::Value, random: &mut Random) {
    use serde_json::Value;
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            let at = random.below(fields.len());
            forge(fields.values_mut().nth(at).expect("a field"), random);
        }
        Value::Array(items) if !items.is_empty() && random.below(5) != 0 => {
            let at = random.below(items.len());
            match random.below(6) {
                0 => items.push(items[at].clone()),
                _ => forge(&mut items[at], random),
            }
        }
        Value::Array(items) => items.clear(),
        Value::Number(_) => *value = EXTREMES[random.below(EXTREMES.len())].into(),
        Value::String(text) => *text = ["", "..", "../image", "log-0", "/", "x\0y"][random.below(6)].to_owned(),
        Value::Bool(is) => *is = !*is,
        _ => {}
    }
}

/// Changes a few words of a table, its head mostly.
fn scribble(table: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let words = table.len() / 4;
        let word = if random.below(2) == 0 { random.below(10) } else { 1024 + random.below(words - 1024) };
        let value = match random.below(3) {
            0 => EXTREMES[random.below(EXTREMES.len())] as u32,
            1 => (random.below(8) as u32) << 29 | EXTREMES[random.below(EXTREMES.len())] as u32 >> 3,
            _ => (1 + random.below(3) as u32) << 29 | random.below(300) as u32,
        };
        table[word * 4..word * 4 + 4].copy_from_slice(&value.to_le_bytes());
    }
    if random.below(6) == 0 {
        table.truncate([0, 8, 4095, 4096][random.below(4)]);
    }
}

/// What a dead process left, with a sound log of two transactions, and the image that it is about.
struct Left {
    directory: AreaDirectory,
    image: LeftImage,
    file: std::fs::File,
    before: Vec<u8>,
    after: RefCell<Vec<u8>>,
    paths: [PathBuf; 3],
    sound: [Vec<u8>; 3],
}

impl Left {
    fn new() -> Self {
        let mut rig = Rig::new();
        let first = FILE_SYSTEM_BLOCKS - 100;
        rig.open();
        rig.commit(&[(first, content(1)), (first + 1, content(2))]);
        rig.commit(&[(first, content(3))]);
        let (image, directory) = rig.die();
        let paths = ["area.json", "log-0.table", "log-0.pool"].map(|name| directory.path().join(name));
        let sound = paths.each_ref().map(|path| std::fs::read(path).expect("it is there"));
        let before = std::fs::read(&image).expect("the image");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&image).expect("the image");
        let after = RefCell::new(vec![0; before.len()]);
        Left { directory, image, file, before, after, paths, sound }
    }

    /// Has another process finish what these files say. How many logs it recovered, if it did not refuse.
    fn finish(&self, files: &[Vec<u8>; 3]) -> Option<usize> {
        self.paths.iter().zip(files).for_each(|(path, bytes)| std::fs::write(path, bytes).expect("written"));
        let images = [self.image.clone()];
        let result = finish_directory(&self.directory, &images).and_then(Finish::into_result);
        let mut after = self.after.borrow_mut();
        assert_eq!(self.file.metadata().expect("an image").len(), self.before.len() as u64);
        self.file.read_exact_at(&mut after, 0).expect("the image");
        let its_own = PARTITION as usize..(PARTITION + FILE_SYSTEM_BLOCKS * BLOCK) as usize;
        let mut has_changed = false;
        for (at, (was, is)) in self.before.chunks(BLOCK as usize).zip(after.chunks(BLOCK as usize)).enumerate() {
            if was != is {
                let at = at * BLOCK as usize;
                assert!(its_own.contains(&at), "byte {at} is not of the file system");
                self.file.write_all_at(was, at as u64).expect("put back");
                has_changed = true;
            }
        }
        let recovered = result.ok().map(|logs| logs.len());
        assert!(!has_changed || recovered != Some(0), "what is not recovered is not written");
        recovered
    }
}

#[test]
fn a_directory_that_was_tampered_with_is_no_danger() {
    let iterations = exercise::iterations(150);
    let left = Left::new();
    assert_eq!(left.finish(&left.sound), Some(1), "the sound one");
    let mut random = Random(seeded_random::Random::new(1));
    let (mut recovered, mut refused) = (0, 0);
    for number in 0..iterations {
        let mut files = left.sound.clone();
        let which = random.below(8);
        if which < 4 {
            let mut description = serde_json::from_slice(&left.sound[0]).expect("JSON");
            (0..=random.below(2)).for_each(|_| forge(&mut description, &mut random));
            files[0] = serde_json::to_vec(&description).expect("JSON");
        }
        if (3..7).contains(&which) {
            scribble(&mut files[1], &mut random);
        }
        if which == 7 {
            let len = files[2].len();
            files[2].truncate(random.below(len));
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| left.finish(&files)));
        match result {
            Ok(Some(logs)) => recovered += logs,
            Ok(None) => refused += 1,
            Err(_) => panic!("input {number}: {}", String::from_utf8_lossy(&files[0])),
        }
    }
    assert!(iterations < 50 || (recovered > 5 && refused > 20), "{recovered} recovered, {refused} refused");
}

/// The name of the corpus. An input is a description, a byte 0, and words of 32 bits: how long the pool is and the table, in
/// bytes, then number and value of each word of the table that is not 0.
const TARGET: &str = "area";
/// What stands in a description for the things that are different every time.
const IMAGE: &str = "@image@";
const KEY: &str = "@key@";
/// Longer files are not made from an input.
const FILE_BYTES_MAX: usize = 16 << 20;
/// The words of a table that say which opening of the log it is about. They are drawn; an input that has all of them as
/// `DRAWN` means the one that the image says.
const OPENING: std::ops::Range<usize> = 10..14;
const DRAWN: [u8; 4] = *b"draw";

fn key_of(image: &Path) -> String {
    std::fs::metadata(image).map(|image| format!("file-{:x}-{:x}", image.dev(), image.ino())).expect("an image")
}

/// An input that means these files.
fn packed(left: &Left, files: &[Vec<u8>; 3]) -> Vec<u8> {
    let image = left.image.to_str().expect("a plain name");
    let text = String::from_utf8_lossy(&files[0]).replace(image, IMAGE).replace(&key_of(&left.image), KEY);
    let mut input = text.into_bytes();
    input.push(0);
    for length in [&files[2], &files[1]] {
        input.extend((length.len() as u32).to_le_bytes());
    }
    let sound = left.sound[1].chunks_exact(4).collect::<Vec<_>>();
    for (number, word) in files[1].chunks_exact(4).enumerate().filter(|(_, word)| **word != [0; 4]) {
        let is_drawn = OPENING.contains(&number) && word == sound[number];
        input.extend((number as u32).to_le_bytes());
        input.extend(if is_drawn { &DRAWN } else { word });
    }
    input
}

/// The files that an input means.
fn unpacked(left: &Left, input: &[u8]) -> Option<[Vec<u8>; 3]> {
    let end = input.iter().position(|byte| *byte == 0)?;
    let text = String::from_utf8_lossy(&input[..end]);
    let text = text.replace(IMAGE, left.image.to_str().expect("a plain name")).replace(KEY, &key_of(&left.image));
    let words = input[end + 1..].chunks_exact(4).map(|word| <[u8; 4]>::try_from(word).expect("four bytes"));
    let words = words.collect::<Vec<_>>();
    let (lengths, words) = words.split_at_checked(2)?;
    let length = |at: usize| (u32::from_le_bytes(lengths[at]) as usize).min(FILE_BYTES_MAX);
    let mut table = vec![0; length(1)];
    for pair in words.chunks_exact(2) {
        let number = u32::from_le_bytes(pair[0]) as usize;
        if let Some(word) = table.get_mut(number.saturating_mul(4)..).and_then(|rest| rest.first_chunk_mut::<4>()) {
            *word = pair[1];
        }
    }
    let opening = OPENING.start * 4..OPENING.end * 4;
    if table.len() >= opening.end && table[opening.clone()] == DRAWN.repeat(4) {
        table[opening.clone()].copy_from_slice(&left.sound[1][opening]);
    }
    let mut pool = left.sound[2].clone();
    pool.resize(length(0), 0);
    Some([text.into_bytes(), table, pool])
}

#[test]
fn no_kept_directory_is_a_danger() {
    let left = Left::new();
    let recovered = std::cell::Cell::new(0);
    exercise::exercise(TARGET, 150, &|input| {
        if let Some(files) = unpacked(&left, input) {
            recovered.set(recovered.get() + left.finish(&files).unwrap_or_default());
        }
    });
    assert!(recovered.get() > 0, "the corpus holds a directory that is sound");
}

/// Makes the first inputs anew (scripts/fuzz.sh seeds).
#[test]
#[ignore = "writes the seeds of the kept corpus"]
fn seeds() {
    let left = Left::new();
    let with = |description: &dyn Fn(&mut serde_json::Value), table: &[(usize, u32)], pool: usize| {
        let mut files = left.sound.clone();
        let mut value = serde_json::from_slice(&files[0]).expect("JSON");
        description(&mut value);
        files[0] = serde_json::to_vec(&value).expect("JSON");
        for (word, value) in table {
            files[1][word * 4..word * 4 + 4].copy_from_slice(&value.to_le_bytes());
        }
        files[2].truncate(pool);
        packed(&left, &files)
    };
    let plain = |_: &mut serde_json::Value| {};
    let all = usize::MAX;
    assert_eq!(unpacked(&left, &with(&plain, &[], all)).map(|files| files[1..] == left.sound[1..]), Some(true));
    exercise::write_seeds(
        TARGET,
        vec![
            ("sound", with(&plain, &[], all)),
            (
                "two-logs-of-one-table",
                with(
                    &|value| {
                        let log = value["logs"][0].clone();
                        value["logs"].as_array_mut().expect("logs").push(log);
                    },
                    &[],
                    all,
                ),
            ),
            ("no-images", with(&|value| value["images"] = serde_json::json!([]), &[], all)),
            (
                "memory-that-overlaps",
                with(
                    &|value| {
                        value["ram"] =
                            serde_json::json!([{"path": "ram", "first_page": 0}, {"path": "ram", "first_page": 1}]);
                    },
                    &[],
                    all,
                ),
            ),
            ("a-log-elsewhere", with(&|value| value["logs"][0]["name"] = "../../image".into(), &[], all)),
            ("a-pool-that-is-cut-off", with(&plain, &[], 4096)),
            (
                "every-block-in-one-slot",
                with(&plain, &[(1025, 1 << 29 | 1), (1026, 1 << 29 | 1), (1027, 1 << 29 | 1)], all),
            ),
            ("every-block-in-memory", with(&plain, &[(1025, 2 << 29), (1026, 2 << 29 | 1), (1027, 2 << 29 | 2)], all)),
            ("a-tail-beyond-the-log", with(&plain, &[(4, u32::MAX), (5, u32::MAX)], all)),
            ("another-opening", with(&plain, &[(10, 7)], all)),
            ("distrusted", with(&plain, &[(6, 3)], all)),
        ],
    );
}
