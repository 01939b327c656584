//! Log lines as entries of systemd's journal, with fields that it can be asked for: `journalctl AMBERLOG_VM=db`.
//!
//! An entry is a datagram of `NAME=value` lines, or `NAME`, the length in 64 bits and the value where that has lines of its own (systemd's
//! "Native Journal Protocol"). Must never: wait for the journal. Failure story: what it does not take at once goes to stderr, as a line
//! with its priority, which the journal reads as well.

use crate::message::{Message, WithContext};
use crate::priority::{priority_of, with_priority};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::layer::Context;

/// Where the journal listens.
const SOCKET: &str = "/run/systemd/journal/socket";

/// The journal, for those who log.
pub(crate) struct Journal(UnixDatagram);

impl Journal {
    /// Connects to it.
    ///
    /// # Errors
    /// When it is not there.
    pub(crate) fn connect() -> std::io::Result<Self> {
        Self::at(Path::new(SOCKET))
    }

    fn at(path: &Path) -> std::io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        socket.set_nonblocking(true)?;
        Ok(Journal(socket))
    }
}

fn put(entry: &mut Vec<u8>, name: &str, value: &str) {
    entry.extend(name.as_bytes());
    if value.contains('\n') {
        entry.push(b'\n');
        entry.extend((value.len() as u64).to_le_bytes());
    } else {
        entry.push(b'=');
    }
    entry.extend(value.as_bytes());
    entry.push(b'\n');
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let priority = priority_of(*event.metadata().level());
        let mut text = String::new();
        // Into memory: it cannot fail.
        let _ = WithContext.format_fields(Writer::new(&mut text), event);
        let mut said = Message::default();
        event.record(&mut said);
        let context = log_context::Context::current();
        let (vm, disk) = context.names();
        let mut entry = Vec::with_capacity(256);
        put(&mut entry, "PRIORITY", &priority.to_string());
        put(&mut entry, "SYSLOG_IDENTIFIER", "amberlog");
        put(&mut entry, "AMBERLOG_PART", said.target.as_deref().unwrap_or(event.metadata().target()));
        for (name, value) in [("AMBERLOG_VM", vm), ("AMBERLOG_DISK", disk)] {
            if let Some(value) = value {
                put(&mut entry, name, value);
            }
        }
        put(&mut entry, "MESSAGE", &text);
        if self.0.send(&entry).is_err() {
            eprint!("{}", with_priority(priority, &format!("{text}\n")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use tracing_subscriber::layer::SubscriberExt;

    /// systemd's own journal, in a namespace of its own, is asked for what was said to it.
    #[test]
    fn the_journal_is_asked_for_a_vm_and_a_disk() {
        let directory = tempfile::tempdir().expect("a directory");
        // The journal takes the socket at its own name alone: there is a /run of its own.
        let script = "set -e
            mount -t tmpfs run /run; mkdir -p /run/systemd/journal /run/log/journal
            /lib/systemd/systemd-journald >/dev/null 2>&1 & journald=$!
            for i in $(seq 200); do [ -S /run/systemd/journal/socket ] && break; sleep 0.05; done
            \"$0\" --exact journal::tests::say_to_the_journal --ignored >/dev/null
            journalctl --sync 2>/dev/null || sleep 1
            for what in AMBERLOG_VM=db AMBERLOG_DISK=root AMBERLOG_PART=placement; do
                journalctl -D /run/log/journal -o json --output-fields=MESSAGE,PRIORITY,AMBERLOG_DISK $what > \"$1/$what\"
            done
            kill $journald";
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", script])
            .arg(std::env::current_exe().expect("this program"))
            .arg(directory.path())
            .output()
            .expect("unshare");
        let entries = |what: &str| -> Vec<serde_json::Value> {
            let text = std::fs::read_to_string(directory.path().join(what)).unwrap_or_default();
            text.lines().map(|line| serde_json::from_str(line).expect("an object")).collect()
        };
        let of_vm = entries("AMBERLOG_VM=db");
        assert_eq!(of_vm.len(), 3, "{of_vm:?} {output:?}");
        assert_eq!((&of_vm[0]["MESSAGE"], &of_vm[0]["PRIORITY"]), (&"vm db: one\n    two".into(), &"3".into()));
        assert_eq!(of_vm[1]["MESSAGE"], "vm db: disk root: three");
        assert_eq!(entries("AMBERLOG_DISK=root").len(), 2);
        let of_part = entries("AMBERLOG_PART=placement");
        assert_eq!(of_part.len(), 1, "{of_part:?}");
        assert_eq!((&of_part[0]["MESSAGE"], &of_part[0]["PRIORITY"]), (&"vm db: disk root: four".into(), &"6".into()));
    }

    /// What the other test runs where the journal is.
    #[test]
    #[ignore = "speaks to the journal of this machine"]
    fn say_to_the_journal() {
        let subscriber = tracing_subscriber::registry().with(Journal::connect().expect("the journal"));
        tracing::subscriber::with_default(subscriber, || {
            let _vm = log_context::enter(log_context::Context::vm("db"));
            tracing::error!("one\ntwo");
            let _disk = log_context::enter(log_context::Context::current().with_disk("root"));
            tracing::warn!("three");
            tracing::info!(target: "placement", "four");
        });
    }

    #[test]
    fn what_the_journal_does_not_take_is_nobodys_wait() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("journal");
        let deaf = UnixDatagram::bind(&path).expect("a socket");
        let subscriber = tracing_subscriber::registry().with(Journal::at(&path).expect("connected"));
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..2000 {
                tracing::debug!("line {number} of many that nobody reads");
            }
        });
        let mut bytes = [0; 512];
        let count = deaf.recv(&mut bytes).expect("the first");
        let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
        assert!(text.starts_with("PRIORITY=7\nSYSLOG_IDENTIFIER=amberlog\n"), "{text}");
        assert!(text.ends_with("MESSAGE=line 0 of many that nobody reads\n"), "{text}");
    }
}
