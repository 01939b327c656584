//! The fuzz target `wire` on the stable compiler: every message, damaged in every way that a seed gives.

#[path = "../../../fuzz/src/exercise.rs"]
mod exercise;
#[path = "../../../fuzz/src/wire.rs"]
mod wire;

use remote_journal::message::{
    Batch, Block, FRAME_HEADER_BYTES, JournalStatus, Message, MessageError, Refusal, read_all,
};
use seeded_random::Random;

fn messages() -> Vec<Message> {
    let name = || "disk@1048576".to_owned();
    let status = JournalStatus {
        name: name(),
        owner: [1; 16],
        nonce: [2; 16],
        epoch: 3,
        fence: 4,
        block_bytes: 1024,
        is_live: true,
        is_recovered: false,
        tail: 5,
        last: 6,
        batches: 2,
        bytes: 7,
    };
    let blocks = vec![Block::new(9, vec![7; 1024].into()), Block::new(0, vec![8; 1024].into())];
    vec![
        Message::Challenge { nonce: [9; 32] },
        Message::Hello { identity: name(), proof: [1; 32] },
        Message::Welcome { identity: name() },
        Message::Begin { name: name(), owner: [1; 16], nonce: [2; 16], epoch_min: 3, block_bytes: 1024 },
        Message::Begun { epoch: 4 },
        Message::Batch(Batch { epoch: 4, sequence: 1, tail: 1, blocks }),
        Message::Durable { sequence: 1 },
        Message::Close { name: name(), epoch: 4, nonce: [2; 16] },
        Message::Done,
        Message::Take { name: name() },
        Message::List,
        Message::Journals(vec![status.clone(), JournalStatus { is_recovered: true, ..status }]),
        Message::BeginAfter {
            name: name(),
            owner: [1; 16],
            nonce: [2; 16],
            epoch_min: 3,
            block_bytes: 1024,
            after: vec![[4; 16], [5; 16]],
        },
        Message::TakeLog { name: name(), epoch: 4, nonce: [2; 16] },
        Message::TakeFree { name: name(), epoch: 4, nonce: [2; 16] },
        Message::Rename { name: name(), epoch: 4, nonce: [2; 16], next: [3; 16] },
        Message::Fetch { name: name(), epoch: 4, from: 1 },
        Message::Delete { name: name(), even_live: true },
        Message::Ping,
        Message::Pong,
        Message::Refuse { refusal: Refusal::Fenced, reason: "no".to_owned() },
    ]
}

#[test]
fn every_message_is_read_as_it_was_written() {
    let mut bytes = Vec::new();
    messages().iter().for_each(|message| message.write(&mut bytes));
    assert_eq!(read_all(&bytes, usize::MAX), Ok(messages()));
    for cut in 0..bytes.len() {
        assert!(read_all(&bytes[..cut], usize::MAX).is_ok_and(|read| read.len() < messages().len()));
    }
}

#[test]
fn damage_anywhere_is_found() {
    for message in messages() {
        let mut bytes = Vec::new();
        message.write(&mut bytes);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            let read = read_all(&damaged, 1 << 20);
            assert!(read.is_err() || read.is_ok_and(|read| read.is_empty()), "byte {at} of {message:?}");
        }
    }
    let mut batch = Vec::new();
    let bad = Block { crc: 1, ..Block::new(9, vec![7; 1024].into()) };
    Message::Batch(Batch { epoch: 1, sequence: 1, tail: 1, blocks: vec![bad] }).write(&mut batch);
    assert_eq!(read_all(&batch, usize::MAX), Err(MessageError::BlockChecksum(9)), "the block's own checksum counts");
}

#[test]
fn no_input_makes_it_panic() {
    let mut random = Random::new(1);
    for message in messages() {
        let mut frame = Vec::new();
        message.write(&mut frame);
        let payload = frame.split_off(FRAME_HEADER_BYTES);
        for round in 0..400 {
            let mut input = vec![1, frame[4]];
            input.extend_from_slice(&payload);
            for _ in 0..round % 5 {
                let at = 1 + random.below(input.len() as u64 - 1) as usize;
                match random.below(3) {
                    0 => input[at] = random.bits() as u8,
                    1 => input.truncate(at + 1),
                    _ => input.extend_from_slice(&random.bits().to_le_bytes()),
                }
            }
            wire::run(&input);
            input[0] = 0;
            wire::run(&input);
        }
    }
}

#[test]
fn whatever_a_peer_sends_is_understood_or_refused() {
    exercise::exercise("wire", 4000, &wire::run);
}

/// Makes the first inputs anew (scripts/fuzz.sh seeds): each message as a frame, each as a payload behind its kind, and all of
/// them as one stream.
#[test]
#[ignore = "writes the seeds of the kept corpus"]
fn seeds() {
    let mut inputs = Vec::new();
    let mut stream = vec![0];
    for (number, message) in messages().iter().enumerate() {
        let mut frame = vec![0];
        message.write(&mut frame);
        stream.extend(&frame[1..]);
        // Behind the mode: the kind, which is the fifth byte of a frame, then what is behind the header.
        let payload = [&[1, frame[5]], &frame[1 + FRAME_HEADER_BYTES..]].concat();
        inputs.push((format!("frame-{number:02}"), frame));
        inputs.push((format!("payload-{number:02}"), payload));
    }
    inputs.push(("stream".to_owned(), stream));
    exercise::write_seeds("wire", inputs.iter().map(|(name, data)| (name.as_str(), data.clone())).collect());
}
