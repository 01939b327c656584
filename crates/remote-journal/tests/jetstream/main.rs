//! The store in NATS JetStream, on real clusters of three servers with `sync_interval: always`: servers are killed under
//! load, all at once, and damaged; acknowledgements are cut off; two journal servers have one stream.
//!
//! Needs `nats-server`: `scripts/fetch-nats-server.sh` builds it. Where it is not there the tests say so, and fail in CI.

mod cluster;

use cluster::{Cluster, LIMIT};
use remote_journal::client::Heard;
use remote_journal::jetstream::JetStream;
use remote_journal::message::{Batch, Block};
use remote_journal::store::{Medium, SegmentFile, Store, StoreError, StoreOptions};
use remote_journal::{BlockingClient, Client, ClientError, ClientOptions, ClientSecurity, Server, ServerOptions};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SMALL: StoreOptions =
    StoreOptions { segment_bytes: 512 << 10, space_bytes_max: 64 << 20, journal_bytes_max: 16 << 20 };
const NAME: &str = "me/disk";
/// Batches that a writer still needs.
const KEPT: u64 = 40;

fn open(cluster: &Cluster) -> Store<JetStream> {
    let started = Instant::now();
    let stream = JetStream::open(cluster.options(SMALL.space_bytes_max)).expect("a stream");
    let store = Store::open(stream, SMALL, 9).expect("a store");
    eprintln!("opened in {:?}", started.elapsed());
    store
}

fn begin(store: &mut Store<JetStream>) -> (u32, u64) {
    let begun = store.begin(NAME, [1; 16], [2; 16], 0, 1024).expect("begun");
    store.commit().expect("durable");
    begun
}

