//! One self-contained page: what this is and how each paper fared, every claim, and for each experiment our plots with the paper's
//! numbers in them, what bound its cells, the numbers, what differs, and the command that reruns it.

mod claims;
mod first;
mod place;
mod plots;
mod section;
mod series;

use crate::catalogue::{Experiment, Kind};
use crate::error::{FileContext, Result};
use crate::paper::{self, Judged, Paper};
use crate::results::{Results, read_all};
use charts::Sample;
use maud::{Markup, html};
use std::path::{Path, PathBuf};

/// Writes `index.html` into a directory of results; gives its path.
///
/// # Errors
/// When the directory holds no results, or cannot be written to.
pub fn write(directory: &Path, catalogue: &[Experiment]) -> Result<PathBuf> {
    let results = read_all(directory)?;
    let path = directory.join("index.html");
    std::fs::write(&path, page(&results, catalogue)).at("write", &path)?;
    Ok(path)
}

/// The page.
pub fn page(all: &[Results], catalogue: &[Experiment]) -> String {
    let papers: Vec<(Paper, Vec<Judged<'_>>)> =
        Paper::ALL.into_iter().map(|paper| (paper, paper::judged(paper, all, catalogue))).collect();
    let papers: Vec<_> = papers.into_iter().filter(|(_, judged)| !judged.is_empty()).collect();
    let body = html! {
        h1 { "amberlog lab: the papers' experiments, run again" }
        (first::first_screen(&papers))
        div.withnav {
            (contents(&papers))
            main {
                (claims::every_claim(&papers))
                @for (paper, judged) in &papers {
                    h2 id=(anchor(*paper)) { (paper.title()) }
                    p { (paper::sentence(judged)) }
                    @for one in judged { (section::section(one)) }
                }
                (not_run(all, catalogue))
            }
        }
    };
    charts::page("amberlog lab", &body)
}

/// How what was measured so often is drawn, where it is to be measured `asked` times.
pub(crate) fn sample(count: usize, asked: u32) -> Sample {
    match count {
        0 | 1 if asked > 1 => Sample::Once,
        count if count < usize::try_from(asked).unwrap_or(usize::MAX) => Sample::Few,
        _ => Sample::Enough,
    }
}

/// What a paper's part of the page is called in links.
fn anchor(paper: Paper) -> &'static str {
    paper.prefix().unwrap_or("beyond")
}

/// "Figure 9: postmark under concurrent guests".
fn heading(one: &Judged<'_>) -> String {
    let figure = one.experiment.map_or("", |experiment| experiment.figure.as_str());
    if figure.is_empty() { one.results.title.clone() } else { format!("{figure}: {}", one.results.title) }
}

fn contents(papers: &[(Paper, Vec<Judged<'_>>)]) -> Markup {
    html! {
        nav {
            // On a narrow screen it is shown when it is asked for.
            input type="checkbox" id="toc";
            label for="toc" { "Contents" }
            div.toc {
                a href="#claims" { "Every claim" }
                @for (paper, judged) in papers {
                    b { a href=(format!("#{}", anchor(*paper))) { (paper.title()) } }
                    ul { @for one in judged { li { a href=(format!("#{}", one.results.id)) { (heading(one)) } } } }
                }
            }
        }
    }
}

fn not_run(all: &[Results], catalogue: &[Experiment]) -> Markup {
    let missing = catalogue.iter().filter(|experiment| all.iter().all(|results| results.id != experiment.id));
    let rows: Vec<(String, Vec<Markup>)> = missing
        .map(|experiment| {
            let why = if experiment.kind == Kind::Missing {
                experiment.needs.clone()
            } else {
                format!("not run; amberlog lab run {}", experiment.id)
            };
            (String::new(), vec![html! { (experiment.id) }, html! { (experiment.title) }, html! { (why) }])
        })
        .collect();
    html! {
        @if !rows.is_empty() {
            h2 { "Not on this page" }
            (charts::table(&["name", "experiment", "why"], &rows))
        }
    }
}
