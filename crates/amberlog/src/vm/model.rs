//! Disk models of a run: `model=NAME` is one modelled disk for all disks of this run that name it; `model=SOCKET` one that
//! `amberlog disk-model` serves to several runs, which then share its arm, queue and cache.

use anyhow::Context;
use disk_model::{Client, Profile, Server, ServerOptions};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// The value of `model=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelChoice {
    /// A drive by name, of this run alone.
    Own(Profile),
    /// The socket of a shared one.
    Shared(PathBuf),
}

impl FromStr for ModelChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            Ok(ModelChoice::Shared(PathBuf::from(text)))
        } else {
            text.parse().map(ModelChoice::Own)
        }
    }
}

/// The modelled disks of a run; they end with it.
pub struct Models {
    time_scale: f64,
    own: Vec<(Profile, Server)>,
}

impl Models {
    /// None yet.
    pub fn new(time_scale: f64) -> Self {
        Models { time_scale, own: Vec::new() }
    }

    /// Room on the chosen modelled disk for one of `size_bytes`; starts it if it is the first of this run.
    pub fn connect(&mut self, choice: Option<&ModelChoice>, size_bytes: u64) -> anyhow::Result<Option<Arc<Client>>> {
        let client = match choice {
            None => return Ok(None),
            Some(ModelChoice::Shared(socket)) => Client::connect(socket, size_bytes)?,
            Some(ModelChoice::Own(profile)) => {
                let position = match self.own.iter().position(|(other, _)| other == profile) {
                    Some(position) => position,
                    None => {
                        let options =
                            ServerOptions { profile: *profile, seed: 1, time_scale: self.time_scale, socket: None };
                        self.own.push((*profile, Server::start(options)?));
                        self.own.len() - 1
                    }
                };
                self.own[position].1.connect(size_bytes).with_context(|| format!("model={profile}"))?
            }
        };
        Ok(Some(Arc::new(client)))
    }
}
