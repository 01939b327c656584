//! What a VMM has said of its device and still holds: enough to tell another worker.
//!
//! Only what has been taken in counts: a message that is to be answered is noted with its answer. The order in which it is told
//! again is that in which QEMU tells a back-end that it connects to again.

use crate::message::{Message, SET_LOG_BASE};
use std::collections::BTreeMap;
use std::sync::Arc;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const RESET_OWNER: u32 = 4;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const RESET_DEVICE: u32 = 34;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

/// Of the device as a whole, in the order in which it is told again; rings come after.
/// What was asked for comes first: a worker that was not asked for its features takes none that are set, and answers nobody who wants to know
/// that a message was understood.
/// The log is there before the features say that it is wanted, and before a ring is started: whoever is told marks at once what a dead worker
/// may have written and not marked.
const OF_DEVICE: [u32; 10] = [
    GET_FEATURES,
    GET_PROTOCOL_FEATURES,
    SET_OWNER,
    SET_PROTOCOL_FEATURES,
    SET_BACKEND_REQ_FD,
    SET_LOG_BASE,
    SET_FEATURES,
    GET_INFLIGHT_FD,
    SET_INFLIGHT_FD,
    SET_MEM_TABLE,
];
/// VHOST_F_LOG_ALL, of the features.
const LOG_ALL: u32 = 1 << 26;
/// Of a ring, likewise: the kick descriptor starts it.
/// It is enabled when all rings are started: whoever is told takes nothing from one before it knows of all, and where each of them is.
const OF_RING: [u32; 6] =
    [SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ADDR, SET_VRING_ERR, SET_VRING_CALL, SET_VRING_KICK];
/// The most rings that are noted.
const RINGS_MAX: u32 = 64;
/// The most regions of memory.
const REGIONS_MAX: usize = 128;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Record {
    device: BTreeMap<u32, Arc<Message>>,
    rings: BTreeMap<(u32, u32), Arc<Message>>,
    regions: Vec<Arc<Message>>,
    /// The VMM has asked for a new in-flight region, and no worker has begun with it: its driver starts anew.
    is_fresh: bool,
}

/// Which ring a message is about.
fn ring_of(message: &Message) -> u32 {
    match message.code {
        // The lowest byte; above it a flag.
        SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => message.word(0) & 0xff,
        _ => message.word(0),
    }
}

/// What a region of memory is known by: where it is for the guest, how long, where the VMM has it.
fn region_of(message: &Message) -> Option<&[u8]> {
    message.payload.get(8..32)
}

impl Record {
    /// A message has been taken in by a worker, and answered with `answer` if it has one.
    pub fn note(&mut self, message: &Arc<Message>, answer: Option<&Message>) {
        if !message.is_question() && answer.is_some_and(|answer| answer.word(0) != 0 || answer.word(4) != 0) {
            // It was refused.
            return;
        }
        let code = message.code;
        match code {
            SET_MEM_TABLE => {
                self.regions.clear();
                self.device.insert(code, Arc::clone(message));
            }
            SET_FEATURES => {
                if message.word(0) & LOG_ALL == 0 {
                    // The VMM has let go of it.
                    self.device.remove(&SET_LOG_BASE);
                }
                self.device.insert(code, Arc::clone(message));
            }
            GET_INFLIGHT_FD => {
                self.is_fresh = true;
                self.device.insert(code, Arc::clone(message));
            }
            // The answer is the same each time.
            GET_FEATURES | GET_PROTOCOL_FEATURES if self.device.contains_key(&code) => {}
            _ if OF_DEVICE.contains(&code) => {
                self.device.insert(code, Arc::clone(message));
            }
            _ if OF_RING.contains(&code) || code == SET_VRING_ENABLE => {
                let ring = ring_of(message);
                if ring < RINGS_MAX {
                    self.rings.insert((ring, code), Arc::clone(message));
                }
            }
            GET_VRING_BASE => {
                let ring = ring_of(message);
                self.rings.remove(&(ring, SET_VRING_KICK));
                if let Some(answer) = answer
                    && ring < RINGS_MAX
                {
                    let base = Arc::new(Message::new(SET_VRING_BASE, answer.payload.clone()));
                    self.rings.insert((ring, SET_VRING_BASE), base);
                }
            }
            RESET_OWNER | RESET_DEVICE => {
                for gone in [SET_FEATURES, GET_INFLIGHT_FD, SET_INFLIGHT_FD, SET_LOG_BASE] {
                    self.device.remove(&gone);
                }
                self.rings.clear();
                self.is_fresh = true;
            }
            ADD_MEM_REG if self.regions.len() < REGIONS_MAX => self.regions.push(Arc::clone(message)),
            REM_MEM_REG => self.regions.retain(|known| region_of(known) != region_of(message)),
            _ => {}
        }
    }

    /// The driver has been let in: whoever comes next goes on with it.
    pub fn began(&mut self) {
        self.is_fresh = false;
    }

