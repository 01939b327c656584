//! Whole conversations with a real server, damaged in every way that a seed gives: right frames in a wrong order, payloads
//! changed under a right checksum, frames cut short and run together, bytes changed anywhere. The server serves on, what
//! another client keeps is not touched, and after all of it the store opens again.
//!
//! `AMBERLOG_HOSTILE_SESSIONS` makes it longer.

use remote_journal::message::{Batch, Block, FRAME_HEADER_BYTES, Message, read_all};
use remote_journal::{BlockingClient, ClientOptions, ClientSecurity, Server, ServerOptions};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::time::Duration;

struct Random(seeded_random::Random);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound as u64) as usize
    }
}

fn start(directory: &Path) -> Server {
    let mut options = ServerOptions::new("127.0.0.1:0", directory.join("store"));
    options.insecure = true;
    options.secrets = Some(directory.join("secrets"));
    options.bounds.segment_bytes = 1 << 20;
    options.bounds.space_bytes_max = 64 << 20;
    options.frame_timeout = Duration::from_millis(300);
    Server::start(options).expect("starts")
}

fn client(server: &Server, secret: &Path) -> BlockingClient {
    let security = ClientSecurity { insecure: true, secret: Some(secret.to_owned()), ..ClientSecurity::default() };
    let address = server.address().to_string();
    BlockingClient::connect(&ClientOptions { address, security, timeout: Duration::from_secs(20) }).expect("connects")
}

/// What a client may say after its proof, one after another.
fn conversation(random: &mut Random) -> Vec<Message> {
    let name = ["disk", "a", "b@4096"][random.below(3)].to_owned();
    let block_bytes = [512, 1024, 4096][random.below(3)];
    let mut said = vec![Message::Begin {
        name: name.clone(),
        owner: [1; 16],
        nonce: [random.below(3) as u8; 16],
        epoch_min: [0, 1, u64::MAX - 1, u64::MAX][random.below(4)],
        block_bytes: block_bytes as u32,
    }];
    for sequence in 1..=random.below(6) as u64 {
        let blocks = (0..=random.below(4)).map(|index| Block::new(index as u32, vec![7; block_bytes].into())).collect();
        let epoch = [1, 2, u64::MAX][random.below(3)];
        said.push(Message::Batch(Batch { epoch, sequence, tail: 1 + random.below(3) as u64, blocks }));
    }
    said.extend([
        Message::Ping,
        Message::List,
        Message::Fetch { name: name.clone(), epoch: 1, from: random.below(3) as u64 },
        Message::Take { name: name.clone() },
        Message::Close { name: name.clone(), epoch: 1, nonce: [random.below(3) as u8; 16] },
        Message::Delete { name, even_live: random.below(2) == 0 },
    ]);
    for _ in 0..random.below(4) {
        let (from, to) = (random.below(said.len()), random.below(said.len()));
        said.swap(from, to);
    }
    said
}

/// A message as bytes; of some the payload is changed before its checksum is made.
fn frame(message: &Message, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.write(&mut bytes);
    if random.below(3) > 0 {
        return bytes;
    }
    let mut payload = bytes.split_off(FRAME_HEADER_BYTES);
    for _ in 0..=random.below(3) {
        match random.below(3) {
            0 if !payload.is_empty() => {
                let at = random.below(payload.len());
                payload[at] = [0, 1, 0x7f, 0xff, b'/'][random.below(5)];
            }
            1 => payload.truncate(random.below(payload.len() + 1)),
            _ => payload.extend(std::iter::repeat_n(0xff, random.below(40))),
        }
    }
    let mut head = (payload.len() as u32).to_le_bytes().to_vec();
    head.extend([if random.below(8) == 0 { random.below(256) as u8 } else { bytes[4] }, bytes[5], 0, 0]);
    let crc = crc32c::crc32c_append(crc32c::crc32c(&head), &payload);
    [head, crc.to_le_bytes().to_vec(), payload].concat()
}

/// Says all of it, hears what the server has to say, and hangs up.
fn talk(server: &Server, identity: &str, secret: &[u8], random: &mut Random) {
    let mut stream = TcpStream::connect(server.address()).expect("connects");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    let mut challenge = vec![0; FRAME_HEADER_BYTES + 32];
    stream.read_exact(&mut challenge).expect("the server begins");
    let challenges = read_all(&challenge, 1 << 10).expect("a challenge");
    let [Message::Challenge { nonce }] = challenges[..] else { panic!("{challenges:?}") };
    let proof = remote_journal::security::prove(identity, secret, &nonce);
    let mut bytes = Vec::new();
    Message::Hello { identity: identity.to_owned(), proof }.write(&mut bytes);
    let begin = bytes.len();
    for message in conversation(random) {
        bytes.extend(frame(&message, random));
    }
    if random.below(3) == 0 {
        let at = begin + random.below(bytes.len() - begin);
        match random.below(3) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes.truncate(at),
            _ => drop(bytes.drain(at..(at + 1 + random.below(20)).min(bytes.len()))),
        }
    }
    // The server may have dropped the connection before the end of this.
    let _ = stream.write_all(&bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    assert!(read_all(&heard, usize::MAX).is_ok(), "the server says nothing that is no message");
}

#[test]
fn no_conversation_harms_the_server_or_another_client() {
    let sessions = std::env::var("AMBERLOG_HOSTILE_SESSIONS").ok().map_or(250, |text| text.parse().expect("a number"));
    let directory = tempfile::tempdir().expect("a directory");
    let (ann, eve) = ("ann 0123456789abcdef0", "eve abcdefghijklmnop1");
    for (name, text) in [("ann", ann.to_owned()), ("secrets", format!("{ann}\n{eve}\n"))] {
        std::fs::write(directory.path().join(name), text).expect("written");
    }
    let ann = directory.path().join("ann");
    let server = start(directory.path());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let security = ClientSecurity { insecure: true, secret: Some(ann.clone()), ..ClientSecurity::default() };
    let address = server.address().to_string();
    let of_ann = ClientOptions { address, security, timeout: Duration::from_secs(20) };
    runtime.block_on(async {
        let mut client = remote_journal::Client::connect(&of_ann).await.expect("connects");
        let epoch = client.begin("disk", [1; 16], [2; 16], 0, 1024, &[]).await.expect("begun");
        let (mut sender, mut receiver) = client.into_pipeline();
        let blocks = (0..20).map(|index| Block::new(index, vec![index as u8; 1024].into())).collect();
        sender.send(vec![Batch { epoch, sequence: 1, tail: 1, blocks }]).await.expect("sent");
        receiver.hear(Duration::from_secs(20)).await.expect("durable");
    });
    let kept = |server: &Server| {
        let mut client = client(server, &ann);
        let status = client.status("disk").expect("listed").expect("there");
        let log = client.fetch(&status, 100).expect("whole");
        assert!((0..20).all(|index| log.blocks[&index].iter().all(|byte| u32::from(*byte) == index)));
        status
    };
    let before = kept(&server);
    let mut random = Random(seeded_random::Random::new(1));
    for session in 0..sessions {
        talk(&server, "eve", b"abcdefghijklmnop1", &mut random);
        if session % 50 == 49 {
            assert_eq!(kept(&server), before);
        }
    }
    assert_eq!(kept(&server), before);
    server.stop();
    let server = start(directory.path());
    assert_eq!(kept(&server), before, "after all of it the store opens again");
    assert_eq!(
        server
            .metrics_text()
            .lines()
            .find(|line| line.starts_with("amberlog_journal_server_damaged_places"))
            .map(|line| line.ends_with(" 0")),
        Some(true)
    );
}
