//! Log lines on stderr; `AMBERLOG_LOG` says which, in the syntax of `tracing_subscriber::EnvFilter` (default `info`).
//!
//! Each line names the VM and the disk that its thread works for (`log-context`). Colours are for terminals only, and not where
//! `NO_COLOR` is set. Where stderr is systemd's journal (`JOURNAL_STREAM` names it) lines are entries with fields ([`crate::journal`]); where
//! that is not to be reached, each line begins with its priority, `<3>` for an error, as sd-daemon(3) has it, and the journal takes that off. With `AMBERLOG_LOG_FORMAT=json` a line is an object: `time`, `level`, `vm` and `disk` where they are known, `part`
//! (the crate that says it) and `message`.

use crate::log_limit::Limited;
use crate::message::{Message, WithContext};
use crate::priority::{priority_of, stderr_is_the_journal, with_priority};
use std::ffi::OsStr;
use std::fmt;
use std::io::IsTerminal;
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Event, Subscriber};
use tracing_log::{AsLog, LogTracer};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, format};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;

/// Has log lines printed from here on.
pub fn start() {
    start_as(false);
}

/// The same for a process whose guest can have it say lines: there is a bound on those of each place that says them.
pub fn start_with_limit() {
    start_as(true);
}

fn start_as(is_limited: bool) {
    crate::exit::when_nobody_reads();
    let filter = || EnvFilter::try_from_env("AMBERLOG_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let wished = std::env::var_os("AMBERLOG_LOG_FORMAT").unwrap_or_default();
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = format().with_target(false);
    let is_journal = stderr_is_the_journal();
    let journal = (is_journal && wished != "json").then(crate::journal::Journal::connect).and_then(Result::ok);
    if let Some(journal) = journal {
        install(tracing_subscriber::registry().with(filter()).with(journal), is_limited);
        return warn_of(&wished);
    }
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(colours).with_env_filter(filter());
    match (wished == "json", is_journal) {
        (true, true) => install(lines.event_format(WithPriority(Json)).finish(), is_limited),
        (true, false) => install(lines.event_format(Json).finish(), is_limited),
        (false, true) => install(lines.event_format(WithPriority(text)).fmt_fields(WithContext).finish(), is_limited),
        (false, false) => install(lines.event_format(text).fmt_fields(WithContext).finish(), is_limited),
    }
    warn_of(&wished);
}

/// All lines of ours come through `log`, so that the bound is there, before whatever prints them.
fn install(subscriber: impl Into<Dispatch>, is_limited: bool) {
    tracing::dispatcher::set_global_default(subscriber.into()).expect("a program starts its log once");
    let lines = LogTracer::new();
    let logger: Box<dyn log::Log> = if is_limited { Box::new(Limited::new(lines)) } else { Box::new(lines) };
    log::set_boxed_logger(logger).expect("a program starts its log once");
    log::set_max_level(LevelFilter::current().as_log());
}

fn warn_of(wished: &OsStr) {
    if !wished.is_empty() && wished != "text" && wished != "json" {
        tracing::warn!("AMBERLOG_LOG_FORMAT is text or json, not {}: lines are text", wished.display());
    }
}

/// Lines as another format has them, with their priorities.
struct WithPriority<F>(F);

impl<S, N, F> FormatEvent<S, N> for WithPriority<F>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let priority = priority_of(*event.metadata().level());
        let mut text = String::new();
        self.0.format_event(context, Writer::new(&mut text), event)?;
        writer.write_str(&with_priority(priority, &text))
    }
}

/// An object a line.
struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut message = Message::default();
        event.record(&mut message);
        // Lines that came through `log` have their crate in a field.
        let part = message.target.as_deref().unwrap_or(event.metadata().target());
        let mut line = serde_json::json!({
            "time": time, "level": event.metadata().level().to_string().to_lowercase(), "part": part,
            "message": message.text,
        });
        let context = log_context::Context::current();
        let (vm, disk) = context.names();
        for (key, name) in [("vm", vm), ("disk", disk)] {
            if let Some(name) = name {
                line[key] = name.into();
            }
        }
        writeln!(writer, "{line}")
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
    fn lines_are_objects_if_that_is_wished() {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).event_format(Json).finish();
        tracing::subscriber::with_default(subscriber, || {
            let _entered = log_context::enter(Context::vm("db").with_disk("root"));
            tracing::warn!("a \"ring\"\nis {}", "broken");
            drop(_entered);
            tracing::info!("read the configuration again");
        });
        let text = String::from_utf8(sink.0.lock().expect("no panic under this lock").clone()).expect("text");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(lines[0]["message"], "a \"ring\"\nis broken");
        assert_eq!((&lines[0]["vm"], &lines[0]["disk"]), (&"db".into(), &"root".into()));
        assert_eq!(lines[0]["level"], "warn");
        assert!(lines[0]["time"].as_str().is_some_and(|time| time.starts_with("20") && time.ends_with('Z')), "{text}");
        assert!(lines[1].get("vm").is_none(), "{text}");
    }

    #[test]
    fn lines_have_their_priority_where_the_journal_takes_it() {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .event_format(WithPriority(format().with_target(false)))
            .fmt_fields(WithContext)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!("one\ntwo");
            tracing::warn!("three");
            tracing::info!("four");
        });
        let text = String::from_utf8(sink.0.lock().expect("no panic under this lock").clone()).expect("text");
        let heads: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_at_checked(3)).collect();
        let priorities: Vec<&str> = heads.iter().map(|(head, _)| *head).collect();
        assert_eq!(priorities, ["<3>", "<3>", "<4>", "<6>"], "{text}");
        assert!(heads[0].1.ends_with("ERROR one") && heads[2].1.ends_with("WARN three"), "{text}");
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
