//! Who is killed, and how: guest, QEMU, amberlog, in every order.

use guest_kit::{Guest, Result, Signal};
use guest_tools::random::Random;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(180);
/// Between two kills, at most.
const MOMENT_US_MAX: u64 = 60_000;
/// How long amberlog stands still at most, while the guest piles up commits and faults on protected pages.
const FROZEN_US_MAX: u64 = 600_000;
/// How long after its reset a guest is left alone at most: firmware, boot, recovery, mount.
const BOOT_US_MAX: u64 = 4_000_000;

/// A way to end a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// `kill -9` of amberlog alone: the kernel ends QEMU.
    AmberlogAlone,
    /// SIGABRT to amberlog: what a panic in any of its threads does.
    AmberlogAborts,
    /// `kill -9` of QEMU, and a moment later of amberlog, which is recovering.
    QemuFirst,
    /// The same with SIGABRT.
    QemuFirstThenAbort,
    /// The machine is reset, and a moment later, while it boots and its logs are recovered, all are killed.
    GuestThenBoth,
    /// The machine is reset, and a moment later amberlog aborts.
    GuestThenAbort,
    /// amberlog stands still while the guest works on: commits and copy-on-write faults are pending. Then it is killed.
    FrozenAmberlogFirst,
    /// The same, but QEMU is killed first; amberlog is killed, or goes on and recovers.
    FrozenQemuFirst,
}

impl Victim {
    const ALL: [(Self, &'static str); 14] = [
        (Self::Qemu, "qemu"),
        (Self::QemuQuits, "qemu-quits"),
        (Self::Guest, "guest"),
        (Self::AmberlogAsked, "amberlog-asked"),
        (Self::Both, "both"),
        (Self::AmberlogFirst, "amberlog-first"),
        (Self::AmberlogAlone, "amberlog-alone"),
        (Self::AmberlogAborts, "amberlog-aborts"),
        (Self::QemuFirst, "qemu-first"),
        (Self::QemuFirstThenAbort, "qemu-first-then-abort"),
        (Self::GuestThenBoth, "guest-then-both"),
        (Self::GuestThenAbort, "guest-then-abort"),
        (Self::FrozenAmberlogFirst, "frozen-amberlog-first"),
        (Self::FrozenQemuFirst, "frozen-qemu-first"),
    ];

    /// Those that there are with QEMU's own disks, or under amberlog.
    pub fn possible(plain: bool) -> Vec<Self> {
        let count = if plain { 3 } else { Self::ALL.len() };
        Self::ALL[..count].iter().map(|(victim, _)| *victim).collect()
    }

    /// Whether all may die while a machine that was reset mounts again.
    pub fn dies_at_boot(self) -> bool {
        matches!(self, Self::GuestThenBoth | Self::GuestThenAbort)
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
        let mut pause = |us_max: u64| std::thread::sleep(Duration::from_micros(random.below(us_max)));
        let qemu = guest.qemu_pid()?;
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
                guest.signal(Signal::KILL)?;
                pause(MOMENT_US_MAX);
                // QEMU may have ended by itself for want of its disks.
                let _ = guest.kill_qemu();
            }
            Self::AmberlogAlone => guest.signal(Signal::KILL)?,
            Self::AmberlogAborts => guest.signal(Signal::ABORT)?,
            Self::QemuFirst | Self::QemuFirstThenAbort => {
                guest.kill_qemu()?;
                pause(MOMENT_US_MAX);
                // amberlog may be through already: then there is nothing to finish.
                let _ = guest.signal(if self == Self::QemuFirst { Signal::KILL } else { Signal::ABORT });
            }
            Self::GuestThenBoth | Self::GuestThenAbort => {
                guest.qmp()?.system_reset()?;
                pause(BOOT_US_MAX);
                if self == Self::GuestThenBoth {
                    let _ = guest.kill_all()?;
                } else {
                    guest.signal(Signal::ABORT)?;
                }
            }
            Self::FrozenAmberlogFirst => {
                guest.signal(Signal::STOP)?;
                pause(FROZEN_US_MAX);
                guest.signal(Signal::KILL)?;
            }
            Self::FrozenQemuFirst => {
                guest.signal(Signal::STOP)?;
                pause(FROZEN_US_MAX);
                guest.kill_qemu()?;
                pause(MOMENT_US_MAX);
                guest.signal(if random.below(2) == 0 { Signal::KILL } else { Signal::CONT })?;
            }
        }
        let status = guest.wait_end(LIMIT)?;
        if !guest_kit::program::has_ended_within(qemu, LIMIT) {
            return Err(guest_kit::Error::Assets(format!("QEMU, process {qemu}, lives on after it was killed")));
        }
        Ok(matches!(status.signal(), Some(6 | 9)) && self != Self::Qemu && self != Self::Guest)
    }
}
