//! Priorities of lines, as systemd's journal and syslog have them.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use tracing::Level;

/// syslog's number for a level.
pub(crate) fn priority_of(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Whether what is written to stderr goes to systemd's journal: a service manager then says which file that is.
pub(crate) fn stderr_is_the_journal() -> bool {
    let Some(stream) = std::env::var_os("JOURNAL_STREAM") else { return false };
    let file = std::io::stderr().as_fd().try_clone_to_owned().map(File::from);
    let Ok(metadata) = file.and_then(|file| file.metadata()) else { return false };
    stream == *format!("{}:{}", metadata.dev(), metadata.ino())
}

/// A text, each of its lines with a priority of syslog's in front of it.
pub(crate) fn with_priority(priority: u8, text: &str) -> String {
    text.split_inclusive('\n').map(|line| format!("<{priority}>{line}")).collect()
}
