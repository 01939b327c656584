//! Server and clients over real sockets: what is acknowledged is durable, writers are fenced, bad peers are dropped.

#[path = "standstill/mod.rs"]
mod standstill;

use remote_journal::message::{Batch, Block, FRAME_HEADER_BYTES, Message, Refusal, read_all};
use remote_journal::{BlockingClient, Client, ClientError, ClientOptions, ClientSecurity, Server, ServerOptions};
use standstill::unless_it_stood_still;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Nothing that has to happen takes longer, also on a machine that stands still for some seconds.
const LIMIT: Duration = Duration::from_secs(60);

fn options(store: &Path) -> ServerOptions {
    let mut options = ServerOptions::new("127.0.0.1:0", store);
    options.insecure = true;
    options.hello_timeout = LIMIT;
    options.bounds.segment_bytes = 1 << 20;
    options
}

fn client_of(server: &Server) -> ClientOptions {
    ClientOptions {
        address: server.address().to_string(),
        security: ClientSecurity { insecure: true, ..ClientSecurity::default() },
        timeout: LIMIT,
    }
}

fn block(position: u32, byte: u8) -> Block {
    Block::new(position, vec![byte; 1024].into())
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(future)
}

async fn write(options: &ClientOptions, name: &str, count: u64) -> Result<u64, ClientError> {
    let mut client = Client::connect(options).await?;
    let epoch = client.begin(name, [1; 16], [2; 16], 0, 1024, &[]).await?;
    let (mut sender, mut receiver) = client.into_pipeline();
    for sequence in 1..=count {
        let blocks = vec![block(sequence as u32, sequence as u8), block(0, sequence as u8)];
        if let Err(error) = sender.send(vec![Batch { epoch, sequence, tail: 1, blocks }]).await {
            // Whoever drops a connection has said why, and that is not read yet.
            while !matches!(receiver.hear(LIMIT).await?, remote_journal::client::Heard::Durable(last) if last == count)
            {
            }
            return Err(error);
        }
    }
    let mut durable = 0;
    while durable < count {
        if let remote_journal::client::Heard::Durable(sequence) = receiver.hear(LIMIT).await? {
            durable = sequence;
        }
    }
    Ok(epoch)
}

#[test]
fn what_is_acknowledged_is_fetched_from_the_next_server() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let epoch = run(write(&client_of(&server), "disk", 100)).expect("written");
    server.stop();
    let server = Server::start(options(store.path())).expect("starts again");
    let mut client = BlockingClient::connect(&client_of(&server)).expect("connects");
    let status = client.status("disk").expect("listed").expect("there");
    assert_eq!((status.epoch, status.tail, status.last, status.is_live), (epoch, 1, 100, true));
    let log = client.fetch(&status, 1000).expect("whole");
    assert_eq!(log.blocks.len(), 101);
    assert!(log.blocks.iter().all(|(position, content)| *position == 0 || content[0] == *position as u8));
    assert_eq!(log.blocks[&0][0], 100, "the newest of a position");
    assert!(client.delete("disk", false).is_err());
    let mut client = BlockingClient::connect(&client_of(&server)).expect("connects");
    client.close("disk", epoch, [2; 16]).expect("closed");
    client.delete("disk", false).expect("deleted");
    assert_eq!(client.status("disk").expect("listed"), None);
    let text = server.metrics_text();
    assert!(text.contains("amberlog_journal_server_groups_total"), "{text}");
}

#[test]
fn only_the_highest_epoch_writes() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    run(async {
        let mut first = Client::connect(&options).await.expect("connects");
        let old = first.begin("disk", [1; 16], [2; 16], 0, 1024, &[]).await.expect("begun");
        let mut second = Client::connect(&options).await.expect("connects");
        let new = second.begin("disk", [1; 16], [3; 16], 0, 1024, &[[2; 16]]).await.expect("begun");
        assert!(new > old);
        let (mut sender, mut receiver) = first.into_pipeline();
        let batch = |epoch| vec![Batch { epoch, sequence: 1, tail: 1, blocks: vec![block(1, 1)] }];
        sender.send(batch(old)).await.expect("sent");
        let error = receiver.hear(LIMIT).await.expect_err("fenced");
        assert!(error.is_fenced(), "{error}");
        // Recovery fences the writer off as well.
        let mut third = Client::connect(&options).await.expect("connects");
        third.take("disk").await.expect("taken");
        let (mut sender, mut receiver) = second.into_pipeline();
        // Whether it has heard of that already or not.
        let _ = sender.send(batch(new)).await;
        let error = receiver.hear(LIMIT).await.expect_err("fenced");
        assert!(error.is_fenced(), "{error}");
    });
}

