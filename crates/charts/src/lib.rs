//! Pages of results, for the lab and for the SSD simulator alike: plots as inline SVG, tables, one style sheet; no scripts, no fonts,
//! nothing fetched.
//!
//! Colours come from the style sheet, so that one page serves light, dark and paper; every series has a pattern or dash of its
//! own as well. It must never draw what is not there: a value that is missing has no bar.
//!
//! Failure story: none; it makes text of values. What is no number is not drawn.

#![forbid(unsafe_code)]

mod bars;
mod dots;
mod lines;
mod scale;
mod style;

pub use bars::{Bar, Bars, Mark, bars, key};
pub use dots::{Dot, Row, Tone, dots};
pub use lines::{Lines, lines};
pub use scale::{short, step};

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// One of the things that a plot compares: its name, colour and pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Series {
    /// As the key says it.
    pub name: String,
    /// Which of the style sheet's colours, from 0.
    pub colour: usize,
    /// Which pattern lies over the colour, from 0 (none).
    pub pattern: usize,
}

impl Series {
    /// The nth of some that have no meaning of their own.
    pub fn nth(index: usize, name: impl Into<String>) -> Self {
        Series { name: name.into(), colour: index % COLOURS, pattern: index / COLOURS + index % COLOURS }
    }
}

/// Colours that the style sheet has.
pub const COLOURS: usize = 10;
/// Patterns that can be told apart.
pub const PATTERNS: usize = 9;

/// A page of this title.
pub fn page(title: &str, body: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(style::STYLE)) }
            }
            body { (body) }
        }
    }
    .into_string()
        + "\n"
}

/// A table whose rows become cards on a narrow screen: each cell carries its column's name. A row has classes, for filters.
pub fn table(header: &[&str], rows: &[(String, Vec<Markup>)]) -> Markup {
    html! {
        div.wide {
            table.cards {
                thead { tr { @for name in header { th { (name) } } } }
                tbody {
                    @for (class, row) in rows {
                        tr class=(class) {
                            @for (cell, name) in row.iter().zip(header) { td data-name=(name) { (cell) } }
                        }
                    }
                }
            }
        }
    }
}
