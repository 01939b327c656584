//! fio iologs, version 2 (`file action offset length`) and 3 (a leading time in microseconds since the start).
//!
//! Version 2 knows time only through `wait` lines (microseconds). Each file is a disk.

use crate::text::{LineFormat, disk_of, number, shown};
use crate::{Kind, Names, Record};

#[derive(Default)]
pub(crate) struct Fio {
    version: u8,
    clock_us: u64,
}

impl LineFormat for Fio {
    const NAME: &'static str = "fio";

    fn line(&mut self, line: &str, names: &mut Names) -> Result<Option<Record>, String> {
        if self.version == 0 {
            self.version = match line {
                "fio version 2 iolog" => 2,
                "fio version 3 iolog" => 3,
                other => {
                    return Err(format!("`{}` is not `fio version 2 iolog` or `fio version 3 iolog`", shown(other)));
                }
            };
            return Ok(None);
        }
        let mut fields = line.split_ascii_whitespace();
        if self.version == 3 {
            self.clock_us = number("time in microseconds", fields.next().unwrap_or(""))?;
        }
        let mut field =
            |what: &str| fields.next().ok_or_else(|| format!("the {what} is missing: file action [offset length]"));
        let (file, action) = (field("file")?, field("action")?);
        let kind = match action {
            "add" | "open" | "close" => return Ok(None),
            "wait" => {
                self.clock_us = self.clock_us.saturating_add(number("wait in microseconds", field("wait")?)?);
                return Ok(None);
            }
            "read" => Kind::Read,
            "write" => Kind::Home,
            "trim" => Kind::Discard,
            "sync" | "datasync" => Kind::Flush,
            other => return Err(format!("the action `{}` is unknown", shown(other))),
        };
        let (address, length) = match kind {
            Kind::Flush => (0, 0),
            _ => (number("offset", field("offset")?)?, number("length", field("length")?)?),
        };
        if length == 0 && kind != Kind::Flush {
            return Ok(None);
        }
        let (vm, disk) = disk_of(names, "host", file)?;
        let time_ns = self.clock_us.saturating_mul(1000);
        Ok(Some(Record { time_ns, address, length, vm, disk, kind }))
    }
}
