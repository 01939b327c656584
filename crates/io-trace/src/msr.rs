//! MSR-Cambridge CSV: `Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime`.
//!
//! The timestamp is a Windows filetime (units of 100 ns since 1601), offset and size are bytes. Times become
//! relative to the first request. Hostname is the VM, DiskNumber the disk.

use crate::text::{LineFormat, disk_of, number, shown};
use crate::{Kind, Names, Record};

#[derive(Default)]
pub(crate) struct Msr {
    first: Option<u64>,
}

impl LineFormat for Msr {
    const NAME: &'static str = "msr";

    fn line(&mut self, line: &str, names: &mut Names) -> Result<Option<Record>, String> {
        let mut fields = [""; 7];
        let mut count = 0;
        for field in line.split(',') {
            if let Some(slot) = fields.get_mut(count) {
                *slot = field.trim();
            }
            count += 1;
        }
        if count != 7 {
            return Err(format!("{count} fields instead of the 7 of MSR-Cambridge CSV"));
        }
        if self.first.is_none() && fields[0].eq_ignore_ascii_case("timestamp") {
            return Ok(None);
        }
        let ticks = number("timestamp", fields[0])?;
        let kind = match fields[3] {
            t if t.eq_ignore_ascii_case("read") => Kind::Read,
            t if t.eq_ignore_ascii_case("write") => Kind::Home,
            other => return Err(format!("the type `{}` is neither Read nor Write", shown(other))),
        };
        number("disk number", fields[2])?;
        let (address, length) = (number("offset", fields[4])?, number("size", fields[5])?);
        if length == 0 {
            return Ok(None);
        }
        let first = *self.first.get_or_insert(ticks);
        let time_ns = ticks.saturating_sub(first).saturating_mul(100);
        let (vm, disk) = disk_of(names, fields[1], fields[2])?;
        Ok(Some(Record { time_ns, address, length, vm, disk, kind }))
    }
}