/// A log is somebody's until it is over: nobody takes its place who cannot name it, and nobody ends it who was fenced off.
#[test]
fn a_live_log_gives_way_to_nobody_who_cannot_name_it() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    let refused = |error: &ClientError| matches!(error, ClientError::Refused { refusal: Refusal::Refused, .. });
    let (ours, next, other) = ([2; 16], [3; 16], [9; 16]);
    run(async {
        let connect = async || Client::connect(&options).await.expect("connects");
        let old = connect().await.begin("disk", [1; 16], ours, 0, 1024, &[other]).await.expect("there is none yet");
        let error = connect().await.begin("disk", [1; 16], next, old, 1024, &[other]).await.expect_err("whose?");
        assert!(refused(&error) && error.to_string().contains("delete --force"), "{error}");
        let new = connect().await.begin("disk", [1; 16], next, 0, 1024, &[other, ours]).await.expect("it is ours");
        assert!(new > old);
        // As an older amberlog asks: with the epoch that it was given last, or for the first time.
        for (epoch_min, is_granted) in [(old, false), (new + 7, false), (new, true), (0, true)] {
            let begun = connect().await.begin_as_before("disk", [1; 16], ours, epoch_min, 1024).await;
            assert_eq!(begun.is_ok(), is_granted, "{begun:?}");
        }
        let begin = async || connect().await.begin("disk", [1; 16], next, 0, 1024, &[ours, next]).await.expect("ours");
        // Taken: only this very log; and after that its writer neither ends it, nor does an older amberlog's go on.
        let epoch = begin().await;
        assert!(refused(&connect().await.take_log("disk", epoch, other).await.expect_err("another log")));
        assert!(refused(&connect().await.take_log("disk", epoch - 1, next).await.expect_err("an older one")));
        let mut taker = connect().await;
        taker.take_log("disk", epoch, next).await.expect("taken");
        let error = connect().await.close("disk", epoch, next).await.expect_err("its writer was fenced off");
        assert!(error.is_fenced(), "{error}");
        assert!(connect().await.begin_as_before("disk", [1; 16], ours, epoch, 1024).await.is_err());
        // Taken once more: who took it before does not end it either.
        let mut second = connect().await;
        second.take("disk").await.expect("taken, as an older amberlog does");
        assert!(taker.close("disk", epoch, next).await.expect_err("fenced off in turn").is_fenced());
        second.close("disk", epoch, next).await.expect("recovered");
        let status = connect().await.list().await.expect("listed").remove(0);
        assert!(status.is_live && status.is_recovered, "{status:?}");
        // Recovered, it is nobody's, and kept until somebody begins: it can be taken and fetched again.
        connect().await.take_log("disk", epoch, next).await.expect("taken");
        connect().await.begin("disk", [7; 16], ours, 0, 1024, &[]).await.expect("even another file system");
        let status = connect().await.list().await.expect("listed").remove(0);
        assert!(status.is_live && !status.is_recovered && status.batches == 0, "{status:?}");
    });
}

