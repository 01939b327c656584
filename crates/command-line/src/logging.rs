//! Log lines on stderr; `AMBERLOG_LOG` says which, in the syntax of `tracing_subscriber::EnvFilter` (default `info`).
//!
//! Each line names the VM and the disk that its thread works for (`log-context`). Colours are for terminals only, and not where
//! `NO_COLOR` is set.

use std::fmt;
use std::io::IsTerminal;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

/// Has log lines printed from here on.
pub fn start() {
    crate::exit::when_nobody_reads();
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("AMBERLOG_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_target(false)
        .fmt_fields(WithContext)
        .init();
}

/// What a line says, after whom it is about.
struct WithContext;

impl<'writer> FormatFields<'writer> for WithContext {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut line = String::new();
        DefaultFields::new().format_fields(Writer::new(&mut line), fields)?;
        write!(writer, "{}{line}", log_context::prefix(&line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use log_context::Context;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic under this lock").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_name_vm_and_disk() {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .with_target(false)
            .fmt_fields(WithContext)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let _entered = log_context::enter(Context::vm("db").with_disk("root"));
            tracing::info!("process 7 has connected");
            tracing::warn!("disk root: a ring is broken");
        });
        let text = String::from_utf8(sink.0.lock().expect("no panic under this lock").clone()).expect("text");
        assert!(text.contains("INFO vm db: disk root: process 7 has connected\n"), "{text}");
        assert!(text.contains("WARN vm db: disk root: a ring is broken\n"), "{text}");
    }
}
