//! What is said of durability by age to who asks.

use super::super::holder::Held;
use super::state::Aging;
use crate::durability_report::DurabilityReport;
use crate::log::Log;
use std::time::Duration;

impl Held {
    pub(in crate::keepers::held) fn aged_report(&self, log: &Log) -> DurabilityReport {
        let block_bytes = u64::from(log.place.block_bytes);
        let state = self.state();
        let aging = state.aging.as_ref();
        let now = aging.map(|aging| aging.machine.status()).unwrap_or_default();
        let all = sum(&state.counted, &now);
        let age = |aging: &Aging, oldest: Duration| (log.home.now() - aging.since).saturating_sub(oldest).as_secs_f64();
        // What an age had allowed before is not.
        let is_at_once = aging.is_some_and(|aging| aging.watched.is_lost() && !aging.owes());
        // While it ends, or has not begun wholly, nothing is promised.
        let in_force = aging.filter(|aging| aging.machine.is_proven() && aging.ending.is_none());
        let within_s =
            in_force.and_then(|aging| if is_at_once { Some(0) } else { aging.allows().map(|age| age.as_secs()) });
        // Who has asked for a promise and has none, for whatever cause, is told why.
        let is_missing = within_s.is_none() && log.home.durable_within().is_some();
        DurabilityReport {
            within_s,
            oldest_undurable_s: aging.zip(now.oldest).map(|(aging, oldest)| age(aging, oldest)),
            compounds: all.compounds,
            compound_blocks: all.compound_blocks,
            append_bytes_home: all.append_blocks * block_bytes,
            bytes_brought_home: all.blocks_brought_home * block_bytes,
            writes_held: all.writes_held,
            discards_held: all.discards_held,
            through: aging.map(|aging| (aging.machine.durable(), aging.machine.under_way())),
            within: in_force.and_then(Aging::allows),
            is_held: log.is_open(),
            has_begun: aging.is_some(),
            reason: match &state.why_not {
                None if is_missing && state.is_leaving => {
                    Some("its journal is on its way to storage, and only held until it is there".to_owned())
                }
                None if is_missing => Some("not yet: what is held becomes durable first".to_owned()),
                None if is_at_once => {
                    Some("its bitmaps are not understood, so every commit is durable at once".to_owned())
                }
                why => why.clone(),
            },
        }
    }
}

pub(super) fn sum(one: &durability::Status, other: &durability::Status) -> durability::Status {
    durability::Status {
        oldest: None,
        compounds: one.compounds + other.compounds,
        compound_blocks: one.compound_blocks + other.compound_blocks,
        append_blocks: one.append_blocks + other.append_blocks,
        blocks_brought_home: one.blocks_brought_home + other.blocks_brought_home,
        writes_held: one.writes_held + other.writes_held,
        discards_held: one.discards_held + other.discards_held,
    }
}
