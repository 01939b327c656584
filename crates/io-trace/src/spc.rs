//! SPC traces (UMass repository: Financial, WebSearch): `ASU,LBA,Size,Opcode,Timestamp[,…]`.
//!
//! LBA counts 512-byte blocks, size is bytes, the opcode is R or W in either case, the time is in seconds.
//! Each application storage unit (ASU) becomes a disk of its own: their addresses overlap, and how they are
//! laid out on one device is the replaying side's choice.

use crate::text::{LineFormat, disk_of, number, sectors, shown, time_ns};
use crate::{Kind, Names, Record};

#[derive(Default)]
pub(crate) struct Spc;

impl LineFormat for Spc {
    const NAME: &'static str = "spc";

    fn line(&mut self, line: &str, names: &mut Names) -> Result<Option<Record>, String> {
        let mut fields = line.split(',').map(str::trim);
        let mut field =
            |what: &str| fields.next().ok_or_else(|| format!("the {what} is missing: ASU,LBA,Size,Opcode,Timestamp"));
        let (asu, lba, size) = (field("ASU")?, field("LBA")?, field("size")?);
        let (opcode, time) = (field("opcode")?, field("timestamp")?);
        number("ASU", asu)?;
        let kind = match opcode {
            "r" | "R" => Kind::Read,
            "w" | "W" => Kind::Home,
            other => return Err(format!("the opcode `{}` is neither R nor W", shown(other))),
        };
        let (address, length) = (sectors("LBA", lba)?, number("size", size)?);
        let time_ns = time_ns(time, 1_000_000_000)?;
        if length == 0 {
            return Ok(None);
        }
        let (vm, disk) = disk_of(names, "host", &format!("asu{asu}"))?;
        Ok(Some(Record { time_ns, address, length, vm, disk, kind }))
    }
}