/// A start of a copy of a disk, which nobody can tell from the disk, does not fence off who writes: only who is told to.
#[test]
fn a_log_whose_writer_is_there_is_taken_only_by_force() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    let nonce = [2; 16];
    run(async {
        let connect = async || Client::connect(&options).await.expect("connects");
        let mut writer = connect().await;
        let epoch = writer.begin("disk", [1; 16], nonce, 0, 1024, &[]).await.expect("begun");
        let batch = |sequence: u64| Batch {
            epoch,
            sequence,
            tail: 1,
            blocks: vec![Block::new(sequence as u32, vec![7; 1024].into())],
        };
        let (mut sender, mut receiver) = writer.into_pipeline();
        let mut hear = async |sequence: u64, sender: &mut remote_journal::client::BatchSender| {
            sender.send(vec![batch(sequence)]).await.expect("sent");
            let heard = receiver.hear(Duration::from_secs(20)).await.expect("it is the writer");
            assert_eq!(heard, remote_journal::client::Heard::Durable(sequence));
        };
        hear(1, &mut sender).await;
        // It has nothing to write, and is connected all the same.
        for _ in 0..2 {
            let error = connect().await.take_free("disk", epoch, nonce).await.expect_err("somebody writes it");
            assert!(error.is_in_use() && error.is_passing() && !error.is_damage(), "{error}");
            assert!(error.to_string().contains("amberlog recover --disk"), "{error}");
        }
        let error = connect().await.take_free("disk", epoch, [9; 16]).await.expect_err("another log");
        assert!(
            error.is_in_use() || matches!(error, ClientError::Refused { refusal: Refusal::Refused, .. }),
            "{error}"
        );
        hear(2, &mut sender).await;
        drop((sender, receiver));
        // The server hears of that when it does.
        let taker = loop {
            let mut taker = connect().await;
            match taker.take_free("disk", epoch, nonce).await {
                Ok(()) => break taker,
                Err(error) => assert!(error.is_in_use(), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        drop(taker);
        // By force, beside a writer.
        let mut writer = connect().await;
        let epoch = writer.begin("disk", [1; 16], [3; 16], 0, 1024, &[nonce]).await.expect("begun");
        assert!(connect().await.take_free("disk", epoch, [3; 16]).await.expect_err("in use").is_in_use());
        connect().await.take_log("disk", epoch, [3; 16]).await.expect("taken");
        // Fenced off, it is nobody's that is there.
        connect().await.take_free("disk", epoch, [3; 16]).await.expect("taken once more");
    });
}

/// Once its writer has renamed a log it gives way to the new name alone, also after a restart; who was fenced off renames nothing.
#[test]
fn a_renamed_log_gives_way_to_its_new_name() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let (old, new, other) = ([2; 16], [3; 16], [9; 16]);
    let epoch = run(write(&client_of(&server), "disk", 20)).expect("written");
    run(async {
        let options = client_of(&server);
        let connect = async || Client::connect(&options).await.expect("connects");
        connect().await.rename("disk", epoch, other, new).await.expect_err("another log");
        connect().await.rename("disk", epoch + 1, old, new).await.expect_err("another epoch");
        connect().await.rename("disk", epoch, old, new).await.expect("renamed");
        connect().await.rename("disk", epoch, old, other).await.expect_err("it is not called that any more");
    });
    server.stop();
    let server = Server::start(options(store.path())).expect("starts again");
    run(async {
        let options = client_of(&server);
        let connect = async || Client::connect(&options).await.expect("connects");
        let status = connect().await.list().await.expect("listed").remove(0);
        assert_eq!((status.nonce, status.epoch, status.last), (new, epoch, 20));
        let log = connect().await.fetch(&status, 1000).await.expect("whole");
        assert_eq!(log.blocks.len(), 21);
        connect().await.begin("disk", [1; 16], other, 0, 1024, &[old]).await.expect_err("its old name");
        connect().await.begin_as_before("disk", [1; 16], other, epoch + 1, 1024).await.expect_err("another epoch");
        connect().await.take_log("disk", epoch, new).await.expect("taken");
        let error = connect().await.rename("disk", epoch, new, old).await.expect_err("fenced off");
        assert!(error.is_fenced(), "{error}");
        connect().await.begin("disk", [1; 16], other, 0, 1024, &[new]).await.expect("its new name");
    });
}

/// A file system that is given another UUID names its log all the same.
#[test]
fn who_names_a_log_begins_after_it_whatever_its_file_system_is_called() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    run(async {
        let connect = async || Client::connect(&options).await.expect("connects");
        let epoch = connect().await.begin("disk", [1; 16], [2; 16], 0, 1024, &[]).await.expect("begun");
        connect().await.begin("disk", [7; 16], [3; 16], 0, 1024, &[]).await.expect_err("it does not name it");
        connect().await.begin_as_before("disk", [7; 16], [3; 16], epoch, 1024).await.expect_err("nor can it");
        connect().await.begin("disk", [7; 16], [3; 16], 0, 1024, &[[2; 16]]).await.expect("it does");
    });
}