/// What a batch holds: no other batch's content has any eight bytes in common with it.
fn payload(epoch: u64, sequence: u64) -> Vec<u8> {
    let seed = sequence << 24 | epoch << 56;
    (0..2_500u64).flat_map(|index| (seed | index).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

/// Appends one batch and makes it durable.
fn append(store: &mut Store<JetStream>, (journal, epoch): (u32, u64), sequence: u64) -> Result<(), StoreError> {
    let tail = sequence.saturating_sub(KEPT).max(1);
    store.append(journal, epoch, sequence, tail, &payload(epoch, sequence))?;
    store.commit()
}

/// Everything acknowledged is there, as it was, without a gap.
#[track_caller]
fn assert_all_there(store: &mut Store<JetStream>, epoch: u64, acknowledged: u64) {
    let info = store.info(NAME).expect("there");
    assert!(info.epoch == epoch && info.last >= acknowledged, "{info:?}, {acknowledged} were acknowledged");
    assert!(info.tail <= acknowledged.saturating_sub(KEPT).max(1) + 1, "{info:?}");
    for sequence in info.tail..=info.last {
        let batch = store.fetch(NAME, epoch, sequence).expect("whole").expect("there");
        assert!(batch == payload(epoch, sequence), "batch {sequence}");
    }
    assert!(store.fetch(NAME, epoch, info.last + 1).expect("whole").is_none());
}

/// Appends batch after batch, and cleans, until it is told to stop, or refused.
struct Writer {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    thread: JoinHandle<(Store<JetStream>, Result<(), StoreError>)>,
}

impl Writer {
    fn start(mut store: Store<JetStream>, begun: (u32, u64), acknowledged: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(acknowledged));
        let (stop_it, count) = (Arc::clone(&stop), Arc::clone(&acknowledged));
        let thread = std::thread::spawn(move || {
            let mut write = || {
                while !stop_it.load(Ordering::Relaxed) {
                    let sequence = count.load(Ordering::Relaxed) + 1;
                    append(&mut store, begun, sequence)?;
                    count.store(sequence, Ordering::Relaxed);
                    store.clean()?;
                }
                Ok(())
            };
            let written = write();
            (store, written)
        });
        Writer { stop, acknowledged, thread }
    }

    /// Waits until so many more are acknowledged.
    #[track_caller]
    fn wait_for(&self, more: u64) {
        let wanted = self.acknowledged.load(Ordering::Relaxed) + more;
        let deadline = Instant::now() + LIMIT;
        while self.acknowledged.load(Ordering::Relaxed) < wanted && !self.thread.is_finished() {
            assert!(Instant::now() < deadline, "nothing is acknowledged");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The store, the last batch that was acknowledged, and how it ended.
    fn stop(self) -> (Store<JetStream>, u64, Result<(), StoreError>) {
        self.stop.store(true, Ordering::Relaxed);
        let (store, written) = self.thread.join().expect("no panic");
        (store, self.acknowledged.load(Ordering::Relaxed), written)
    }
}

/// At once, as they wait most of the time, for the servers' elections.
#[test]
fn on_clusters_of_three_servers() {
    let scenarios: [(&str, fn()); 4] = [
        ("kills", nothing_acknowledged_is_lost_when_servers_are_killed),
        ("flipped bit", a_flipped_bit_is_read_around),
        ("store", a_store_in_a_stream_is_a_store),
        ("fencing", the_server_that_opened_last_has_the_stream),
    ];
    std::thread::scope(|scope| {
        for (name, scenario) in scenarios {
            let timed = move || {
                let started = Instant::now();
                scenario();
                eprintln!("{name}: {:?}", started.elapsed());
            };
            std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, timed).expect("a thread");
        }
    });
}

fn a_store_in_a_stream_is_a_store() {
    let Some(cluster) = Cluster::start(3, "") else { return };
    let mut store = open(&cluster);
    let begun = begin(&mut store);
    // Beside it one that needs all that it writes, so that segments are cleaned before they are removed.
    let slow = store.begin("me/slow", [3; 16], [4; 16], 0, 1024).expect("begun");
    for sequence in 1..=300 {
        append(&mut store, begun, sequence).expect("durable");
        if sequence % 25 == 0 {
            store.append(slow.0, slow.1, sequence / 25, 1, &payload(slow.1, sequence)).expect("staged");
        }
        store.clean().expect("cleaned");
    }
    let (bytes, last, _) = cluster.state();
    assert!(last > 300 && bytes < 6 << 20, "{bytes} bytes in the stream");
    assert!(store.counters().payload_bytes > 5 << 20 && store.counters().cleaned_bytes > 0, "{:?}", store.counters());
    // A group of several messages; and another journal, that is deleted again.
    let large = vec![7; 1 << 20];
    let (other, epoch) = store.begin("me/other", [3; 16], [4; 16], 0, 1024).expect("begun");
    for sequence in 1..=3 {
        store.append(other, epoch, sequence, 1, &large).expect("staged");
    }
    store.commit().expect("durable");
    drop(store);
    let mut store = open(&cluster);
    assert_eq!(store.counters().damaged_places, 0);
    assert_all_there(&mut store, begun.1, 300);
    for sequence in 1..=12 {
        let batch = store.fetch("me/slow", slow.1, sequence).expect("whole").expect("there");
        assert!(batch == payload(slow.1, sequence * 25), "batch {sequence}");
    }
    for sequence in 1..=3 {
        assert!(store.fetch("me/other", epoch, sequence).expect("whole").expect("there") == large);
    }
    store.delete("me/other", true).expect("deleted");
    store.commit().expect("durable");
    for sequence in 301..=320 {
        append(&mut store, begun, sequence).expect("goes on");
    }
    drop(store);
    let mut store = open(&cluster);
    assert!(store.info("me/other").is_err());
    assert_all_there(&mut store, begun.1, 320);
}

/// Servers that open one stream at once, each writing as fast as it can once it has it: all get it, one after the other, the
/// last one keeps it, and what any of them was acknowledged is there.
#[test]
fn servers_that_open_a_stream_at_once_have_it_one_after_the_other() {
    let Some(cluster) = Cluster::start(1, "") else { return };
    let begun = begin(&mut open(&cluster));
    let open_and_write = || {
        let mut store = open(&cluster);
        let mut acknowledged = 0;
        for _ in 0..150 {
            let next = store.info(NAME).expect("there").last + 1;
            let written = append(&mut store, begun, next).and_then(|()| {
                acknowledged = next;
                store.clean()
            });
            if let Err(error) = written {
                assert!(error.to_string().contains("another journal server"), "{error}");
                return (acknowledged, false);
            }
        }
        (acknowledged, true)
    };
    let ended: Vec<(u64, bool)> = std::thread::scope(|scope| {
        let writing: Vec<_> = (0..4).map(|_| scope.spawn(open_and_write)).collect();
        writing.into_iter().map(|thread| thread.join().expect("opened")).collect()
    });
    assert!(ended.iter().any(|(_, has_it)| *has_it), "{ended:?}");
    let acknowledged = ended.iter().map(|(last, _)| *last).max().unwrap_or(0);
    assert_all_there(&mut open(&cluster), begun.1, acknowledged);
}

/// Whoever publishes one message after the other, and neither cleans nor begins a segment in between, is fenced off as well:
/// there is no moment at which the stream stands still by itself.
#[test]
fn a_server_that_never_pauses_is_fenced_off() {
    const WIDE: StoreOptions = StoreOptions { segment_bytes: 48 << 20, ..SMALL };
    let Some(cluster) = Cluster::start(1, "") else { return };
    let mut options = cluster.options(WIDE.space_bytes_max);
    // A writer and who opens beside it wait for each other: not on a machine that stands still for a moment.
    options.patience = Duration::from_secs(30);
    let stream = || JetStream::open(options.clone());
    let mut store = Store::open(stream().expect("a stream"), WIDE, 9).expect("a store");
    let (journal, epoch) = begin(&mut store);
    let acknowledged = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&acknowledged);
    let writer = std::thread::spawn(move || {
        for sequence in 1.. {
            if let Err(error) = store.append(journal, epoch, sequence, sequence, b"small").and_then(|()| store.commit())
            {
                return error.to_string();
            }
            count.store(sequence, Ordering::Relaxed);
        }
        unreachable!("a batch for every number")
    });
    let deadline = Instant::now() + LIMIT;
    while acknowledged.load(Ordering::Relaxed) < 100 {
        assert!(Instant::now() < deadline && !writer.is_finished(), "nothing is acknowledged");
        std::thread::sleep(Duration::from_millis(1));
    }
    let second = stream().expect("opened beside it");
    let error = writer.join().expect("no panic");
    assert!(error.contains("another journal server"), "{error}");
    let second = Store::open(second, WIDE, 9).expect("a store");
    let last = second.info(NAME).expect("there").last;
    assert!(last >= acknowledged.load(Ordering::Relaxed), "{last}, {acknowledged:?} were acknowledged");
}

fn the_server_that_opened_last_has_the_stream() {
    let Some(cluster) = Cluster::start(3, "") else { return };
    let mut idle = open(&cluster);
    let mut store = open(&cluster);
    let begun = begin(&mut store);
    // The first writes all the time; the second opens none the less.
    let writer = Writer::start(store, begun, 0);
    writer.wait_for(20);
    let mut second = open(&cluster);
    let (mut first, acknowledged, written) = writer.stop();
    let error = written.or_else(|_| append(&mut first, begun, acknowledged + 1)).expect_err("fenced").to_string();
    assert!(error.contains("another journal server"), "{error}");
    assert_all_there(&mut second, begun.1, acknowledged);
    let last = second.info(NAME).expect("there").last;
    append(&mut second, begun, last + 1).expect("durable");
    // Nor can it do anything else, ever.
    assert!(
        append(&mut first, begun, acknowledged + 1).is_err() && first.begin(NAME, [1; 16], [9; 16], 0, 1024).is_err()
    );
    // Nor can one that has not noticed until what fenced it off was removed.
    let error =
        idle.begin(NAME, [1; 16], [9; 16], 0, 1024).and_then(|_| idle.commit()).expect_err("fenced").to_string();
    assert!(error.contains("another journal server"), "{error}");
    // A journal's older epoch is refused as in any store.
    let again = begin(&mut second);
    let error = append(&mut second, begun, last + 2).expect_err("an older epoch");
    assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
    append(&mut second, again, 1).expect("durable");
}

/// Kills these under load, one after the other, each when the one before is back; then all of them, twice.
fn kill_under_load(victims: &[Victim]) {
    let Some(mut cluster) = Cluster::start(3, "") else { return };
    let mut store = open(&cluster);
    let begun = begin(&mut store);
    let writer = Writer::start(store, begun, 0);
    writer.wait_for(60);
    for victim in victims {
        let leader = cluster.leader();
        let victim = if *victim == Victim::Leader { leader } else { (leader + 1) % 3 };
        cluster.kill_node(victim);
        writer.wait_for(60);
        cluster.start_node(victim);
        cluster.wait_until_current();
        writer.wait_for(20);
    }
    (0..3).for_each(|node| cluster.kill_node(node));
    std::thread::sleep(Duration::from_millis(300));
    (0..3).for_each(|node| cluster.start_node(node));
    writer.wait_for(20);
    let (mut store, acknowledged, written) = writer.stop();
    written.expect("never refused");
    assert_all_there(&mut store, begun.1, acknowledged);
    drop(store);
    // And again, with nobody there.
    (0..3).for_each(|node| cluster.kill_node(node));
    (0..3).for_each(|node| cluster.start_node(node));
    let mut store = open(&cluster);
    assert_all_there(&mut store, begun.1, acknowledged);
    append(&mut store, begun, acknowledged + 1).expect("durable");
    if victims.len() > 1 {
        // Two of three are enough to open it.
        drop(store);
        cluster.wait_until_current();
        cluster.kill_node((cluster.leader() + 1) % 3);
        let mut store = open(&cluster);
        assert_all_there(&mut store, begun.1, acknowledged + 1);
        append(&mut store, begun, acknowledged + 2).expect("durable");
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    Leader,
    Follower,
}

fn nothing_acknowledged_is_lost_when_servers_are_killed() {
    kill_under_load(&[Victim::Leader]);
}

#[test]
#[ignore = "takes a minute: make crash"]
fn nothing_acknowledged_is_lost_when_servers_are_killed_one_after_the_other() {
    kill_under_load(&[Victim::Follower, Victim::Leader, Victim::Leader, Victim::Follower, Victim::Leader]);
}

/// A cluster, and a store with 30 batches.
fn thirty() -> Option<(Cluster, Store<JetStream>, (u32, u64))> {
    let cluster = Cluster::start(3, "")?;
    let mut store = open(&cluster);
    let begun = begin(&mut store);
    for sequence in 1..=30 {
        append(&mut store, begun, sequence).expect("durable");
    }
    cluster.wait_until_current();
    Some((cluster, store, begun))
}

fn a_flipped_bit_is_read_around() {
    let Some((mut cluster, mut store, begun)) = thirty() else { return };
    // On a server that followed and now leads, in the middle; it does not know.
    let victim = (cluster.leader() + 1) % 3;
    cluster.stop_node(victim);
    assert!(cluster.flip_bit(victim, &payload(begun.1, 15)[..64], 1000));
    cluster.start_node(victim);
    cluster.wait_until_current();
    cluster.lead(victim);
    assert_all_there(&mut store, begun.1, 30);
    cluster.lead(victim);
    store = open(&cluster);
    assert_all_there(&mut store, begun.1, 30);
    append(&mut store, begun, 31).expect("goes on");
}

#[test]
#[ignore = "takes half a minute: make crash"]
fn a_server_that_takes_a_flipped_bit_for_a_torn_end_is_not_believed() {
    let Some((mut cluster, mut store, begun)) = thirty() else { return };
    for damaged in [15, 30] {
        // It was killed: the next time it cuts off what is behind the damage, and may come to lead without it.
        let victim = (cluster.leader() + 1) % 3;
        cluster.kill_node(victim);
        if !cluster.flip_bit(victim, &payload(begun.1, damaged)[..64], 1000) {
            eprintln!("n{victim} has not got back batch {damaged}");
        }
        cluster.start_node(victim);
        cluster.prefer(victim);
        store = open(&cluster);
        assert_all_there(&mut store, begun.1, 30);
        cluster.wait_until_current();
    }
    append(&mut store, begun, 31).expect("goes on");
}

#[test]
#[ignore = "takes half a minute: make crash"]
fn what_is_lost_on_all_servers_is_refused() {
    let Some((mut cluster, store, begun)) = thirty() else { return };
    drop(store);
    for node in 0..3 {
        cluster.stop_node(node);
        assert!(cluster.flip_bit(node, &payload(begun.1, 20)[..64], 1000));
    }
    (0..3).for_each(|node| cluster.start_node(node));
    let error = JetStream::open(cluster.options(SMALL.space_bytes_max)).err().expect("refused").to_string();
    assert!(error.contains("gap") && error.contains("cannot be read from any of n0, n1, n2"), "{error}");
}

/// Passes bytes on; cuts connections off when it has seen so many publishings since the last cut, before they are answered.
struct Proxy {
    address: String,
    cuts: Arc<AtomicU64>,
}

impl Proxy {
    fn start(to: String, publishings: u64, cuts_max: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("bound").to_string();
        let cuts = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&cuts);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(&to) else { continue };
                let (mut up, mut down) = (server.try_clone().expect("cloned"), client.try_clone().expect("cloned"));
                std::thread::spawn(move || std::io::copy(&mut &server, &mut down).ok());
                let count = Arc::clone(&count);
                std::thread::spawn(move || {
                    let mut client = client;
                    let (mut seen, mut buffer) = (0, vec![0; 1 << 16]);
                    while let Ok(len @ 1..) = client.read(&mut buffer) {
                        seen += buffer[..len].windows(12).filter(|bytes| *bytes == b"HPUB LOG.seg").count() as u64;
                        let is_cut = seen >= publishings && count.load(Ordering::Relaxed) < cuts_max;
                        if is_cut {
                            // The client hears nothing of what is passed on now.
                            let _ = client.shutdown(Shutdown::Both);
                        }
                        if up.write_all(&buffer[..len]).is_err() || is_cut {
                            count.fetch_add(u64::from(is_cut), Ordering::Relaxed);
                            break;
                        }
                    }
                    // What was passed on is read there before the end of it.
                    let _ = up.shutdown(Shutdown::Write);
                });
            }
        });
        Proxy { address, cuts }
    }
}

