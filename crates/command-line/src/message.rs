//! What a log line says, after whom it is about.

use crate::exit::visible;
use std::fmt;
use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

/// What a line says.
#[derive(Default)]
pub(crate) struct Message {
    pub(crate) text: String,
    pub(crate) target: Option<String>,
}

impl Visit for Message {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.text = value.to_owned(),
            "log.target" => self.target = Some(value.to_owned()),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.text = format!("{value:?}");
        }
    }
}

/// What a line says, after whom it is about.
pub(crate) struct WithContext;

impl<'writer> FormatFields<'writer> for WithContext {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut line = String::new();
        DefaultFields::new().format_fields(Writer::new(&mut line), fields)?;
        // A disk's or a file's name may be anything. Colours come from outside of this.
        let prefix = log_context::prefix(&line);
        write!(writer, "{}{}", visible(&prefix), visible(&line))
    }
}