/// A client that has as many connections as it may have is told to try again: nothing is said of what is kept.
#[test]
fn too_many_connections_are_no_verdict() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    run(async {
        let mut held = Vec::new();
        for _ in 0..256 {
            held.push(Client::connect(&options).await.expect("connects"));
        }
        let mut one_more = Client::connect(&options).await.expect("it is known");
        let error = one_more.list().await.expect_err("too many");
        assert!(error.is_passing(), "{error}");
        drop(held);
        // The server hears of that when it does.
        let deadline = Instant::now() + LIMIT;
        loop {
            let mut later = Client::connect(&options).await.expect("connects");
            let Err(error) = later.list().await else { break };
            assert!(error.is_passing() && Instant::now() < deadline, "{error}");
            drop(later);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
}

/// What was recovered is kept over a restart, whole, and gives its room back when it is deleted, which needs no force.
#[test]
fn a_recovered_log_is_kept_until_the_next_begins() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let epoch = run(write(&client_of(&server), "disk", 20)).expect("written");
    let mut client = BlockingClient::connect(&client_of(&server)).expect("connects");
    client.take_log("disk", epoch, [2; 16]).expect("taken");
    client.close("disk", epoch, [2; 16]).expect("recovered");
    drop(client);
    server.stop();
    let server = Server::start(options(store.path())).expect("starts again");
    let mut client = BlockingClient::connect(&client_of(&server)).expect("connects");
    let status = client.status("disk").expect("listed").expect("there");
    assert_eq!((status.epoch, status.last, status.is_live, status.is_recovered), (epoch, 20, true, true));
    assert_eq!(client.fetch(&status, 1000).expect("whole").blocks.len(), 21);
    client.delete("disk", false).expect("nobody needs it");
}

/// A writer with nothing to write hears at once that somebody else has its journal.
#[test]
fn an_idle_writer_is_told_that_it_is_fenced_off() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    run(async {
        let connect = async || Client::connect(&options).await.expect("connects");
        for taken in [true, false] {
            let mut first = connect().await;
            let epoch = first.begin("disk", [1; 16], [2; 16], 0, 1024, &[[2; 16]]).await.expect("begun");
            // Another journal's writer is not.
            let mut other = connect().await;
            other.begin("other", [1; 16], [2; 16], 0, 1024, &[[2; 16]]).await.expect("begun");
            let mut second = connect().await;
            if taken {
                second.take_log("disk", epoch, [2; 16]).await.expect("taken");
            } else {
                second.begin("disk", [1; 16], [2; 16], 0, 1024, &[[2; 16]]).await.expect("begun");
            }
            let (_sender, mut receiver) = first.into_pipeline();
            let error = receiver.hear(LIMIT).await.expect_err("fenced");
            assert!(error.is_fenced(), "{error}");
            let (mut sender, mut receiver) = other.into_pipeline();
            sender.ping().await.expect("sent");
            let heard = receiver.hear(LIMIT).await.expect("left alone");
            assert_eq!(heard, remote_journal::client::Heard::Alive);
        }
    });
}

/// A server that does not know how to begin after another log says that of the frame: the client says what to do.
#[test]
fn an_older_server_is_told_from_a_refusal() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let serving = std::thread::spawn(move || {
        for kind in [18, 19, 20] {
            let (mut stream, _) = listener.accept().expect("a client");
            let say = |stream: &mut std::net::TcpStream, message: Message| {
                let mut frame = Vec::new();
                message.write(&mut frame);
                stream.write_all(&frame).expect("said");
            };
            let hear = |stream: &mut std::net::TcpStream| {
                let mut header = [0; 12];
                stream.read_exact(&mut header).expect("a frame");
                let mut payload = vec![0; u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize];
                stream.read_exact(&mut payload).expect("its payload");
                header[4]
            };
            say(&mut stream, Message::Challenge { nonce: [1; 32] });
            hear(&mut stream);
            say(&mut stream, Message::Welcome { identity: "anonymous".to_owned() });
            assert_eq!(hear(&mut stream), kind);
            let reason = format!("a frame of kind {kind} is malformed");
            say(&mut stream, Message::Refuse { refusal: Refusal::Refused, reason });
        }
    });
    let security = ClientSecurity { insecure: true, ..ClientSecurity::default() };
    let options = ClientOptions { address, security, timeout: LIMIT };
    run(async {
        let mut client = Client::connect(&options).await.expect("connects");
        let error = client.begin("disk", [1; 16], [2; 16], 0, 1024, &[]).await.expect_err("too old");
        assert!(matches!(error, ClientError::OldServer) && error.to_string().contains("update it"), "{error}");
        let mut client = Client::connect(&options).await.expect("connects");
        let error = client.take_log("disk", 1, [2; 16]).await.expect_err("too old");
        assert!(matches!(error, ClientError::OldServer), "{error}");
        let mut client = Client::connect(&options).await.expect("connects");
        let error = client.rename("disk", 1, [2; 16], [2; 16]).await.expect_err("too old");
        assert!(matches!(error, ClientError::OldServer), "{error}");
    });
    serving.join().expect("it served");
}

