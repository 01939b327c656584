//! Whether guests run under KVM or under emulation (TCG). `/dev/kvm` may exist and still not boot
//! a stock kernel, so a tiny guest is booted once and the answer kept in
//! `build/guest/accelerator`, for as long as host kernel and QEMU stay the same.
//!
//! The environment variable `ACCEL` (`kvm` or `tcg`) forces the answer.

use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::program;
use crate::spec::{AtEnd, GuestSpec};
use std::sync::OnceLock;
use std::time::Duration;

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor, through the host kernel.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accelerator {
    /// The word that QEMU and `ACCEL` use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        [Self::Kvm, Self::Tcg].into_iter().find(|accelerator| accelerator.name() == name)
    }

    /// The accelerator that this machine is to use.
    pub fn choose() -> Result<Self> {
        static CHOICE: OnceLock<std::result::Result<Accelerator, String>> = OnceLock::new();
        CHOICE.get_or_init(|| choose().map_err(|error| error.to_string())).clone().map_err(Error::Assets)
    }
}

fn choose() -> Result<Accelerator> {
    if let Some(forced) = std::env::var_os("ACCEL").filter(|value| !value.is_empty()) {
        let forced = forced.to_string_lossy().into_owned();
        return Accelerator::parse(&forced)
            .ok_or_else(|| Error::Assets(format!("ACCEL is '{forced}'; it must be 'kvm' or 'tcg', or unset")));
    }
    let openable = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    if !openable {
        return Ok(Accelerator::Tcg);
    }
    let version = program::run(program::command("qemu-system-x86_64")?.arg("--version"), &[0])?;
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let key =
        format!("{} {}", host.trim(), String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default());
    let memory = program::workspace().join("build/guest/accelerator");
    if let Ok(text) = std::fs::read_to_string(&memory)
        && let Some((answer, remembered)) = text.trim_end().split_once('\n')
        && remembered == key
        && let Some(accelerator) = Accelerator::parse(answer)
    {
        return Ok(accelerator);
    }
    let answer = if kvm_boots() { Accelerator::Kvm } else { Accelerator::Tcg };
    // Only a memory: if it cannot be kept, the next process asks again.
    let _ = std::fs::write(&memory, format!("{}\n{key}\n", answer.name()));
    Ok(answer)
}

fn kvm_boots() -> bool {
    let mut spec = GuestSpec::new("kvm-probe", "true");
    spec.accelerator = Some(Accelerator::Kvm);
    spec.at_end = AtEnd::PowerOffNow;
    let Ok(mut guest) = Guest::launch(spec) else { return false };
    guest.forgive();
    guest.wait_exit_code(Duration::from_secs(20)).is_ok_and(|code| code == 0)
}