#[test]
fn a_message_whose_acknowledgement_is_lost_is_there_once() {
    const CUTS: u64 = 3;
    let Some(cluster) = Cluster::start(1, "") else { return };
    let mut through = cluster.options(SMALL.space_bytes_max);
    drop(JetStream::open(through.clone()).expect("a stream"));
    let proxy = Proxy::start(cluster.server(), 7, CUTS);
    through.address.servers = vec![proxy.address.clone()];
    let stream = JetStream::open(through).expect("through the proxy");
    let mut store = Store::open(stream, SMALL, 9).expect("a store");
    let begun = begin(&mut store);
    let mut acknowledged = 0;
    while proxy.cuts.load(Ordering::Relaxed) < CUTS || acknowledged < 50 {
        append(&mut store, begun, acknowledged + 1).expect("durable");
        acknowledged += 1;
        assert!(acknowledged < 65, "nothing was cut off, or a segment may have been removed");
    }
    assert_all_there(&mut store, begun.1, acknowledged);
    // Each batch is one message, the first opening one, the second one and a fence, the segment and the journal one: none
    // is there twice.
    let last = cluster.ask(async |context| {
        context.get_stream(cluster::STREAM).await.expect("there").cached_info().state.last_sequence
    });
    let segments = store.counters().groups - acknowledged - 1;
    assert_eq!(last, 3 + store.counters().groups, "{segments} segments");
    drop(store);
    let mut store = open(&cluster);
    assert_all_there(&mut store, begun.1, acknowledged);
}