#[test]
fn clients_prove_who_they_are_and_see_only_their_own() {
    let files = tempfile::tempdir().expect("a directory");
    let path = |name: &str| files.path().join(name);
    let key = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
    std::fs::write(path("cert"), key.cert.pem()).expect("written");
    std::fs::write(path("key"), key.signing_key.serialize_pem()).expect("written");
    std::fs::write(path("secrets"), "ann 0123456789abcdef0\n# a comment\nbob abcdefghijklmnop1\n").expect("written");
    for (name, line) in
        [("ann", "ann 0123456789abcdef0"), ("bob", "bob abcdefghijklmnop1"), ("eve", "ann abcdefghijklmnop1")]
    {
        std::fs::write(path(name), line).expect("written");
    }
    let server = Server::start(ServerOptions {
        certificate: Some((path("cert"), path("key"))),
        secrets: Some(path("secrets")),
        insecure: false,
        ..options(&path("store"))
    })
    .expect("starts");
    let as_who = |secret: Option<&str>| ClientOptions {
        security: ClientSecurity {
            ca: Some(path("cert")),
            server_name: Some("localhost".to_owned()),
            secret: secret.map(path),
            ..ClientSecurity::default()
        },
        ..client_of(&server)
    };
    run(write(&as_who(Some("ann")), "disk", 3)).expect("written");
    let mut bob = BlockingClient::connect(&as_who(Some("bob"))).expect("connects");
    assert_eq!(bob.list().expect("listed"), Vec::new());
    assert!(bob.take("disk").is_err());
    let refused = |options: &ClientOptions| match BlockingClient::connect(options) {
        Ok(_) => panic!("let in"),
        Err(error) => error,
    };
    for wrong in [Some("eve"), None] {
        let error = refused(&as_who(wrong));
        assert!(matches!(error, ClientError::Refused { refusal: Refusal::Unauthenticated, .. }), "{error}");
    }
    // Neither is the server believed without its certificate, nor a client without TLS answered.
    let mut other = as_who(Some("ann"));
    other.security.server_name = Some("elsewhere".to_owned());
    refused(&other);
    let mut plain = client_of(&server);
    plain.timeout = Duration::from_secs(2);
    refused(&plain);
    // One that asks nobody for a proof has the journals of all of them under one name, and hers not at all.
    let open = Server::start(options(&path("open"))).expect("starts");
    let mut ann = client_of(&open);
    ann.security.secret = Some(path("ann"));
    let error = refused(&ann);
    assert!(matches!(error, ClientError::OtherIdentity { .. }) && !error.is_damage(), "{error}");
    assert!(Server::start(ServerOptions { insecure: false, ..options(&path("other")) }).is_err());
}

#[test]
fn client_certificates_are_identities() {
    let files = tempfile::tempdir().expect("a directory");
    let path = |name: &str| files.path().join(name);
    let mut parameters = rcgen::CertificateParams::new(Vec::new()).expect("parameters");
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate().expect("a key");
    let ca = parameters.self_signed(&ca_key).expect("signed");
    std::fs::write(path("ca"), ca.pem()).expect("written");
    let issuer = rcgen::Issuer::new(parameters, ca_key);
    for name in ["localhost", "host-a"] {
        let key = rcgen::KeyPair::generate().expect("a key");
        let certificate = rcgen::CertificateParams::new(vec![name.to_owned()]).expect("parameters");
        let certificate = certificate.signed_by(&key, &issuer).expect("signed");
        std::fs::write(path(&format!("{name}.cert")), certificate.pem()).expect("written");
        std::fs::write(path(&format!("{name}.key")), key.serialize_pem()).expect("written");
    }
    let pair = |name: &str| (path(&format!("{name}.cert")), path(&format!("{name}.key")));
    let server = Server::start(ServerOptions {
        certificate: Some(pair("localhost")),
        client_ca: Some(path("ca")),
        insecure: false,
        ..options(&path("store"))
    })
    .expect("starts");
    let mut with = client_of(&server);
    with.security = ClientSecurity {
        ca: Some(path("ca")),
        server_name: Some("localhost".to_owned()),
        certificate: Some(pair("host-a")),
        ..ClientSecurity::default()
    };
    run(write(&with, "disk", 3)).expect("written");
    // Secrets beside certificates: a wrong one is nobody's, whatever the certificate says.
    std::fs::write(path("secrets"), "ann 0123456789abcdef0\n").expect("written");
    for (name, line) in [("ann", "ann 0123456789abcdef0"), ("eve", "ann abcdefghijklmnop1")] {
        std::fs::write(path(name), line).expect("written");
    }
    let both = Server::start(ServerOptions {
        certificate: Some(pair("localhost")),
        client_ca: Some(path("ca")),
        secrets: Some(path("secrets")),
        insecure: false,
        ..options(&path("both"))
    })
    .expect("starts");
    let as_who = |server: &Server, secret: Option<&str>| ClientOptions {
        security: ClientSecurity { secret: secret.map(path), ..with.security.clone() },
        ..client_of(server)
    };
    let journals = |options: &ClientOptions| {
        let listed = BlockingClient::connect(options).and_then(|mut client| client.list());
        listed.map(|journals| journals.len())
    };
    run(write(&as_who(&both, Some("ann")), "hers", 3)).expect("written");
    assert_eq!(journals(&as_who(&both, Some("ann"))).expect("her secret is right"), 1);
    assert_eq!(journals(&as_who(&both, None)).expect("the certificate is"), 0);
    let error = journals(&as_who(&both, Some("eve"))).expect_err("it is not her secret");
    assert!(matches!(error, ClientError::Refused { refusal: Refusal::Unauthenticated, .. }), "{error}");
    // Where the server knows of certificates alone, a secret says nothing to it.
    let error = journals(&as_who(&server, Some("ann"))).expect_err("it is the certificate's");
    assert!(error.to_string().contains("calls this client host-a, and not ann"), "{error}");
    with.security.certificate = None;
    assert!(BlockingClient::connect(&with).is_err());
}

