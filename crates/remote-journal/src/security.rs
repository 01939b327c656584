//! Who is who: TLS, shared secrets, client certificates.
//!
//! The server proves itself by its certificate, the client by a secret (an HMAC-SHA-256 over a challenge, inside TLS) or
//! by a certificate of its own, whose first DNS name is its identity. Journals belong to identities: a client names only
//! its own. Without TLS nothing is proven or secret; both sides have to be told so explicitly.
//!
//! What must never happen: that who shows a secret is served under another name than its own. The journals of that name would not be
//! there, which is no loss of any, and new ones would be kept where nobody looks for them. So a server that knows secrets refuses a wrong
//! one, whatever the certificate beside it says, and a client gives up a server that calls it something else.

use ring::hmac;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What clients are called where nothing is proven.
pub const ANONYMOUS: &str = "anonymous";
/// What a client without a secret says where others prove who they are.
pub const NO_PROOF: [u8; 32] = [0; 32];
/// A secret is at least this long, in bytes.
const SECRET_BYTES_MIN: usize = 16;

fn invalid(path: &Path, what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()))
}

fn read(path: &Path) -> io::Result<String> {
    std::fs::read_to_string(path).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Clients and their secrets.
#[derive(Clone, Default)]
pub struct Secrets(HashMap<String, Vec<u8>>);

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Secrets").field(&self.0.len()).finish()
    }
}

impl Secrets {
    /// Reads a file of lines `IDENTITY SECRET`; `#` begins a comment line.
    ///
    /// # Errors
    /// When it cannot be read, or a line is not of that form.
    pub fn read(path: &Path) -> io::Result<Self> {
        let mut secrets = HashMap::new();
        for (number, line) in read(path)?.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let at = number + 1;
            let (identity, secret) = line
                .split_once(char::is_whitespace)
                .ok_or_else(|| invalid(path, format!("line {at} has no secret")))?;
            let secret = secret.trim().as_bytes().to_vec();
            if !crate::message::is_name(identity) || secret.len() < SECRET_BYTES_MIN {
                return Err(invalid(
                    path,
                    format!(
                        "line {at}: an identity is letters, digits and -_.@:+, a secret at least {SECRET_BYTES_MIN} bytes"
                    ),
                ));
            }
            if secrets.insert(identity.to_owned(), secret).is_some() {
                return Err(invalid(path, format!("line {at}: {identity} has a secret already")));
            }
        }
        Ok(Secrets(secrets))
    }

    /// The only entry, of a client's file.
    ///
    /// # Errors
    /// When there is not exactly one.
    pub fn single(self, path: &Path) -> io::Result<(String, Vec<u8>)> {
        let mut entries = self.0.into_iter();
        match (entries.next(), entries.next()) {
            (Some(entry), None) => Ok(entry),
            _ => Err(invalid(path, "a client's file has exactly one line: IDENTITY SECRET")),
        }
    }

    /// Whether the proof is this identity's.
    pub fn verify(&self, identity: &str, nonce: &[u8; 32], proof: &[u8; 32]) -> bool {
        // An unknown identity takes as long as a wrong secret.
        let secret = self.0.get(identity).map_or(&[0; SECRET_BYTES_MIN][..], Vec::as_slice);
        let is_right =
            hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, secret), &signed(identity, nonce), proof).is_ok();
        is_right && self.0.contains_key(identity)
    }
}

fn signed(identity: &str, nonce: &[u8; 32]) -> Vec<u8> {
    [b"amberlog remote journal 1\0".as_slice(), nonce, identity.as_bytes()].concat()
}

/// Proves an identity to a server.
pub fn prove(identity: &str, secret: &[u8], nonce: &[u8; 32]) -> [u8; 32] {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), &signed(identity, nonce));
    let mut proof = [0; 32];
    proof.copy_from_slice(tag.as_ref());
    proof
}

/// Random bytes.
///
/// # Panics
/// When the kernel has none, which cannot be worked with.
pub fn random<const N: usize>() -> [u8; N] {
    use ring::rand::SecureRandom;
    let mut bytes = [0; N];
    ring::rand::SystemRandom::new().fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(read(path)?.as_bytes()).collect();
    let chain = chain.map_err(|error| invalid(path, error))?;
    if chain.is_empty() { Err(invalid(path, "there is no certificate in it")) } else { Ok(chain) }
}

fn key(path: &Path) -> io::Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(read(path)?.as_bytes()).map_err(|error| invalid(path, error))
}

fn roots(path: &Path) -> io::Result<Arc<rustls::RootCertStore>> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| invalid(path, error))?;
    }
    Ok(Arc::new(roots))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A server's TLS. `client_ca`: clients need a certificate of this authority.
///
/// # Errors
/// When a file cannot be read or does not fit.
pub fn server_tls(
    certificate: &Path,
    private_key: &Path,
    client_ca: Option<&Path>,
) -> io::Result<Arc<rustls::ServerConfig>> {
    let builder = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(roots(path)?, provider())
                .build()
                .map_err(|error| invalid(path, error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder
        .with_single_cert(certificates(certificate)?, key(private_key)?)
        .map_err(|error| invalid(certificate, error))?;
    Ok(Arc::new(config))
}

/// The identity in a client's certificate, which TLS has verified: its first DNS name.
pub fn identity_of(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    let name = certificate.valid_dns_names().next()?.to_owned();
    crate::message::is_name(&name).then_some(name)
}

/// How a client finds and trusts a server, and proves itself.
#[derive(Clone, Debug, Default)]
pub struct ClientSecurity {
    /// Authority (or the server's own certificate), in PEM.
    pub ca: Option<PathBuf>,
    /// Name that the server's certificate has to carry; the host in the address if not given.
    pub server_name: Option<String>,
    /// File with `IDENTITY SECRET`.
    pub secret: Option<PathBuf>,
    /// Certificate and key of the client, in PEM.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// Neither TLS nor proof of anything.
    pub insecure: bool,
}

/// The same, read and checked.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub tls: Option<(Arc<rustls::ClientConfig>, ServerName<'static>)>,
    pub secret: Option<(String, Vec<u8>)>,
}

impl ClientSecurity {
    /// Reads the files.
    ///
    /// # Errors
    /// When one cannot be read, or nothing says how the server is to be trusted.
    pub(crate) fn load(&self, host: &str) -> io::Result<Credentials> {
        let secret = match &self.secret {
            Some(path) => Some(Secrets::read(path)?.single(path)?),
            None => None,
        };
        let Some(ca) = &self.ca else {
            if self.insecure {
                return Ok(Credentials { tls: None, secret });
            }
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a journal server is reached over TLS: give --remote-ca (its certificate, or its authority's), or say \
                 --remote-insecure",
            ));
        };
        let builder = rustls::ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots(ca)?);
        let config = match &self.certificate {
            None => builder.with_no_client_auth(),
            Some((certificate, private_key)) => builder
                .with_client_auth_cert(certificates(certificate)?, key(private_key)?)
                .map_err(|error| invalid(certificate, error))?,
        };
        let name = self.server_name.as_deref().unwrap_or(host);
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("'{name}' is no name of a server")))?;
        Ok(Credentials { tls: Some((Arc::new(config), name)), secret })
    }
}
