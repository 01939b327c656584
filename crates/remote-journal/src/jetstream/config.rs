//! How a store's stream is kept, and whether one that is there is kept so.

use super::options::NatsOptions;
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType};
use std::io;
use std::time::Duration;

/// Bytes of a message's content, at most.
pub(super) const CONTENT_BYTES_MAX: usize = 768 << 10;
/// What the servers have to take as a message: the content with its head and headers. Their default is 1 MiB.
pub(super) const MESSAGE_BYTES_MAX: usize = CONTENT_BYTES_MAX + 1024;
/// How long the stream remembers the names of messages; longer than any of them is tried.
const DUPLICATES: Duration = Duration::from_secs(120);

/// Bytes that so many of segments take in a stream, at most, but for messages of less than 1 KiB.
pub(super) fn with_headers(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 3)
}

/// How a store's stream is kept.
pub(super) fn config(options: &NatsOptions) -> Config {
    let name = &options.address.stream;
    Config {
        name: name.clone(),
        description: Some("journals of amberlog; written by its journal-server only".to_owned()),
        subjects: vec![format!("{name}.>")],
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        num_replicas: options.replicas,
        discard: DiscardPolicy::New,
        max_bytes: i64::try_from(with_headers(options.space_bytes).saturating_add(64 << 20)).unwrap_or(i64::MAX),
        max_messages: -1,
        max_messages_per_subject: -1,
        max_message_size: -1,
        max_consumers: -1,
        duplicate_window: DUPLICATES,
        deny_delete: true,
        ..Config::default()
    }
}

/// Compares how a stream is kept with how a store needs it.
pub(super) fn check(found: &Config, options: &NatsOptions) -> io::Result<()> {
    let wanted = config(options);
    let refuse = |what: String| {
        let name = &wanted.name;
        Err(io::Error::other(format!(
            "the stream {name} {what}; edit it (`nats stream edit {name}`), or name another one"
        )))
    };
    let has_async = found.persist_mode.as_ref().and_then(|mode| serde_json::to_value(mode).ok());
    if found.storage != StorageType::File || has_async.is_some_and(|mode| mode == "async") {
        return refuse("is not kept in files that are written before it acknowledges".to_owned());
    }
    if found.num_replicas < options.replicas {
        return refuse(format!("has {} replicas, not {}", found.num_replicas, options.replicas));
    }
    if found.subjects != wanted.subjects || found.mirror.is_some() || found.sources.is_some() {
        return refuse(format!("does not take exactly what is published to {}", wanted.subjects[0]));
    }
    if found.discard != DiscardPolicy::New || found.retention != RetentionPolicy::Limits || !found.max_age.is_zero() {
        return refuse("drops old messages by itself; it has to refuse new ones when it is full".to_owned());
    }
    if found.max_messages > 0 || found.max_messages_per_subject > 0 {
        return refuse("has a limit on the number of its messages; it may have one on its bytes only".to_owned());
    }
    if found.max_bytes > 0 && found.max_bytes < wanted.max_bytes {
        return refuse(format!("has room for {} bytes, and --space needs {}", found.max_bytes, wanted.max_bytes));
    }
    if (1..MESSAGE_BYTES_MAX as i32).contains(&found.max_message_size) {
        return refuse(format!("takes no message of {MESSAGE_BYTES_MAX} bytes"));
    }
    if found.sealed || found.deny_purge || found.no_ack || found.subject_transform.is_some() {
        return refuse("is sealed, cannot be purged, does not acknowledge, or renames what it takes".to_owned());
    }
    if found.duplicate_window < options.patience {
        return refuse(format!("forgets the names of messages after {:?}", found.duplicate_window));
    }
    if !found.deny_delete {
        log::warn!("stream {}: single messages of it can be deleted (deny_delete is not set)", wanted.name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> NatsOptions {
        NatsOptions::new("nats://a:1/LOG".parse().expect("an address"), 1 << 30)
    }

    #[test]
    fn a_stream_that_is_kept_otherwise_is_refused() {
        let options = options();
        check(&config(&options), &options).expect("as it was made");
        type Change = fn(&mut Config);
        let changes: [(Change, &str); 12] = [
            (|config| config.storage = StorageType::Memory, "files"),
            (|config| config.num_replicas = 1, "has 1 replicas, not 3"),
            (|config| config.discard = DiscardPolicy::Old, "drops"),
            (|config| config.retention = RetentionPolicy::WorkQueue, "drops"),
            (|config| config.max_age = Duration::from_secs(9), "drops"),
            (|config| config.max_messages = 1000, "number of its messages"),
            (|config| config.max_bytes = 1 << 30, "room"),
            (|config| config.max_message_size = 4096, "takes no message"),
            (|config| config.subjects.push("other".to_owned()), "exactly"),
            (|config| config.deny_purge = true, "purged"),
            (|config| config.no_ack = true, "acknowledge"),
            (|config| config.duplicate_window = Duration::from_secs(1), "names"),
        ];
        for (change, said) in changes {
            let mut config = config(&options);
            change(&mut config);
            let error = check(&config, &options).expect_err(said).to_string();
            assert!(error.contains(said) && error.contains("LOG"), "{error}");
        }
    }
}