/// A large batch takes a slow link longer than a server waits for a sign, and no other sign comes in its midst.
#[test]
fn who_sends_slowly_is_there() {
    let silence = Duration::from_millis(700);
    unless_it_stood_still(silence / 3, || send_slowly(silence));
}

fn send_slowly(silence: Duration) -> Result<(), String> {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(ServerOptions { silence, ..options(store.path()) }).expect("starts");
    let mut stream = TcpStream::connect(server.address()).expect("connects");
    stream.set_read_timeout(Some(LIMIT)).expect("set");
    let mut heard = Vec::new();
    let mut hear = |mut stream: &TcpStream, count: usize| loop {
        let messages = read_all(&heard, 1 << 20).expect("messages");
        if messages.len() == count {
            break messages.into_iter().next_back().expect("one");
        }
        let mut some = [0; 4096];
        let got = stream.read(&mut some).expect("it answers");
        assert!(got > 0, "the connection ended");
        heard.extend_from_slice(&some[..got]);
    };
    let bytes_of = |message: Message| {
        let mut bytes = Vec::new();
        message.write(&mut bytes);
        bytes
    };
    hear(&stream, 1);
    stream.write_all(&bytes_of(Message::Hello { identity: "anonymous".to_owned(), proof: [0; 32] })).expect("sent");
    hear(&stream, 2);
    let nonce = [2; 16];
    let (name, owner, after) = ("disk".to_owned(), [1; 16], Vec::new());
    let begin = Message::BeginAfter { name, owner, nonce, epoch_min: 0, block_bytes: 1024, after };
    stream.write_all(&bytes_of(begin)).expect("sent");
    let Message::Begun { epoch } = hear(&stream, 3) else { panic!("it was not begun") };
    let take = || {
        let options = client_of(&server);
        run(async { Client::connect(&options).await.expect("connects").take_free("disk", epoch, nonce).await })
    };
    let batch = Batch { epoch, sequence: 1, tail: 1, blocks: (0..32).map(|at| block(at, 1)).collect() };
    let bytes = bytes_of(Message::Batch(batch));
    let began = Instant::now();
    for part in bytes.chunks(bytes.len() / 40) {
        stream.write_all(part).expect("sent");
        std::thread::sleep(Duration::from_millis(50));
        let Err(error) = take() else {
            return Err(format!("it was taken from its writer after {:?}", began.elapsed()));
        };
        assert!(error.is_in_use(), "after {:?}: {error}", began.elapsed());
    }
    assert!(began.elapsed() > 2 * silence, "it was fast");
    assert!(matches!(hear(&stream, 4), Message::Durable { sequence: 1 }));
    std::thread::sleep(silence);
    take().expect("nothing comes from it any more");
    Ok(())
}

/// Whether the server closes the connection, and says nothing for ever.
fn is_dropped(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(LIMIT)).expect("set");
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn bad_peers_are_dropped_and_good_ones_served_on() {
    let store = tempfile::tempdir().expect("a directory");
    let mut limits = options(store.path());
    let limit = Duration::from_millis(500);
    (limits.hello_timeout, limits.frame_timeout) = (limit, limit);
    limits.idle_timeout = Duration::from_secs(2);
    let server = Server::start(limits).expect("starts");
    let connect = || TcpStream::connect(server.address()).expect("connects");
    let send = |mut stream: &TcpStream, bytes: &[u8]| {
        let _ = stream.write_all(bytes);
    };
    let frame = |message: Message| {
        let mut bytes = Vec::new();
        message.write(&mut bytes);
        bytes
    };
    let hello = frame(Message::Hello { identity: "anonymous".to_owned(), proof: [0; 32] });

    let silent: Vec<TcpStream> = (0..70).map(|_| connect()).collect();
    assert!(silent.iter().all(is_dropped), "those that say nothing, and those too many");
    let noise = connect();
    send(&noise, &[0xa5; 100]);
    assert!(is_dropped(&noise));
    let oversized = connect();
    send(&oversized, &[0xff, 0xff, 0xff, 0x7f, 2, 1, 0, 0, 0, 0, 0, 0]);
    assert!(is_dropped(&oversized));
    let damaged = connect();
    let mut bytes = hello.clone();
    bytes[20] ^= 1;
    send(&damaged, &bytes);
    assert!(is_dropped(&damaged));
    let slow = connect();
    let started = Instant::now();
    for byte in &hello {
        send(&slow, &[*byte]);
        std::thread::sleep(Duration::from_millis(30));
    }
    assert!(is_dropped(&slow) && started.elapsed() < LIMIT);
    let out_of_turn = connect();
    send(&out_of_turn, &[hello.clone(), frame(Message::Welcome { identity: "x".to_owned() })].concat());
    assert!(is_dropped(&out_of_turn));
    let half_open = connect();
    send(&half_open, &hello);
    assert!(is_dropped(&half_open), "one that says nothing more");
    let damaged_block = connect();
    let begin =
        Message::Begin { name: "x".to_owned(), owner: [0; 16], nonce: [0; 16], epoch_min: 0, block_bytes: 1024 };
    let bad = Block { crc: 7, ..block(1, 1) };
    let batch = Message::Batch(Batch { epoch: 1, sequence: 1, tail: 1, blocks: vec![bad] });
    send(&damaged_block, &[hello, frame(begin), frame(batch)].concat());
    assert!(is_dropped(&damaged_block));
    // They are bound by the same half second.
    let mut attempts = 0;
    unless_it_stood_still(limit / 3, || {
        attempts += 1;
        let name = format!("disk-{attempts}");
        run(write(&client_of(&server), &name, 5)).map_err(|error| format!("others are not served: {error}"))
    });
    assert!(server.metrics_text().contains("connections_dropped_total"), "{}", server.metrics_text());
}

