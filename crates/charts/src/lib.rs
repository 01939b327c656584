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

/// How often what is drawn was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Once: it is hollow.
    Once,
    /// Less often than it is to be: it is pale, its edge broken.
    Few,
    /// Often enough.
    Enough,
}

impl Sample {
    /// The style sheet's name for it, behind another one.
    pub(crate) fn class(self) -> &'static str {
        match self {
            Sample::Once => " single",
            Sample::Few => " few",
            Sample::Enough => "",
        }
    }
}

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
                style { (PreEscaped(style::STYLE)) (PreEscaped(card_names())) }
            }
            body { (body) }
        }
    }
    .into_string()
        + "\n"
}

/// The part of the style sheet that names a card's cells.
fn card_names() -> String {
    let rules =
        (1..=COLUMNS_MAX).map(|n| format!("table.cards td:nth-child({n})::before{{content:var(--h{n},'') ' '}}"));
    format!("@media (max-width:620px){{{}}}", rules.collect::<String>())
}

/// Columns whose names the style sheet puts in front of the cells of a card.
const COLUMNS_MAX: usize = 24;

/// A table whose rows become cards on a narrow screen: the table carries its columns' names, and the style sheet puts them in front of the cells. A row has
/// classes, for filters.
pub fn table(header: &[&str], rows: &[(String, Vec<Markup>)]) -> Markup {
    let names = header.iter().take(COLUMNS_MAX).enumerate();
    let names: Vec<String> =
        names.map(|(index, name)| format!("--h{}:\"{}\"", index + 1, name.replace(['"', '\\'], ""))).collect();
    html! {
        div.wide {
            table.cards style=(names.join(";")) {
                thead { tr { @for name in header { th { (name) } } } }
                tbody {
                    @for (class, row) in rows {
                        tr class=(class) {
                            @for cell in row.iter().take(header.len()) { td { (cell) } }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_the_names_of_its_columns() {
        let table = table(&["where", "a \"b\""], &[("row".into(), vec![html! { "1" }, html! { "2" }])]);
        let page = page("t", &table);
        assert!(page.contains("style=\"--h1:&quot;where&quot;;--h2:&quot;a b&quot;\""), "{page}");
        assert!(page.contains("td:nth-child(2)::before{content:var(--h2,'') ' '}"), "{page}");
    }
}