    /// All of it, each with a name that no other one has.
    pub fn items(&self) -> BTreeMap<String, Arc<Message>> {
        let of_device = self.device.iter().map(|(code, message)| (format!("device {code}"), message));
        let of_rings = self.rings.iter().map(|((ring, code), message)| (format!("ring {ring} {code}"), message));
        let regions = self.regions.iter().enumerate().map(|(index, message)| (format!("region {index:04}"), message));
        of_device.chain(of_rings).chain(regions).map(|(name, message)| (name, Arc::clone(message))).collect()
    }

    /// The same again. Nothing if that is not what [`Record::items`] gives.
    pub fn of(items: &BTreeMap<String, Arc<Message>>, is_fresh: bool) -> Option<Self> {
        let mut record = Record { is_fresh, ..Record::default() };
        for (name, message) in items {
            let message = Arc::clone(message);
            let words: Vec<&str> = name.split(' ').collect();
            match words.as_slice() {
                ["device", code] => drop(record.device.insert(code.parse().ok()?, message)),
                ["ring", ring, code] => {
                    drop(record.rings.insert((ring.parse().ok()?, code.parse().ok()?), message));
                }
                ["region", _] => record.regions.push(message),
                _ => return None,
            }
        }
        Some(record)
    }

    /// Whether its driver starts anew.
    pub fn is_fresh(&self) -> bool {
        self.is_fresh
    }

    /// Whether a ring was started and there is no in-flight region, which alone says how far it has got.
    pub fn is_positionless(&self) -> bool {
        !self.device.contains_key(&SET_INFLIGHT_FD) && self.rings.keys().any(|(_, code)| *code == SET_VRING_KICK)
    }