#[test]
fn a_full_server_says_so_and_a_second_one_on_its_store_is_refused() {
    let store = tempfile::tempdir().expect("a directory");
    let mut small = options(store.path());
    small.bounds.journal_bytes_max = 50_000;
    let server = Server::start(small.clone()).expect("starts");
    let error = run(write(&client_of(&server), "disk", 100)).expect_err("full");
    assert!(matches!(error, ClientError::Refused { refusal: Refusal::Full, .. }), "{error}");
    let second = Server::start(small).err().expect("refused").to_string();
    assert!(second.contains("in use"), "{second}");
}

#[test]
fn a_stopping_server_says_so() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let heard = runtime.block_on(async {
        let mut client = Client::connect(&options).await.expect("connects");
        client.begin("disk", [1; 16], [2; 16], 0, 1024, &[]).await.expect("begun");
        let (_sender, mut receiver) = client.into_pipeline();
        let hearing = tokio::spawn(async move { receiver.hear(LIMIT).await });
        tokio::task::spawn_blocking(move || server.stop()).await.expect("stopped");
        hearing.await.expect("heard")
    });
    let error = heard.expect_err("refused");
    assert!(matches!(error, ClientError::Refused { refusal: Refusal::Stopping, .. }), "{error}");
}

/// As after a server was started again: more than may be unknown at a time.
#[test]
fn a_hundred_clients_may_come_at_once() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    run(async {
        let write = |number: usize| {
            let options = options.clone();
            tokio::spawn(async move { write(&options, &format!("disk-{number}"), 2).await })
        };
        let all: Vec<_> = (0..100).map(write).collect();
        for one in all {
            one.await.expect("no panic").expect("written");
        }
    });
}

/// Silent connections, always as many as there may be: whoever can prove who he is gets in.
#[test]
fn silent_peers_do_not_keep_others_out() {
    let store = tempfile::tempdir().expect("a directory");
    let limits = options(store.path());
    let server = Server::start(limits).expect("starts");
    let silent: Vec<TcpStream> = (0..400).map(|_| TcpStream::connect(server.address()).expect("connects")).collect();
    run(write(&client_of(&server), "disk", 3)).expect("others are served");
    drop(silent);
}

/// Those who fetch and do not read: what is on its way to them is bounded, and others write.
#[test]
fn who_fetches_and_does_not_read_harms_nobody() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    let options = client_of(&server);
    let epoch = run(async {
        let mut client = Client::connect(&options).await.expect("connects");
        let epoch = client.begin("large", [1; 16], [2; 16], 0, 65536, &[]).await.expect("begun");
        let (mut sender, mut receiver) = client.into_pipeline();
        for sequence in 1..=40 {
            let blocks = (0..12).map(|at| Block::new(at, vec![sequence as u8; 65536].into())).collect();
            sender.send(vec![Batch { epoch, sequence, tail: 1, blocks }]).await.expect("sent");
        }
        let patience = Duration::from_secs(20);
        while receiver.hear(patience).await.expect("heard") != remote_journal::client::Heard::Durable(40) {}
        epoch
    });
    let mut bytes = Vec::new();
    Message::Hello { identity: "anonymous".to_owned(), proof: [0; 32] }.write(&mut bytes);
    Message::Fetch { name: "large".to_owned(), epoch, from: 1 }.write(&mut bytes);
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("read");
        statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
    };
    let before = resident();
    let deaf: Vec<TcpStream> = (0..120)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).expect("connects");
            stream.write_all(&bytes).expect("said");
            stream
        })
        .collect();
    for round in 0..10 {
        run(write(&options, &format!("disk{round}"), 20)).expect("others are served");
    }
    let more = resident().saturating_sub(before) >> 20;
    assert!(more < 300, "{more} MiB more are in memory");
    drop(deaf);
}

