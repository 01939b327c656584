//! The table of docs/papers.md: the papers' main figures beside ours, made from results, so that no claim there is older than what
//! it points at.

use crate::catalogue::Experiment;
use crate::results::{Results, SummaryRow};
use std::fmt::Write;

/// Markdown: one row for each `headline` line of the experiments that have been run.
pub fn table(all: &[Results], catalogue: &[Experiment]) -> String {
    let mut text = "| `vma` is `data=journal` under `retain` | paper | here | n |\n|---|---|---|---|\n".to_owned();
    for results in all {
        let Some(experiment) = catalogue.iter().find(|experiment| experiment.id == results.id) else { continue };
        for (words, claim) in &experiment.headlines {
            let measured = claim.measured(&results.rows);
            let rows: Vec<&SummaryRow> = measured.iter().map(|(_, row)| *row).collect();
            let (Some(fewest), Some(most)) =
                (rows.iter().map(|row| row.count).min(), rows.iter().map(|row| row.count).max())
            else {
                continue;
            };
            let count = if fewest == most { fewest.to_string() } else { format!("{fewest} to {most}") };
            let places = if claim.is_comparison() { places(&rows) } else { String::new() };
            let _ = writeln!(
                text,
                "| {words}{places} ({}) | {} | {} | {count} |",
                experiment.id,
                claim.paper_in_short(),
                claim.ours_in_short(&measured)
            );
        }
    }
    text
}

/// What tells the groups apart: workloads, guests, the experiment's parameter.
fn places(rows: &[&SummaryRow]) -> String {
    let list = |of: fn(&SummaryRow) -> String| {
        let values: Vec<String> = rows.iter().map(|row| of(row)).collect();
        values.windows(2).any(|pair| pair[0] != pair[1]).then(|| values.join(" / "))
    };
    let of_workload = list(|row| row.group.workload.clone()).map(|values| format!(", {values}"));
    let of_guests = list(|row| row.group.guests.to_string()).map(|guests| format!(", {guests} guests"));
    let of_parameter = list(|row| row.group.parameter.to_string()).map(|values| format!(", {values}"));
    [of_workload, of_guests, of_parameter].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue;
    use crate::results::read_all;
    use std::path::Path;

    /// Where the page says that its table begins and ends.
    const BEGIN: &str = "<!-- amberlog lab table docs/results -->\n";
    const END: &str = "<!-- end -->";

    #[test]
    fn the_page_has_the_table_of_the_kept_results() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let page = std::fs::read_to_string(root.join("docs/papers.md")).unwrap();
        let (_, rest) = page.split_once(BEGIN).expect("the page has the place");
        let (found, _) = rest.split_once(END).expect("and its end");
        let results = read_all(&root.join("docs/results")).unwrap();
        let made = table(&results, &catalogue::all().unwrap());
        assert!(made.lines().count() > 12, "{made}");
        assert_eq!(found, made, "run 'amberlog lab table docs/results' and put its output there");
    }
}