    /// What another worker has to be told, in order. Answers to it are nobody's.
    pub fn told_again(&self) -> Vec<Arc<Message>> {
        let mut all = Vec::new();
        let question = |code, payload| Arc::new(Message::new(code, payload));
        for code in OF_DEVICE {
            let Some(message) = self.device.get(&code) else { continue };
            match code {
                // What may be set has to have been asked for, and is in any case.
                GET_FEATURES if self.device.contains_key(&SET_PROTOCOL_FEATURES) => continue,
                GET_FEATURES if self.device.contains_key(&SET_FEATURES) => continue,
                GET_PROTOCOL_FEATURES if self.device.contains_key(&SET_PROTOCOL_FEATURES) => continue,
                SET_PROTOCOL_FEATURES => {
                    all.push(question(GET_FEATURES, Vec::new()));
                    all.push(question(GET_PROTOCOL_FEATURES, Vec::new()));
                }
                SET_FEATURES => all.push(question(GET_FEATURES, Vec::new())),
                // Whoever asks for a region has a driver that starts anew, even if it dies before the region is set.
                GET_INFLIGHT_FD if !self.is_fresh => continue,
                // An earlier amberlog has not noted the question.
                SET_INFLIGHT_FD if self.is_fresh && !self.device.contains_key(&GET_INFLIGHT_FD) => {
                    all.push(question(GET_INFLIGHT_FD, message.payload.clone()));
                }
                _ => {}
            }
            all.push(Arc::clone(message));
        }
        all.extend(self.regions.iter().cloned());
        let numbers: std::collections::BTreeSet<u32> = self.rings.keys().map(|(ring, _)| *ring).collect();
        for ring in &numbers {
            all.extend(OF_RING.iter().filter_map(|code| self.rings.get(&(*ring, *code)).cloned()));
        }
        all.extend(numbers.iter().filter_map(|ring| self.rings.get(&(*ring, SET_VRING_ENABLE)).cloned()));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn say(record: &mut Record, code: u32, payload: &[u32]) {
        record.note(&Arc::new(Message::new(code, words(payload))), None);
    }

    fn codes(record: &Record) -> Vec<u32> {
        record.told_again().iter().map(|message| message.code).collect()
    }

    fn start(record: &mut Record) {
        record.note(&Arc::new(Message::new(GET_INFLIGHT_FD, words(&[0; 6]))), Some(&Message::new(31, words(&[0; 6]))));
        say(record, SET_INFLIGHT_FD, &[0; 6]);
        say(record, SET_FEATURES, &[1, 0]);
        say(record, SET_MEM_TABLE, &[1, 0]);
        for ring in [0, 1] {
            for code in OF_RING.into_iter().chain([SET_VRING_ENABLE]) {
                say(record, code, &[ring, 128]);
            }
        }
    }

    #[test]
    fn another_worker_hears_what_a_vmm_that_connects_again_would_say() {
        let mut record = Record::default();
        assert!(codes(&record).is_empty());
        // It is asked what it has been asked, before anything is set.
        for (asked, again) in
            [(GET_FEATURES, vec![1]), (GET_PROTOCOL_FEATURES, vec![1, 15]), (GET_FEATURES, vec![1, 15])]
        {
            record.note(&Arc::new(Message::new(asked, Vec::new())), Some(&Message::new(asked, words(&[7, 7]))));
            assert_eq!(codes(&record), again);
        }
        say(&mut record, SET_OWNER, &[]);
        say(&mut record, SET_PROTOCOL_FEATURES, &[7, 0]);
        let asked = Arc::new(Message::new(GET_INFLIGHT_FD, words(&[0; 6])));
        record.note(&asked, Some(&Message::new(31, words(&[0; 6]))));
        assert_eq!(codes(&record), [3, 1, 15, 16, 31], "it starts anew, and has not said where");
        start(&mut record);
        let rings = [&OF_RING[..], &OF_RING[..], &[SET_VRING_ENABLE, SET_VRING_ENABLE]].concat();
        let fresh = [vec![3, 1, 15, 16, 1, 2, 31, 32, 5], rings.clone()].concat();
        assert_eq!(codes(&record), fresh, "nobody has begun yet");
        record.began();
        let going_on = [vec![3, 1, 15, 16, 1, 2, 32, 5], rings].concat();
        assert_eq!(codes(&record), going_on);
    }

    /// What dies amid a migration is followed by who marks pages in the same log, and none in one that the VMM has let go of.
    #[test]
    fn a_log_of_written_pages_is_told_again_while_it_is_wanted() {
        let mut record = Record::default();
        say(&mut record, SET_PROTOCOL_FEATURES, &[7, 0]);
        start(&mut record);
        record.began();
        let descriptor = std::fs::File::open("/dev/null").expect("opened").into();
        let log = Message { descriptors: vec![descriptor], ..Message::new(SET_LOG_BASE, words(&[4096, 0, 0, 0])) };
        assert!(log.is_question() && log.is_answered());
        // It is answered with what was said, which is no refusal.
        record.note(&Arc::new(log), Some(&Message::new(SET_LOG_BASE, words(&[4096, 0, 0, 0]))));
        say(&mut record, SET_FEATURES, &[LOG_ALL | 1, 0]);
        let rings = [&OF_RING[..], &OF_RING[..], &[SET_VRING_ENABLE, SET_VRING_ENABLE]].concat();
        let logging = [vec![1, 15, 16, 6, 1, 2, 32, 5], rings.clone()].concat();
        assert_eq!(codes(&record), logging);
        let again = Record::of(&record.items(), false).expect("understood");
        assert_eq!(codes(&again), logging);
        assert_eq!(again.told_again()[3].descriptors.len(), 1);
        say(&mut record, SET_FEATURES, &[1, 0]);
        let without = [vec![1, 15, 16, 1, 2, 32, 5], rings].concat();
        assert_eq!(codes(&record), without);
    }

    #[test]
    fn what_is_written_down_is_the_whole_record() {
        let mut record = Record::default();
        start(&mut record);
        for region in 0..12u8 {
            record.note(&Arc::new(Message::new(ADD_MEM_REG, vec![region; 40])), None);
        }
        let payloads = |record: &Record| -> Vec<_> {
            record.told_again().iter().map(|message| (message.code, message.payload.clone())).collect()
        };
        for is_fresh in [true, false] {
            let again = Record::of(&record.items(), is_fresh).expect("understood");
            assert_eq!(again.is_fresh(), is_fresh);
            assert_eq!(payloads(&again), payloads(&record), "in the same order, too");
            record.began();
        }
        let strange = BTreeMap::from([("ring x 12".to_owned(), Arc::new(Message::new(12, Vec::new())))]);
        assert!(Record::of(&strange, false).is_none());
    }

    #[test]
    fn a_ring_that_was_stopped_stays_so_where_it_stopped() {
        let mut record = Record::default();
        start(&mut record);
        record.began();
        let stop = Arc::new(Message::new(GET_VRING_BASE, words(&[1, 0])));
        record.note(&stop, Some(&Message::new(GET_VRING_BASE, words(&[1, 4711]))));
        let again = record.told_again();
        let of_one: Vec<_> = again.iter().filter(|m| OF_RING.contains(&m.code) && ring_of(m) == 1).collect();
        assert!(of_one.iter().all(|message| message.code != SET_VRING_KICK));
        assert!(of_one.iter().any(|message| message.code == SET_VRING_BASE && message.word(4) == 4711));
        assert!(again.iter().any(|message| message.code == SET_VRING_KICK && ring_of(message) == 0));
        say(&mut record, RESET_DEVICE, &[]);
        assert_eq!(codes(&record), [SET_MEM_TABLE], "memory stays over a reset");
    }

    #[test]
    fn what_was_refused_is_not_said_again() {
        let mut record = Record::default();
        let refused = Arc::new(Message { flags: 9, ..Message::new(ADD_MEM_REG, vec![1; 40]) });
        record.note(&refused, Some(&Message::new(ADD_MEM_REG, words(&[1, 0]))));
        assert!(codes(&record).is_empty());
        record.note(&refused, Some(&Message::new(ADD_MEM_REG, words(&[0, 0]))));
        let other = Arc::new(Message::new(ADD_MEM_REG, vec![2; 40]));
        record.note(&other, None);
        assert_eq!(codes(&record), [ADD_MEM_REG, ADD_MEM_REG]);
        record.note(&Arc::new(Message::new(REM_MEM_REG, vec![1; 40])), None);
        assert_eq!(record.told_again()[0].payload, other.payload);
        say(&mut record, SET_MEM_TABLE, &[0, 0]);
        assert_eq!(codes(&record), [SET_MEM_TABLE]);
    }
}