#[test]
fn who_may_not_get_in_is_told_so() {
    let directory = tempfile::tempdir().expect("a directory");
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).expect("parameters");
    let certificate = params.self_signed(&key).expect("a certificate");
    let (certificate_file, key_file) = (directory.path().join("server.pem"), directory.path().join("server.key"));
    std::fs::write(&certificate_file, certificate.pem()).expect("written");
    std::fs::write(&key_file, key.serialize_pem()).expect("written");
    let more = format!(
        "tls {{ cert_file: \"{}\", key_file: \"{}\" }}\nauthorization {{ user: me, password: secret }}\n",
        certificate_file.display(),
        key_file.display()
    );
    let Some(cluster) = Cluster::start(1, &more) else { return };
    // The certificate is for this name, and the server listens elsewhere: by way of a proxy.
    let proxy = Proxy::start(cluster.server(), u64::MAX, 0);
    let port = proxy.address.rsplit_once(':').expect("a port").1;
    let mut options = cluster.options(SMALL.space_bytes_max);
    options.address = format!("tls://me:secret@localhost:{port}/LOG").parse().expect("an address");
    options.ca = Some(certificate_file);
    let store = JetStream::open(options.clone()).map(|stream| Store::open(stream, SMALL, 9));
    begin(&mut store.expect("let in").expect("a store"));
    // An attempt that comes to nothing in time says nothing of who asks.
    options.patience = Duration::from_secs(15);
    let mut wrong = options.clone();
    wrong.address.user = Some(("me".to_owned(), "guess".to_owned()));
    let error = JetStream::open(wrong).err().expect("refused").to_string();
    assert!(error.to_lowercase().contains("auth") && !error.contains("guess"), "{error}");
    options.ca = None;
    let error = JetStream::open(options).err().expect("refused").to_string();
    assert!(error.contains("localhost"), "{error}");
}

