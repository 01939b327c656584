//! High-water marks of a load alone, where files were made before it: amberlog's are since it started, and its samples tell what was held when.
//!
//! It must never tell a mark of the preparation as the load's: what is not known is left out.

use crate::counters::{TUPLE_BYTES, flattened};
use crate::error::{Error, FileContext, Result};
use crate::measured::CellResult;
use crate::workload::Workload;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long amberlog, which writes ten a second, may take to the next sample.
const SAMPLE_LIMIT: Duration = Duration::from_secs(30);
const SAMPLE_PAUSE: Duration = Duration::from_millis(50);

/// What amberlog has counted of a data disk by now, by the samples that it writes, its guest being idle. `whose` is who they are of, for the message.
///
/// # Errors
/// When there are no samples, or no more of them.
pub(crate) fn counted_so_far(path: &Path, whose: &str) -> Result<BTreeMap<String, f64>> {
    let lines = || -> Result<(usize, Option<Value>)> {
        let text = std::fs::read_to_string(path).at("read", path)?;
        // What is behind the last end of a line is still being written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        Ok((whole.lines().count(), whole.lines().last().and_then(|line| serde_json::from_str(line).ok())))
    };
    let deadline = Instant::now() + SAMPLE_LIMIT;
    let (known, _) = lines()?;
    loop {
        match lines()? {
            // The first that ends after this moment may have begun before it.
            (count, Some(sample)) if count >= known + 2 => return Ok(flattened(&sample)),
            _ if Instant::now() > deadline => {
                return Err(Error::Told(format!("amberlog writes no samples ({whose}); its console may say why")));
            }
            _ => std::thread::sleep(SAMPLE_PAUSE),
        }
    }
}

/// What the high-water marks of a load are that was prepared: amberlog's are since it started. One that rose since the common beginning is the
/// load's own. Of one that did not, the most that samples saw since then is what is known; one that no sample has is not known.
pub(crate) fn marks_of_the_load(
    fields: &mut BTreeMap<String, f64>,
    before: &BTreeMap<String, f64>,
    levels: &BTreeMap<String, f64>,
) {
    let is_of_before = |(name, value): (&String, &f64)| {
        let stood = name.ends_with("_max") && before.get(name).is_some_and(|before| *before > 0.0 && *value <= *before);
        stood.then(|| name.clone())
    };
    let marks: Vec<String> = fields.iter().filter_map(is_of_before).collect();
    for name in marks {
        match levels.get(&name.replace("_max", "_now")) {
            Some(level) => insert_seen(fields, &name, *level),
            None => _ = fields.remove(&name),
        }
    }
    if let Some(blocks) = fields.get("blocks_retained_max").copied() {
        let bytes = blocks * TUPLE_BYTES;
        if fields.contains_key(&sampled("blocks_retained_max")) {
            insert_seen(fields, "tuple_bytes_max", bytes);
        } else {
            fields.insert("tuple_bytes_max".to_owned(), bytes);
        }
    }
}

/// The field that says of a mark that it is what samples saw: at least so much, since they see ten moments a second.
pub(crate) fn sampled(name: &str) -> String {
    format!("{name}_sampled")
}

fn insert_seen(fields: &mut BTreeMap<String, f64>, name: &str, value: f64) {
    fields.extend([(name.to_owned(), value), (sampled(name), 1.0)]);
}

/// The highest of each level that samples have since the common beginning.
pub(crate) fn levels_since(path: &Path, started: Instant, begun: Instant) -> BTreeMap<String, f64> {
    let lead = begun.saturating_duration_since(started).as_secs_f64();
    let mut levels: BTreeMap<String, f64> = BTreeMap::new();
    for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
        let Ok(sample) = serde_json::from_str::<Value>(line) else { continue };
        if sample["seconds"].as_f64().is_some_and(|seconds| seconds >= lead) {
            for (name, value) in flattened(&sample).into_iter().filter(|(name, _)| name.ends_with("_now")) {
                let level = levels.entry(name).or_insert(value);
                *level = level.max(value);
            }
        }
    }
    levels
}

