//! The journal server: many clients, one store.
//!
//! Connections are tasks; one thread has the store. A connection costs at most a frame in each direction, its share of the
//! bytes that may wait for the store, and a file descriptor; how many there are, and how many that have not proven who
//! they are, is bounded.

mod connection;
mod metrics;
mod presence;
mod store_thread;
mod unknown;

use crate::security::{self, Secrets};
use crate::store::{Directory, Medium, Store, StoreError, StoreOptions};
use connection::Shared;
use metrics::Metrics;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use store_thread::{Operation, Reopen};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use unknown::{PAUSE as UNKNOWN_PAUSE, UNKNOWN_MAX, Unknown};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 1024;
/// Bytes of batches in memory that wait for the store.
const ROOM_BYTES: usize = 64 << 20;
/// Bytes of stored batches in memory that are on their way to those who fetch them.
const FETCH_ROOM_BYTES: usize = 64 << 20;

/// How a server is run.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// ADDRESS:PORT; port 0 takes a free one.
    pub listen: String,
    /// The store's directory.
    pub store: PathBuf,
    /// How the store is bounded.
    pub bounds: StoreOptions,
    /// The server's certificate and key, in PEM.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// The authority whose clients are let in.
    pub client_ca: Option<PathBuf>,
    /// File with lines `IDENTITY SECRET`.
    pub secrets: Option<PathBuf>,
    /// Neither TLS nor proof of anything is asked for, where the above do not say so.
    pub insecure: bool,
    /// ADDRESS:PORT for Prometheus.
    pub metrics: Option<String>,
    /// For TLS and the proof.
    pub hello_timeout: Duration,
    /// For a frame once it has begun.
    pub frame_timeout: Duration,
    /// Between frames.
    pub idle_timeout: Duration,
    /// A writer of which nothing has come for so long is not there: somebody else may take its journal. Longer than [`SIGN_WITHIN`] by far.
    pub silence: Duration,
}

/// A writer says something at least so often.
pub const SIGN_WITHIN: Duration = Duration::from_secs(5);

/// See [`ServerOptions::silence`]. A sign that is lost in the network is sent again within a second or two, and once more.
const SILENCE: Duration = Duration::from_secs(15);
const _: () = assert!(SILENCE.as_secs() >= 3 * SIGN_WITHIN.as_secs());

impl ServerOptions {
    /// Usual limits; nothing says yet who is let in.
    pub fn new(listen: impl Into<String>, store: impl Into<PathBuf>) -> Self {
        ServerOptions {
            listen: listen.into(),
            store: store.into(),
            bounds: StoreOptions::default(),
            certificate: None,
            client_ca: None,
            secrets: None,
            insecure: false,
            metrics: None,
            hello_timeout: Duration::from_secs(5),
            frame_timeout: Duration::from_secs(20),
            idle_timeout: Duration::from_secs(60),
            silence: SILENCE,
        }
    }

    fn check(&self) -> io::Result<()> {
        let refuse = |reason| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        if self.insecure {
            return Ok(());
        }
        if self.certificate.is_none() {
            return refuse("a journal server speaks TLS: give --tls-cert and --tls-key, or say --insecure");
        }
        if self.client_ca.is_none() && self.secrets.is_none() {
            return refuse("clients prove who they are: give --secrets or --client-ca, or say --insecure");
        }
        Ok(())
    }
}

/// A server that runs.
pub struct Server {
    runtime: Option<tokio::runtime::Runtime>,
    store: Option<JoinHandle<()>>,
    operations: std::sync::mpsc::Sender<Operation>,
    stopping: watch::Sender<bool>,
    address: SocketAddr,
    metrics_address: Option<SocketAddr>,
    connections: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

impl Server {
    /// Opens the store and listens.
    ///
    /// # Errors
    /// When the store cannot be opened, an address cannot be had, or nothing says who is let in.
    pub fn start(options: ServerOptions) -> io::Result<Self> {
        options.check()?;
        let directory = Directory::open(&options.store).map_err(|error| {
            io::Error::new(error.kind(), format!("opening the store {}: {error}", options.store.display()))
        })?;
        let id = u32::from_le_bytes(security::random());
        let store = Store::open(directory, options.bounds, id).map_err(io::Error::other)?;
        Self::with_store(options, store)
    }

    /// Listens, with a store that is open; the one that the options name is not looked at.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn with_store<M: Medium + 'static>(options: ServerOptions, store: Store<M>) -> io::Result<Self>
    where
        M::File: 'static,
    {
        Self::serve(options, store, None)
    }

