//! blkparse's default text: `maj,min cpu seq sec.nsec pid action rwbs sector + n [process]`.
//!
//! One action stands for the request, or it would be counted several times: Q (queued) or D (issued to the
//! driver). Other actions, requests of kind N and of no sectors, messages and the closing summary are ignored.

use crate::text::{LineFormat, disk_of, sectors, shown, time_ns};
use crate::{Kind, Names, Record};

pub(crate) struct Blkparse {
    action: Option<u8>,
    in_summary: bool,
}

impl Blkparse {
    pub(crate) fn new(action: Option<u8>) -> Blkparse {
        Blkparse { action, in_summary: false }
    }
}

impl LineFormat for Blkparse {
    const NAME: &'static str = "blkparse";

    fn line(&mut self, line: &str, names: &mut Names) -> Result<Option<Record>, String> {
        // The summary begins with "CPU0 (sda):" or "Total (sda):" and goes on to the end.
        self.in_summary |= line.starts_with("CPU") || line.starts_with("Total (");
        if self.in_summary {
            return Ok(None);
        }
        let mut fields = line.split_ascii_whitespace();
        let mut field = |what: &str| {
            fields
                .next()
                .ok_or_else(|| format!("the {what} is missing: maj,min cpu seq time pid action rwbs sector + n"))
        };
        let device = field("device")?;
        let numbers = device.split_once(',').map(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok());
        if numbers != Some(true) {
            return Err(format!("the device `{}` is not of the form major,minor", shown(device)));
        }
        let (_cpu, _sequence, time) = (field("CPU")?, field("sequence number")?, field("time")?);
        let time_ns = time_ns(time, 1_000_000_000)?;
        let (_pid, action) = (field("process id")?, field("action")?);
        let &[action] = action.as_bytes() else {
            // Two-letter actions (UT, …) are never requests.
            return Ok(None);
        };
        if self.action.is_none() && matches!(action, b'Q' | b'D') {
            self.action = Some(action);
        }
        if self.action != Some(action) {
            return Ok(None);
        }
        let rwbs = field("rwbs")?;
        let sector = fields.next();
        let has_data = fields.next() == Some("+");
        let count = fields.next();
        let flushes = rwbs.starts_with('F');
        let kind = match rwbs.trim_start_matches('F').bytes().next() {
            Some(b'R') => Kind::Read,
            Some(b'W') => Kind::Home,
            Some(b'D') => Kind::Discard,
            Some(b'N') | None => Kind::Flush,
            Some(_) if flushes => Kind::Flush,
            Some(_) => return Err(format!("the kind `{}` has none of R, W, D, F and N", shown(rwbs))),
        };
        let (address, length) = match (sector, count, has_data) {
            (Some(sector), Some(count), true) => (sectors("sector", sector)?, sectors("count of sectors", count)?),
            _ => (0, 0),
        };
        if length == 0 || kind == Kind::Flush {
            if !flushes {
                return Ok(None);
            }
            let (vm, disk) = disk_of(names, "host", device)?;
            return Ok(Some(Record { time_ns, address: 0, length: 0, vm, disk, kind: Kind::Flush }));
        }
        let (vm, disk) = disk_of(names, "host", device)?;
        Ok(Some(Record { time_ns, address, length, vm, disk, kind }))
    }
}
