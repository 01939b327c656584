//! What a peer of a journal server could send: frames of any kind, cut short, oversized, with any payload.
//!
//! Input: a byte that says how long payloads may be, then either the stream itself, or (where the byte is odd) one payload
//! after its kind, which a right frame is put around, so that the checksum does not keep everything out.
//!
//! What is checked: no panic; what is understood is written again as the same bytes; nothing longer than allowed is.

use remote_journal::message::{self, BatchHeader, Message};

/// One input.
pub fn run(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else { return };
    let max = if mode & 2 == 0 { message::PAYLOAD_BYTES_MAX } else { message::PAYLOAD_BYTES_MAX_BEFORE_HELLO };
    if mode & 1 == 0 {
        if let Ok(messages) = message::read_all(rest, max) {
            let mut again = Vec::new();
            messages.iter().for_each(|message| message.write(&mut again));
            assert!(again.len() <= rest.len() + 16 * messages.len());
        }
        return;
    }
    let Some((kind, payload)) = rest.split_first() else { return };
    let Ok(message) = Message::read(*kind, payload) else { return };
    if let Message::Batch(batch) = &message {
        let header = BatchHeader::read(payload).expect("a batch has a header");
        assert_eq!((header.epoch, header.sequence, header.tail), (batch.epoch, batch.sequence, batch.tail));
        assert_eq!(batch.payload_bytes(), payload.len());
    }
    let mut frame = Vec::new();
    message.write(&mut frame);
    assert_eq!(message::read_all(&frame, usize::MAX), Ok(vec![message]), "what is written is read as the same");
}