/// Connections of eve, who has proven who she is and said this, and reads nothing.
fn deaf_connections(server: &Server, said: &[Message]) -> Vec<TcpStream> {
    let connect = |_| {
        let mut stream = TcpStream::connect(server.address()).expect("connects");
        rustix::net::sockopt::set_socket_recv_buffer_size(&stream, 4096).expect("set");
        stream.set_write_timeout(Some(Duration::from_millis(200))).expect("set");
        let mut challenge = vec![0; FRAME_HEADER_BYTES + 32];
        stream.read_exact(&mut challenge).expect("the server begins");
        let challenges = read_all(&challenge, 1 << 10).expect("a challenge");
        let [Message::Challenge { nonce }] = challenges[..] else { panic!("{challenges:?}") };
        let mut bytes = Vec::new();
        let proof = remote_journal::security::prove("eve", b"abcdefghijklmnop1", &nonce);
        Message::Hello { identity: "eve".to_owned(), proof }.write(&mut bytes);
        said.iter().for_each(|message| message.write(&mut bytes));
        // The server may have stopped reading.
        let _ = stream.write_all(&bytes);
        stream
    };
    (0..34).map(connect).collect()
}

/// A client that takes all that it may have, and gives nothing back, keeps itself waiting: others commit, and recover.
#[test]
fn who_takes_all_room_keeps_only_itself_waiting() {
    let files = tempfile::tempdir().expect("a directory");
    let path = |name: &str| files.path().join(name);
    let (ann, eve) = ("ann 0123456789abcdef0", "eve abcdefghijklmnop1");
    for (name, text) in [("ann", ann.to_owned()), ("eve", eve.to_owned()), ("secrets", format!("{ann}\n{eve}\n"))] {
        std::fs::write(path(name), text).expect("written");
    }
    let server =
        Server::start(ServerOptions { secrets: Some(path("secrets")), ..options(&path("store")) }).expect("starts");
    let of = |who: &str| ClientOptions {
        security: ClientSecurity { insecure: true, secret: Some(path(who)), ..ClientSecurity::default() },
        ..client_of(&server)
    };
    let large = |epoch, sequence| {
        let blocks = (0..15).map(|at| Block::new(at, vec![sequence as u8; 65536].into())).collect();
        Batch { epoch, sequence, tail: 1, blocks }
    };
    let epoch = run(write(&of("ann"), "disk", 50)).expect("written");
    run(async {
        let mut client = Client::connect(&of("eve")).await.expect("connects");
        let epoch = client.begin("large", [1; 16], [2; 16], 0, 65536, &[]).await.expect("begun");
        let (mut sender, mut receiver) = client.into_pipeline();
        sender.send(vec![large(epoch, 1)]).await.expect("sent");
        receiver.hear(Duration::from_secs(20)).await.expect("durable");
    });
    let fetch = Message::Fetch { name: "large".to_owned(), epoch: 1, from: 1 };
    let others_are_served = || {
        run(write(&of("ann"), "another", 20)).expect("ann commits");
        let mut client = BlockingClient::connect(&of("ann")).expect("connects");
        let status = client.status("disk").expect("listed").expect("there");
        assert_eq!((status.epoch, status.last), (epoch, 50));
        client.fetch(&status, 1000).expect("whole");
        client.delete("another", true).expect("for the next time");
    };
    // What the kernel holds for a connection, which this does not know, and one or two more: behind three the connection itself waits.
    let deaf: Vec<_> = (1..=7).map(|count| deaf_connections(&server, &vec![fetch.clone(); count])).collect();
    // They are to have all that they can get.
    std::thread::sleep(Duration::from_secs(3));
    others_are_served();
    drop(deaf);
}

#[test]
fn metrics_are_right_before_anybody_asks() {
    let store = tempfile::tempdir().expect("a directory");
    let server = Server::start(options(store.path())).expect("starts");
    run(write(&client_of(&server), "disk", 5)).expect("written");
    server.stop();
    let server = Server::start(options(store.path())).expect("starts again");
    let deadline = Instant::now() + Duration::from_secs(20);
    while server.metrics_text().contains("amberlog_journal_server_live_bytes 0\n") {
        assert!(Instant::now() < deadline, "{}", server.metrics_text());
        std::thread::sleep(Duration::from_millis(10));
    }
}
