//! Options that say how a journal server is reached and trusted; commands that use one share them.

use clap::Args;
use remote_journal::{ClientOptions, ClientSecurity};
use serde::Deserialize;
use std::path::PathBuf;
use std::time::Duration;

/// A server that does not answer for so long is given up.
const TIMEOUT_MS: u64 = 5000;

/// HOST:PORT/NAME.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteName {
    /// HOST:PORT.
    pub address: String,
    /// The journal's name; none where a disk's name stands for it.
    pub name: Option<String>,
}

impl std::str::FromStr for RemoteName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, name) = match text.split_once('/') {
            Some((address, name)) => (address, Some(name)),
            None => (text, None),
        };
        let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(1..))) {
            return Err(format!("'{address}' is no HOST:PORT of a journal server"));
        }
        if name.is_some_and(|name| !remote_journal::message::is_name(name)) {
            return Err(format!(
                "'{}' cannot be the name of a journal: letters, digits and -_.@:+, at most 128",
                name.unwrap_or_default()
            ));
        }
        Ok(RemoteName { address: address.to_owned(), name: name.map(str::to_owned) })
    }
}

/// How a journal server is trusted, and who we are.
#[derive(Args, Clone, Debug, Deserialize)]
#[serde(try_from = "RemoteEntry")]
pub struct RemoteTrust {
    /// Certificate (PEM) of the journal server, or of the authority that signed it.
    #[arg(long, value_name = "FILE")]
    remote_ca: Option<PathBuf>,
    /// Name in the server's certificate, if it is not the host in its address.
    #[arg(long, value_name = "NAME")]
    remote_server_name: Option<String>,
    /// File with one line: IDENTITY SECRET.
    #[arg(long, value_name = "FILE")]
    remote_secret: Option<PathBuf>,
    /// Certificate (PEM) that proves who we are to the server.
    #[arg(long, value_name = "FILE", requires = "remote_key")]
    remote_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "remote_cert")]
    remote_key: Option<PathBuf>,
    /// Neither TLS nor proof of who the server is: for a network that nobody else is on.
    #[arg(long, conflicts_with = "remote_ca")]
    remote_insecure: bool,
    /// A server that does not answer for so many milliseconds is given up for storage.
    #[arg(long, value_name = "MS", default_value_t = TIMEOUT_MS, value_parser = clap::value_parser!(u64).range(100..=600_000))]
    remote_timeout: u64,
}

/// The same in a configuration file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoteEntry {
    ca: Option<PathBuf>,
    server_name: Option<String>,
    secret: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    #[serde(default)]
    insecure: bool,
    timeout_ms: Option<u64>,
}

impl TryFrom<RemoteEntry> for RemoteTrust {
    type Error = String;

    fn try_from(entry: RemoteEntry) -> Result<Self, String> {
        if entry.cert.is_some() != entry.key.is_some() {
            return Err("remote: cert and key belong together".to_owned());
        }
        if entry.insecure && entry.ca.is_some() {
            return Err("remote: insecure and ca contradict each other".to_owned());
        }
        let timeout = entry.timeout_ms.unwrap_or(TIMEOUT_MS);
        if !(100..=600_000).contains(&timeout) {
            return Err(format!("remote: timeout_ms is from 100 to 600000, not {timeout}"));
        }
        Ok(RemoteTrust {
            remote_ca: entry.ca,
            remote_server_name: entry.server_name,
            remote_secret: entry.secret,
            remote_cert: entry.cert,
            remote_key: entry.key,
            remote_insecure: entry.insecure,
            remote_timeout: timeout,
        })
    }
}

impl Default for RemoteTrust {
    fn default() -> Self {
        RemoteTrust {
            remote_ca: None,
            remote_server_name: None,
            remote_secret: None,
            remote_cert: None,
            remote_key: None,
            remote_insecure: false,
            remote_timeout: TIMEOUT_MS,
        }
    }
}

impl RemoteTrust {
    /// Whether it says how a server is to be trusted.
    ///
    /// # Errors
    /// A sentence if it does not: no journal could ever be shipped.
    pub fn check(&self) -> Result<(), String> {
        if self.remote_ca.is_none() && !self.remote_insecure {
            return Err("a journal server is reached over TLS: give --remote-ca (its certificate, or its authority's; ca in [remote]), or say \
                        --remote-insecure (insecure = true)"
                .to_owned());
        }
        Ok(())
    }

    /// For the server at this address.
    pub fn client(&self, address: &str) -> ClientOptions {
        ClientOptions {
            address: address.to_owned(),
            security: ClientSecurity {
                ca: self.remote_ca.clone(),
                server_name: self.remote_server_name.clone(),
                secret: self.remote_secret.clone(),
                certificate: self.remote_cert.clone().zip(self.remote_key.clone()),
                insecure: self.remote_insecure,
            },
            timeout: Duration::from_millis(self.remote_timeout),
        }
    }
}
