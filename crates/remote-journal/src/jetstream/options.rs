//! Where a stream is, and how one gets in.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The stream's name where the address has none.
const STREAM: &str = "AMBERLOG";

/// `nats://[USER:PASSWORD@]HOST:PORT[,HOST:PORT]...[/STREAM]`; `tls://` asks for TLS.
#[derive(Clone, PartialEq, Eq)]
pub struct NatsAddress {
    /// HOST:PORT of every server that is known.
    pub servers: Vec<String>,
    /// User and password.
    pub user: Option<(String, String)>,
    /// The stream.
    pub stream: String,
    /// Whether a connection without TLS is refused.
    pub needs_tls: bool,
}

impl NatsAddress {
    /// Whether this names a stream, and no directory.
    pub fn is_one(store: &str) -> bool {
        ["nats://", "tls://"].iter().any(|scheme| store.starts_with(scheme))
    }
}

/// Without the password, which does not belong into logs.
impl fmt::Display for NatsAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.needs_tls { "tls" } else { "nats" };
        write!(out, "{scheme}://{}/{}", self.servers.join(","), self.stream)
    }
}

impl fmt::Debug for NatsAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl FromStr for NatsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rest, needs_tls) = match (text.strip_prefix("nats://"), text.strip_prefix("tls://")) {
            (Some(rest), _) => (rest, false),
            (None, Some(rest)) => (rest, true),
            (None, None) => return Err("it does not begin with nats:// or tls://".to_owned()),
        };
        let (rest, stream) = rest.split_once('/').unwrap_or((rest, STREAM));
        // What JetStream takes as a name and a file system as a directory's.
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if stream.is_empty() || stream.len() > 64 || !stream.bytes().all(is_name) {
            return Err(format!("{stream:?} is no name of a stream: letters, digits, - and _, at most 64"));
        }
        let (user, rest) = match rest.rsplit_once('@') {
            None => (None, rest),
            Some((user, rest)) => {
                let (user, password) = user.split_once(':').ok_or("before the @ there is no USER:PASSWORD")?;
                (Some((user.to_owned(), password.to_owned())), rest)
            }
        };
        let servers: Vec<String> = rest.split(',').map(str::to_owned).collect();
        for server in &servers {
            let port = server.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            if port.and_then(|(_, port)| port.parse::<u16>().ok()).is_none() {
                return Err(format!("{server:?} is no HOST:PORT"));
            }
        }
        Ok(NatsAddress { servers, user, stream: stream.to_owned(), needs_tls })
    }
}

/// How a stream is opened.
#[derive(Clone, Debug)]
pub struct NatsOptions {
    /// Where it is.
    pub address: NatsAddress,
    /// Replicas that it has to have, from 1 to 5.
    pub replicas: usize,
    /// Bytes of segments that it has to have room for.
    pub space_bytes: u64,
    /// Credentials file, as `nsc` writes it (a JWT and its seed).
    pub credentials: Option<PathBuf>,
    /// Authority of the NATS servers' certificates, in PEM; otherwise those that the system trusts.
    pub ca: Option<PathBuf>,
    /// Our certificate and its key, in PEM.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// How long a stream that does not answer, or has no leader, is waited for.
    pub patience: Duration,
}

impl NatsOptions {
    /// Three replicas, nothing to prove who we are but what the address says.
    pub fn new(address: NatsAddress, space_bytes: u64) -> Self {
        NatsOptions {
            address,
            replicas: 3,
            space_bytes,
            credentials: None,
            ca: None,
            certificate: None,
            patience: Duration::from_secs(30),
        }
    }

    /// What the client library is told.
    pub(super) async fn connect_options(&self) -> io::Result<async_nats::ConnectOptions> {
        let mut options = async_nats::ConnectOptions::new()
            .name("amberlog journal-server")
            // A server whose machine has died says nothing; two pings without an answer end the connection.
            .ping_interval(Duration::from_secs(2))
            .connection_timeout(Duration::from_secs(3))
            .request_timeout(Some(super::ANSWER))
            .reconnect_delay_callback(|attempts| Duration::from_millis(50 * attempts.min(10) as u64))
            .event_callback(|event| async move {
                match event {
                    async_nats::Event::Connected | async_nats::Event::Closed => log::info!("NATS: {event}"),
                    _ => log::warn!("NATS: {event}"),
                }
            })
            .require_tls(self.address.needs_tls || self.ca.is_some() || self.certificate.is_some());
        if let Some((user, password)) = &self.address.user {
            options = options.user_and_password(user.clone(), password.clone());
        }
        if let Some(ca) = &self.ca {
            options = options.add_root_certificates(ca.clone());
        }
        if let Some((certificate, key)) = &self.certificate {
            options = options.add_client_certificate(certificate.clone(), key.clone());
        }
        if let Some(path) = &self.credentials {
            options = options.credentials_file(path).await.map_err(|error| {
                io::Error::new(error.kind(), format!("reading the NATS credentials {}: {error}", path.display()))
            })?;
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let address: NatsAddress = "nats://me:sec@ret@a:1,b:2,[::1]:3/LOG".parse().expect("an address");
        assert_eq!(address.servers, ["a:1", "b:2", "[::1]:3"]);
        assert_eq!((address.user.clone(), address.stream.as_str()), (Some(("me".into(), "sec@ret".into())), "LOG"));
        assert!(!format!("{address} {address:?}").contains("sec"), "{address}");
        let address: NatsAddress = "tls://a:4222".parse().expect("an address");
        assert_eq!((address.stream.as_str(), address.needs_tls), ("AMBERLOG", true));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for wrong in [
            "http://a:1",
            "nats://a",
            "nats://",
            "nats://:1",
            "nats://a:1/",
            "nats://a:1/x.y",
            "nats://a:1/*",
            "nats://a:1/x/y",
            "nats://me@a:1",
            "nats://a:1,b",
            "nats://a:99999",
        ] {
            assert!(wrong.parse::<NatsAddress>().is_err(), "{wrong}");
        }
    }
}
