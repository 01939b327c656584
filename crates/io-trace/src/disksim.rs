//! DiskSim ASCII, `time device sector sectors flags` separated by blanks or tabs, in its two flavours.
//!
//! DiskSim itself: time in milliseconds, flags in hexadecimal with bit 0 set for a read. SSDsim and MQSim:
//! time in integer nanoseconds, 0 a write and 1 a read. The columns look alike, so the flavour is asked for
//! and each refuses what only the other can hold where that can be told.

use crate::text::{LineFormat, disk_of, number, sectors, shown, time_ns};
use crate::{Kind, Names, Record};

pub(crate) struct DiskSim {
    nanoseconds: bool,
}

impl DiskSim {
    pub(crate) fn milliseconds() -> DiskSim {
        DiskSim { nanoseconds: false }
    }

    pub(crate) fn nanoseconds() -> DiskSim {
        DiskSim { nanoseconds: true }
    }
}

impl LineFormat for DiskSim {
    const NAME: &'static str = "disksim";

    fn name(&self) -> &'static str {
        if self.nanoseconds { "ssdsim" } else { "disksim" }
    }

    fn line(&mut self, line: &str, names: &mut Names) -> Result<Option<Record>, String> {
        if line.starts_with('#') {
            return Ok(None);
        }
        let mut fields = [""; 5];
        let mut count = 0;
        for field in line.split_ascii_whitespace() {
            if let Some(slot) = fields.get_mut(count) {
                *slot = field;
            }
            count += 1;
        }
        if count != 5 {
            return Err(format!("{count} columns instead of 5: time, device, sector, sectors, flags"));
        }
        let [time, device, sector, count, flags] = fields;
        let (time_ns, kind) = if self.nanoseconds {
            let time_ns = number("time in nanoseconds", time)
                .map_err(|e| format!("{e} (a fraction means milliseconds: --format disksim)"))?;
            match flags {
                "0" => (time_ns, Kind::Home),
                "1" => (time_ns, Kind::Read),
                other => return Err(format!("the type `{}` is neither 0 (write) nor 1 (read)", shown(other))),
            }
        } else {
            let time_ns = time_ns(time, 1_000_000)?;
            let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16)
                .map_err(|_| format!("the flags `{}` are not a hexadecimal number", shown(flags)))?;
            (time_ns, if flags & 1 == 1 { Kind::Read } else { Kind::Home })
        };
        number("device", device)?;
        let (address, length) = (sectors("sector", sector)?, sectors("count of sectors", count)?);
        if length == 0 {
            return Ok(None);
        }
        let (vm, disk) = disk_of(names, "host", device)?;
        Ok(Some(Record { time_ns, address, length, vm, disk, kind }))
    }
}