/// A segment whose messages lie between those of another one is removed: more gaps than one message can name, and they are all known
/// again to whoever opens the stream next.
#[test]
fn a_stream_with_many_gaps_is_opened_again() {
    const COUNT: u64 = 33_000;
    // What is tested is not the disk.
    let Some(cluster) = Cluster::start_in(std::path::Path::new("/dev/shm"), 1, "") else { return };
    let options = cluster.options(SMALL.space_bytes_max);
    let content = |segment: u64, number: u64| [segment, number].map(u64::to_le_bytes).concat();
    let mut stream = JetStream::open(options.clone()).expect("a stream");
    let mut segments = [1, 2].map(|segment| stream.create(segment, 1 << 20).expect("made"));
    for number in 0..COUNT {
        for (segment, file) in (1..).zip(&mut segments) {
            file.write_at(number * 16, &content(segment, number)).expect("written");
        }
    }
    drop(segments);
    stream.delete(2).expect("removed");
    // What names the gaps is written anew each time.
    stream.create(3, 1 << 20).expect("made").write_at(0, &content(3, 0)).expect("written");
    stream.delete(3).expect("removed");
    drop(stream);
    for _ in 0..2 {
        let stream = JetStream::open(options.clone()).expect("it is opened again");
        assert_eq!(stream.list().expect("listed"), [1]);
        let file = stream.open(1).expect("there");
        assert_eq!(file.len().expect("known"), COUNT * 16);
        for number in [0, 1, COUNT / 2, COUNT - 1] {
            let mut found = [0; 16];
            file.read_at(number * 16, &mut found).expect("read");
            assert_eq!(found[..], content(1, number));
        }
    }
}

