//! What a server has done, for Prometheus: `GET` anything on the metrics address. Whoever comes and says nothing has to go when there is no
//! room for the next.

use super::unknown::{PAUSE, Unknown};
use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Scrapes at a time.
const SCRAPES_MAX: usize = 8;
/// How long one may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Counters and gauges.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub connections: AtomicU64,
    pub connections_now: AtomicU64,
    pub dropped: AtomicU64,
    pub unauthenticated: AtomicU64,
    pub groups: AtomicU64,
    pub batches: AtomicU64,
    pub payload_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
    pub cleaned_bytes: AtomicU64,
    pub damaged_places: AtomicU64,
    pub store_bytes: AtomicU64,
    pub live_bytes: AtomicU64,
    pub store_failed: AtomicU64,
}

impl Metrics {
    /// In Prometheus' text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, kind, help, value) in [
            ("connections_total", "counter", "Connections accepted.", &self.connections),
            ("connections", "gauge", "Connections open.", &self.connections_now),
            ("connections_dropped_total", "counter", "Connections ended for what the peer did.", &self.dropped),
            ("unauthenticated_total", "counter", "Peers that could not prove who they are.", &self.unauthenticated),
            ("groups_total", "counter", "Groups made durable, one fdatasync each.", &self.groups),
            ("batches_total", "counter", "Batches appended.", &self.batches),
            ("payload_bytes_total", "counter", "Bytes of batches appended.", &self.payload_bytes),
            ("written_bytes_total", "counter", "Bytes written to segments.", &self.written_bytes),
            ("cleaned_bytes_total", "counter", "Bytes copied by cleaning.", &self.cleaned_bytes),
            ("damaged_places", "gauge", "Damaged places found at start.", &self.damaged_places),
            ("store_bytes", "gauge", "Bytes of all segments.", &self.store_bytes),
            ("live_bytes", "gauge", "Bytes of batches that are needed.", &self.live_bytes),
            ("store_failed", "gauge", "1 when storage failed: everything is refused.", &self.store_failed),
        ] {
            let value = value.load(Ordering::Relaxed);
            let name = format!("amberlog_journal_server_{name}");
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
        }
        text
    }

    async fn scrape(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut request = [0; 4096];
        let mut len = 0;
        while !request[..len].windows(4).any(|end| end == b"\r\n\r\n") && len < request.len() {
            match stream.read(&mut request[len..]).await? {
                0 => break,
                got => len += got,
            }
        }
        let body = self.text();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await?;
        stream.shutdown().await
    }
}

/// Answers scrapes for ever, each for so long at most.
pub(crate) async fn serve(listener: TcpListener, metrics: Arc<Metrics>, patience: Duration) {
    let scrapers = Unknown::with_room_for(SCRAPES_MAX);
    loop {
        while !scrapers.has_room() {
            tokio::time::sleep(PAUSE).await;
        }
        match listener.accept().await {
            Ok((stream, peer)) => {
                let metrics = Arc::clone(&metrics);
                let (entry, evicted) = Unknown::add(&scrapers, peer.ip());
                tokio::spawn(async move {
                    tokio::select! {
                        _ = tokio::time::timeout(patience, metrics.scrape(stream)) => {}
                        _ = evicted => {}
                    }
                    drop(entry);
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They stay, and say nothing.
    #[test]
    fn those_who_say_nothing_keep_nobody_away() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("its address");
            tokio::spawn(serve(listener, Arc::default(), Duration::from_secs(3600)));
            let mut silent = Vec::new();
            for _ in 0..SCRAPES_MAX {
                silent.push(TcpStream::connect(address).await.expect("connected"));
            }
            let mut stream = TcpStream::connect(address).await.expect("connected");
            stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("asked");
            let mut answer = String::new();
            let answered = tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut answer)).await;
            answered.expect("not in an hour").expect("answered");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            // The oldest of them has gone.
            let mut oldest = silent.remove(0);
            let end = tokio::time::timeout(Duration::from_secs(20), oldest.read(&mut [0; 1])).await;
            assert!(matches!(end.expect("not in an hour"), Ok(0) | Err(_)));
        });
    }
}