/// A result whose high-water marks are those of its load alone. Of earlier versions', which had those of what was prepared before it in them, the
/// first guest's curves have what samples saw of the load; what they do not have is not known.
pub(crate) fn with_marks_of_the_load(result: &CellResult) -> CellResult {
    let mut result = result.clone();
    let is_prepared = Workload::by_name(&result.cell.group.workload).is_some_and(Workload::is_prepared);
    if result.has_marks_of_load || !is_prepared {
        return result;
    }
    let highest =
        |name: &str| -> Option<f64> { result.curves.get(name)?.iter().map(|(_, value)| *value).reduce(f64::max) };
    let [copies, tuples] = [highest("pool_bytes"), highest("tuple_bytes")];
    for (index, fields) in result.guests.iter_mut().enumerate() {
        for name in ["area_bytes_max", "pool_bytes_max", "blocks_retained_max", "tuple_bytes_max"] {
            fields.remove(name);
        }
        if index == 0 {
            copies.iter().for_each(|bytes| insert_seen(fields, "pool_bytes_max", *bytes));
            tuples.iter().for_each(|bytes| insert_seen(fields, "tuple_bytes_max", *bytes));
            tuples.iter().for_each(|bytes| insert_seen(fields, "blocks_retained_max", bytes / TUPLE_BYTES));
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Cell, Group, Mode};
    use crate::measured::Parameters;

    /// A referee found the preparation's peaks (11.3 MB of copies) told of deletions that had a few.
    #[test]
    fn high_water_marks_are_those_of_the_load() {
        let of = |values: &[(&str, f64)]| -> BTreeMap<String, f64> {
            values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        };
        let before = of(&[("pool_bytes_max", 9e6), ("blocks_retained_max", 100.0), ("area_bytes_max", 4e5)]);
        let mut fields = of(&[
            ("pool_bytes_max", 9e6),
            ("blocks_retained_max", 300.0),
            ("area_bytes_max", 4e5),
            ("tuple_bytes_max", 5400.0),
            ("transactions", 3.0),
        ]);
        marks_of_the_load(&mut fields, &before, &of(&[("pool_bytes_now", 1e6), ("blocks_retained_now", 250.0)]));
        let expected = [
            ("pool_bytes_max", 1e6),
            ("pool_bytes_max_sampled", 1.0),
            ("blocks_retained_max", 300.0),
            ("tuple_bytes_max", 5400.0),
            ("transactions", 3.0),
        ];
        assert_eq!(fields, of(&expected), "one that stood is what samples saw, or not known; one that rose is itself");
        marks_of_the_load(&mut fields, &of(&[("blocks_retained_max", 300.0)]), &of(&[("blocks_retained_now", 4.0)]));
        assert_eq!((fields["tuple_bytes_max"], fields["tuple_bytes_max_sampled"]), (72.0, 1.0));
    }

    #[test]
    fn samples_before_the_beginning_tell_no_level() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("samples.jsonl");
        let line = |seconds: f64, bytes: u32| {
            format!(
                "{{\"seconds\":{seconds},\"disks\":[{{\"counters\":{{\"pool_bytes_now\":{bytes},\"pool_bytes_max\":99}}}}]}}\n"
            )
        };
        std::fs::write(&path, [line(1.0, 90), line(6.0, 7), line(7.0, 5), "{".to_owned()].concat()).unwrap();
        let started = Instant::now();
        let levels = levels_since(&path, started, started + Duration::from_secs(5));
        assert_eq!(levels, BTreeMap::from([("pool_bytes_now".to_owned(), 7.0)]));
    }

    #[test]
    fn marks_of_earlier_versions_are_taken_from_the_curves_or_not_at_all() {
        let of = |workload: &str| {
            let group =
                Group { disk: "none".into(), parameter: 0, guests: 1, workload: workload.into(), mode: Mode::Vma };
            let mut result = CellResult::empty(&Cell { group, iteration: 0 }, &Parameters::for_tests());
            result.has_marks_of_load = false;
            let marks = [("pool_bytes_max", 11.3e6), ("area_bytes_max", 3.6e5), ("tuple_bytes_max", 2e5)];
            result.guests.push(marks.map(|(name, value)| (name.to_owned(), value)).into());
            result.curves = BTreeMap::from([
                ("pool_bytes".to_owned(), vec![(0.1, 0.0), (0.2, 1.6e6), (0.3, 1e5)]),
                ("tuple_bytes".to_owned(), vec![(0.1, 18.0), (0.2, 36.0)]),
            ]);
            with_marks_of_the_load(&result).guests.remove(0)
        };
        let deletion = of("file_delete");
        assert_eq!((deletion["pool_bytes_max"], deletion["tuple_bytes_max"]), (1.6e6, 36.0));
        assert_eq!((deletion["blocks_retained_max"], deletion.get("area_bytes_max")), (2.0, None));
        assert!(
            deletion.contains_key("tuple_bytes_max_sampled") && !of("postmark").contains_key("tuple_bytes_max_sampled")
        );
        assert_eq!(of("postmark")["pool_bytes_max"], 11.3e6, "nothing was there before its load");
    }
}