    /// Opens a store, and opens it again when it has failed: one that may be out of reach for a while.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn with_store_opened_by<M: Medium + 'static>(
        options: ServerOptions,
        mut open: impl FnMut() -> Result<Store<M>, StoreError> + Send + 'static,
    ) -> io::Result<Self>
    where
        M::File: 'static,
    {
        options.check()?;
        let store = open().map_err(io::Error::other)?;
        Self::serve(options, store, Some(Box::new(open)))
    }

    fn serve<M: Medium + 'static>(
        options: ServerOptions,
        store: Store<M>,
        reopen: Option<Reopen<M>>,
    ) -> io::Result<Self>
    where
        M::File: 'static,
    {
        options.check()?;
        let secrets = options.secrets.as_deref().map(Secrets::read).transpose()?;
        let tls = match &options.certificate {
            Some((certificate, key)) => Some(security::server_tls(certificate, key, options.client_ca.as_deref())?),
            None => None,
        };
        let (operations, receiver) = std::sync::mpsc::channel();
        let metrics = Arc::new(Metrics::default());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let bind = |address: &str| {
            runtime
                .block_on(TcpListener::bind(address))
                .map_err(|error| io::Error::new(error.kind(), format!("listening on {address}: {error}")))
        };
        let listener = bind(&options.listen)?;
        let address = listener.local_addr()?;
        let metrics_address = match &options.metrics {
            Some(address) => {
                let listener = bind(address)?;
                let address = listener.local_addr()?;
                runtime.spawn(metrics::serve(listener, Arc::clone(&metrics), metrics::PATIENCE));
                Some(address)
            }
            None => None,
        };
        let of_store = Arc::clone(&metrics);
        let store = std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || store_thread::run(store, reopen, &receiver, &of_store))?;
        let shared = Arc::new(Shared {
            tls: tls.map(tokio_rustls::TlsAcceptor::from),
            has_client_certificates: options.client_ca.is_some(),
            secrets,
            operations: operations.clone(),
            room: Arc::new(Semaphore::new(ROOM_BYTES)),
            fetch_room: Arc::new(Semaphore::new(FETCH_ROOM_BYTES)),
            log_lines: Mutex::default(),
            metrics: Arc::clone(&metrics),
            of_client: Mutex::default(),
            hello_timeout: options.hello_timeout,
            frame_timeout: options.frame_timeout,
            idle_timeout: options.idle_timeout,
            silence: options.silence,
        });
        let (stopping, stopped) = watch::channel(false);
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        runtime.spawn(accept(listener, shared, stopped, Arc::clone(&connections)));
        let runtime = Some(runtime);
        let store = Some(store);
        Ok(Server { runtime, store, operations, stopping, address, metrics_address, connections, metrics })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it tells Prometheus.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// What it tells Prometheus.
    pub fn metrics_text(&self) -> String {
        self.metrics.text()
    }

    /// Stops: no more connections, a last word to everybody, what is staged made durable, the store closed.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stopping.send_replace(true);
        if let Some(runtime) = self.runtime.take() {
            // All slots are free when all connections have ended.
            let all = Arc::clone(&self.connections);
            let _ = runtime.block_on(async {
                tokio::time::timeout(Duration::from_secs(5), all.acquire_many(CONNECTIONS_MAX as u32)).await.is_ok()
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
        let _ = self.operations.send(Operation::Stop);
        if let Some(store) = self.store.take() {
            let _ = store.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

async fn accept(
    listener: TcpListener,
    shared: Arc<Shared>,
    mut stopping: watch::Receiver<bool>,
    connections: Arc<Semaphore>,
) {
    let unknown = Unknown::with_room_for(UNKNOWN_MAX);
    loop {
        // Those too many wait in the kernel's queue until others have proven who they are or were dropped: after a server was
        // started again all of its clients come at once.
        let next = async {
            while !unknown.has_room() {
                tokio::time::sleep(UNKNOWN_PAUSE).await;
            }
            listener.accept().await
        };
        let accepted = tokio::select! {
            next = next => next,
            _ = stopping.wait_for(|stopping| *stopping) => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or the peer is gone already.
                log::warn!("a connection could not be accepted: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(slot) = Arc::clone(&connections).try_acquire_owned() else {
            shared.log_dropped(peer, &"there are too many");
            continue;
        };
        shared.metrics.connections.fetch_add(1, Ordering::Relaxed);
        shared.metrics.connections_now.fetch_add(1, Ordering::Relaxed);
        let (shared, stopping) = (Arc::clone(&shared), stopping.clone());
        let (entry, evicted) = Unknown::add(&unknown, peer.ip());
        tokio::spawn(async move {
            let ended = Arc::clone(&shared).serve(stream, stopping, evicted, move || drop(entry)).await;
            shared.log_end(peer, ended);
            shared.metrics.connections_now.fetch_sub(1, Ordering::Relaxed);
            drop(slot);
        });
    }
}