#[test]
fn a_journal_server_goes_on_when_its_stream_is_back() {
    let Some(mut cluster) = Cluster::start(1, "") else { return };
    let mut stream = cluster.options(SMALL.space_bytes_max);
    // It was just started; from then on it is to be said soon that it is gone.
    drop(JetStream::open(stream.clone()).expect("it is there"));
    stream.patience = Duration::from_secs(5);
    let mut options = ServerOptions::new("127.0.0.1:0", "");
    options.insecure = true;
    let server = Server::with_store_opened_by(options, move || {
        let opened = JetStream::open(stream.clone()).map_err(|error| StoreError::Failed(error.to_string()))?;
        stream.patience = Duration::from_secs(2);
        Store::open(opened, SMALL, 9)
    })
    .expect("starts");
    let client = ClientOptions {
        address: server.address().to_string(),
        security: ClientSecurity { insecure: true, ..ClientSecurity::default() },
        timeout: LIMIT,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    // Begins a journal; gives its epoch when a batch is durable.
    let write = || {
        runtime.block_on(async {
            let mut client = Client::connect(&client).await?;
            let epoch = client.begin("disk", [1; 16], [2; 16], 0, 1024, &[[2; 16]]).await?;
            let (mut sender, mut receiver) = client.into_pipeline();
            let blocks = vec![Block::new(5, vec![7; 1024].into())];
            sender.send(vec![Batch { epoch, sequence: 1, tail: 1, blocks }]).await?;
            while !matches!(receiver.hear(LIMIT).await?, Heard::Durable(1)) {}
            Ok::<u64, ClientError>(epoch)
        })
    };
    let epoch = write().expect("durable");
    cluster.kill_node(0);
    let error = write().expect_err("there is no stream").to_string();
    assert!(error.contains("storage failed"), "{error}");
    cluster.start_node(0);
    let deadline = Instant::now() + LIMIT;
    let next = loop {
        match write() {
            Ok(next) => break next,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    assert!(next > epoch);
    // Listed, read and deleted as in any store.
    let mut asking = BlockingClient::connect(&client).expect("connects");
    let status = asking.status("disk").expect("listed").expect("there");
    assert_eq!((status.epoch, status.last, status.is_live), (next, 1, true));
    assert_eq!(asking.fetch(&status, 10).expect("whole").blocks[&5][..], [7; 1024]);
    asking.delete("disk", true).expect("deleted");
    assert_eq!(asking.status("disk").expect("listed"), None);
}
