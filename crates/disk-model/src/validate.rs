//! A model held against a real drive: requests whose response times were measured, one after the other, are given to the
//! model, and the two distributions are compared.
//!
//! The text is that of DiskSim's `validate` format, in which the response times of the drives that it was validated with
//! were published: a line a request, `R|W Hit|Miss BLOCK BLOCKS RESPONSE_US PAUSE_US`, blocks of 512 bytes, the pause from its completion
//! to the next request. The figure of merit is Ruemmler and Wilkes': the root mean square of the horizontal distance
//! between the two distributions' curves.

use crate::model::Model;
use disk_model_client::{Kind, Request};

const SECTOR_BYTES: u64 = 512;
/// Where two distributions are shown beside each other.
pub const QUANTILES: [f64; 7] = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99];

/// One request that a real drive served.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// A read, or a write.
    pub is_read: bool,
    /// Where, in bytes.
    pub offset: u64,
    /// How long, in bytes.
    pub len: u64,
    /// What it took, in µs.
    pub response_us: f64,
    /// From its completion to the next request, in µs.
    pub pause_us: f64,
}

/// Two distributions of response times, in ms.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// How many requests.
    pub count: usize,
    /// Quantile, measured, modelled.
    pub quantiles: Vec<(f64, f64, f64)>,
    /// Mean, measured and modelled.
    pub means: (f64, f64),
    /// The root mean square of the distance between the curves.
    pub rms: f64,
}

/// Reads requests.
///
/// # Errors
/// A sentence that names the first line that is none.
pub fn parse(text: &str) -> Result<Vec<Served>, String> {
    let mut all = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let parsed = match words.as_slice() {
            [kind @ ("R" | "W"), _, block, blocks, response, pause] => (|| {
                Some(Served {
                    is_read: *kind == "R",
                    offset: block.parse::<u64>().ok()?.checked_mul(SECTOR_BYTES)?,
                    len: blocks.parse::<u64>().ok().filter(|count| *count > 0)?.checked_mul(SECTOR_BYTES)?,
                    response_us: response.parse().ok()?,
                    pause_us: pause.parse().ok()?,
                })
            })(),
            _ => None,
        };
        all.push(parsed.ok_or_else(|| {
            format!("line {} is no request as DiskSim's validate format has them: '{line}'", index + 1)
        })?);
    }
    if all.is_empty() {
        return Err("there is no request in it".to_owned());
    }
    Ok(all)
}

/// Which requests are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// All.
    All,
    /// Reads.
    Reads,
    /// Writes.
    Writes,
}

/// Gives the requests to a model, each when the one before is done and the measured pause is over; gives what each took, in ms.
pub fn replay(model: &mut Model, served: &[Served]) -> Vec<f64> {
    let mut completed = Vec::new();
    let (mut now, mut modelled) = (0, Vec::with_capacity(served.len()));
    for (tag, one) in served.iter().enumerate() {
        let kind = if one.is_read { Kind::Read } else { Kind::Write };
        model.submit(now, Request { tag: tag as u64, kind, offset: one.offset, len: one.len });
        completed.clear();
        let done = model.drain(&mut completed);
        modelled.push((done - now) as f64 / 1e6);
        now = done + (one.pause_us * 1000.0) as u64;
    }
    modelled
}

/// Compares what a model took with what was measured.
pub fn compare(served: &[Served], modelled: &[f64], of: Of) -> Comparison {
    let is_of = |one: &Served| match of {
        Of::All => true,
        Of::Reads => one.is_read,
        Of::Writes => !one.is_read,
    };
    let pairs: Vec<(f64, f64)> = served
        .iter()
        .zip(modelled)
        .filter(|(one, _)| is_of(one))
        .map(|(one, modelled)| (one.response_us / 1000.0, *modelled))
        .collect();
    let (mut measured, mut modelled): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let means = (mean(&measured), mean(&modelled));
    measured.sort_by(f64::total_cmp);
    modelled.sort_by(f64::total_cmp);
    let squares: f64 = measured.iter().zip(&modelled).map(|(a, b)| (a - b).powi(2)).sum();
    let at = |values: &[f64], quantile: f64| {
        let index = (quantile * values.len() as f64) as usize;
        values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or(0.0)
    };
    Comparison {
        count: measured.len(),
        quantiles: QUANTILES.iter().map(|&q| (q, at(&measured, q), at(&modelled, q))).collect(),
        means,
        rms: (squares / measured.len().max(1) as f64).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use disk_model_client::Profile;

    #[test]
    fn a_model_agrees_with_itself_and_not_with_another_drive() {
        let lines: Vec<String> =
            (0..500_u64).map(|n| format!("R Miss {} 8 0.0 20000.0", n * 7_919_111 % 17_000_000)).collect();
        let mut served = parse(&lines.join("\n")).unwrap();
        let own = replay(&mut Model::new(Profile::St39102lw, 1), &served);
        let nothing = compare(&served, &own, Of::All);
        assert!(nothing.rms > 5.0 && nothing.means.0 == 0.0 && nothing.count == 500);
        // What the model itself said, as if it had been measured.
        served.iter_mut().zip(&own).for_each(|(one, ms)| one.response_us = ms * 1000.0);
        let again = |profile| replay(&mut Model::new(profile, 1), &served);
        assert!(compare(&served, &again(Profile::St39102lw), Of::Reads).rms < 1e-6);
        assert!(compare(&served, &again(Profile::Hdd7200), Of::All).rms > 1.0);
        assert_eq!(compare(&served, &again(Profile::Hdd7200), Of::Writes).count, 0);
    }

    #[test]
    fn what_is_no_request_is_named() {
        assert!(parse("R Hit 1 8 1.0 1.0\nR Hit x 8 1 1").unwrap_err().starts_with("line 2 "));
        assert!(parse("").is_err() && parse("R Hit 1 0 1.0 1.0").is_err());
    }
}
