//! A server that is there, and does not do all that it is asked for.

use super::super::ship::listen;
use super::guest::Guest;
use crate::remote::Mode;
use remote_journal::message::{FRAME_HEADER_BYTES, FrameHeader, Message, PAYLOAD_BYTES_MAX};
use remote_journal::{Client, ClientOptions, ClientSecurity};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

fn say(stream: &mut TcpStream, message: &Message) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    message.write(&mut bytes);
    stream.write_all(&bytes)
}

fn question(stream: &mut TcpStream) -> std::io::Result<Message> {
    let mut head = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut head)?;
    let header = FrameHeader::read(&head, PAYLOAD_BYTES_MAX).map_err(std::io::Error::other)?;
    let mut payload = vec![0; header.payload_bytes];
    stream.read_exact(&mut payload)?;
    Message::read(header.kind, &payload).map_err(std::io::Error::other)
}

/// Serves one connection after another until nobody comes; each is greeted.
fn server(mut serve: impl FnMut(&mut TcpStream) -> std::io::Result<()> + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let greeted = say(&mut stream, &Message::Challenge { nonce: [0; 32] })
                .and_then(|()| question(&mut stream))
                .and_then(|_| say(&mut stream, &Message::Welcome { identity: "me".to_owned() }));
            // Whoever has had enough of it closes the connection.
            let _ = greeted.and_then(|()| serve(&mut stream));
        }
    });
    address
}

/// It has all batches, and is there; what it was asked for is never done. Commits wait for that: no longer than for anything else.
#[test]
fn a_server_that_does_not_do_what_it_is_asked_for_is_given_up() {
    let mut guest = Guest::new(980, 0);
    guest.world.stop_server();
    guest.wait_until_remote(false);
    guest.commit();
    let fake = server(|stream| {
        let mut begun = false;
        let mut last = 0;
        loop {
            match question(stream)? {
                Message::BeginAfter { epoch_min, .. } => say(stream, &Message::Begun { epoch: epoch_min + 1 })?,
                // That it can, and no more.
                Message::Rename { .. } if !std::mem::replace(&mut begun, true) => say(stream, &Message::Done)?,
                Message::Batch(batch) => {
                    last = batch.sequence;
                    say(stream, &Message::Durable { sequence: last })?;
                }
                // It says the same again and again, which is no progress.
                Message::Ping => [Message::Pong, Message::Durable { sequence: last }]
                    .iter()
                    .try_for_each(|message| say(stream, message))?,
                _ => {}
            }
        }
    });
    guest.world.network.lead_to(Some(fake));
    guest.wait_until_switching();
    let connects = guest.log.report().connects;
    let began = Instant::now();
    guest.commit();
    assert!(began.elapsed() < Duration::from_secs(20), "the guest has waited for {:?}", began.elapsed());
    guest.world.crash();
    // It is tried again, as after any failure.
    guest.wait_until_switching();
    assert!(guest.log.report().connects > connects && guest.log.mode() != Mode::Failed);
    guest.commit();
    guest.world.crash();
}

/// It talks as fast as it can, to somebody who has no time: what it says waits in the network.
#[test]
fn what_a_server_says_takes_no_memory_without_end() {
    const MOST: usize = 64 << 20;
    let (said, has_said) = std::sync::mpsc::channel();
    let address = server(move |stream| {
        stream.set_write_timeout(Some(Duration::from_millis(500)))?;
        let mut bytes = Vec::new();
        (0..4096).for_each(|sequence| Message::Durable { sequence }.write(&mut bytes));
        let mut taken = 0;
        while taken < MOST {
            match stream.write(&bytes) {
                Ok(written) => taken += written,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
                Err(error) => return Err(error),
            }
        }
        said.send(taken).map_err(std::io::Error::other)
    });
    let security = ClientSecurity { insecure: true, ..ClientSecurity::default() };
    let options = ClientOptions { address: address.to_string(), security, timeout: Duration::from_secs(5) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (_sender, receiver) = Client::connect(&options).await.expect("connects").into_pipeline();
        let (_heard, _hearing) = listen(receiver);
        let taken = loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            if let Ok(taken) = has_said.try_recv() {
                break taken;
            }
        };
        assert!(taken < MOST, "all that it said was taken");
    });
}
