//! What a server has done, for Prometheus: `GET` anything on the metrics address.

use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Scrapes at a time.
const SCRAPES_MAX: usize = 8;

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

/// Answers scrapes for ever.
pub(crate) async fn serve(listener: TcpListener, metrics: Arc<Metrics>) {
    let slots = Arc::new(tokio::sync::Semaphore::new(SCRAPES_MAX));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let metrics = Arc::clone(&metrics);
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(Duration::from_secs(5), metrics.scrape(stream)).await;
                    drop(slot);
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}
