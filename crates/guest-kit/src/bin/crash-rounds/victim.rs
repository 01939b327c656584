//! Who is killed, and how: guest, QEMU, amberlog, in every order.

use guest_kit::{Guest, Result, Signal};
use guest_tools::random::Random;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(180);

/// A way to end a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// `kill -9` of QEMU.
    Qemu,
    /// QEMU quits in its own good order; the guest is not asked.
    QemuQuits,
    /// The machine is reset, boots again and mounts; then QEMU is killed.
    Guest,
    /// SIGTERM to amberlog.
    AmberlogAsked,
    /// `kill -9` of amberlog and QEMU at once.
    Both,
    /// `kill -9` of amberlog, and a moment later of QEMU.
    AmberlogFirst,
    /// `kill -9` of QEMU, and a moment later of amberlog, which is recovering.
    QemuFirst,
}

impl Victim {
    const ALL: [(Self, &'static str); 7] = [
        (Self::Qemu, "qemu"),
        (Self::QemuQuits, "qemu-quits"),
        (Self::Guest, "guest"),
        (Self::AmberlogAsked, "amberlog-asked"),
        (Self::Both, "both"),
        (Self::AmberlogFirst, "amberlog-first"),
        (Self::QemuFirst, "qemu-first"),
    ];

    /// Those that there are with QEMU's own disks, or under amberlog.
    pub fn possible(plain: bool) -> Vec<Self> {
        let count = if plain { 3 } else { Self::ALL.len() };
        Self::ALL[..count].iter().map(|(victim, _)| *victim).collect()
    }

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(victim, _)| *victim == self).map_or("?", |(_, name)| name)
    }

    pub fn parse(name: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.iter().find(|(_, known)| *known == name).map(|(victim, _)| *victim);
        found.ok_or_else(|| {
            let names = Self::ALL.map(|(_, name)| name).join(", ");
            format!("--victim is '{name}'; it must be one of {names}")
        })
    }

    /// Does it. Gives whether amberlog was killed, so that its work is left to be finished.
    pub fn strike(self, guest: &mut Guest, random: &mut Random) -> Result<bool> {
        let moment = Duration::from_micros(random.below(60_000));
        match self {
            Self::Qemu => guest.kill_qemu()?,
            Self::QemuQuits => guest.qmp()?.quit()?,
            Self::Guest => {
                guest.qmp()?.system_reset()?;
                guest.wait_mark("back again", LIMIT)?;
                guest.kill_qemu()?;
            }
            Self::AmberlogAsked => guest.signal(Signal::TERM)?,
            Self::Both => drop(guest.kill_all()?),
            Self::AmberlogFirst => {
                let qemu = guest.qemu_pid()?;
                guest.signal(Signal::KILL)?;
                std::thread::sleep(moment);
                // QEMU may have ended by itself for want of its disks.
                let _ = guest.kill_qemu();
                await_end_of(qemu);
            }
            Self::QemuFirst => {
                guest.kill_qemu()?;
                std::thread::sleep(moment);
                // amberlog may be through already: then there is nothing to finish.
                let _ = guest.signal(Signal::KILL);
            }
        }
        let status = guest.wait_end(LIMIT)?;
        Ok(self.kills_amberlog() && status.signal() == Some(9))
    }

    fn kills_amberlog(self) -> bool {
        matches!(self, Self::Both | Self::AmberlogFirst | Self::QemuFirst)
    }
}

/// A process that is not our child, so only its entry in /proc tells.
fn await_end_of(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let there = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // "PID (name) STATE …": a zombie has released everything.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    };
    while there() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
}
