//! Which platform guests get here, accelerator, kernel, processor and firmware, and guests started on it.
//!
//! | host | guests |
//! |---|---|
//! | `/dev/kvm` on which Debian's stock kernel boots | KVM, stock kernel |
//! | a KVM without hardware virtualisation below it, whose signature MSR says so: it interprets the kernel mode of any guest that does not know of it, thousands of times too slowly | KVM with a paravirtual kernel, if there is one and it boots; else as below |
//! | anything else | emulation (TCG), stock kernel |
//!
//! The paravirtual kernel is an asset that a checkout need not have: `shared/kernel/vmlinux-kvm`, beside the checkout or beside
//! a directory above it. It has one processor and no modules. A guest that needs more gets the stock kernel, emulated.
//!
//! Nothing is assumed: a tiny guest is booted once, and the answer kept in `build/guest/accelerator` for as long as host
//! kernel, QEMU and guests' kernel stay the same.
//!
//! `ACCEL` (`kvm` or `tcg`) forces the accelerator; `AMBERLOG_GUEST_KERNEL`, a bzImage or an uncompressed vmlinux with all that
//! a guest needs built in, the kernel; `AMBERLOG_GUEST_CPU` and `AMBERLOG_GUEST_BIOS` QEMU's `-cpu` and `-bios` with it.
//!
//! Failure story: a wrong environment variable is an error that says what it must be; a probe that fails means emulation.

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::kernel::Kernel;
use crate::platform::{Kvm, Platform, kvm};
use crate::program;
use crate::report::Reported;
use crate::spec::{AtEnd, GuestSpec};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// How long a stock kernel may take to prove that it runs.
const STOCK_LIMIT: Duration = Duration::from_secs(20);
/// It takes a second and a half, but here we know that it is worth waiting for.
const PARAVIRTUAL_LIMIT: Duration = Duration::from_secs(60);

impl Platform {
    /// What guests of one processor that need no modules run on.
    ///
    /// # Errors
    /// When an environment variable says what cannot be.
    pub fn native() -> Result<&'static Self> {
        static NATIVE: OnceLock<std::result::Result<Platform, String>> = OnceLock::new();
        NATIVE
            .get_or_init(|| native().map_err(|error| error.to_string()))
            .as_ref()
            .map_err(|text| Error::Assets(text.clone()))
    }

    /// What a guest of this specification runs on.
    ///
    /// # Errors
    /// As [`Self::native`].
    pub fn for_guest(spec: &GuestSpec) -> Result<Self> {
        let kvm = kvm();
        if let Some(kernel) = &spec.kernel {
            let runs_natively = || Ok::<_, Error>(*kernel == Self::native()?.kernel || kvm == Kvm::Ordinary);
            let accelerator = match spec.accelerator {
                Some(accelerator) => accelerator,
                None if Self::native()?.accelerator == Accelerator::Kvm && runs_natively()? => Accelerator::Kvm,
                None => Accelerator::Tcg,
            };
            return Ok(Self::of(accelerator, kernel.clone(), kvm));
        }
        let native = Self::native()?;
        let fits = |platform: &Self| {
            spec.accelerator.is_none_or(|accelerator| accelerator == platform.accelerator)
                && (spec.cpus == 1 || platform.kernel.is_smp)
                && (spec.modules.is_empty() || platform.kernel.modules.is_some())
        };
        if fits(native) {
            return Ok(native.clone());
        }
        let stock = Kernel::stock()?.clone();
        let is_forced = spec.accelerator == Some(Accelerator::Kvm);
        if is_forced || (kvm == Kvm::Ordinary && native.accelerator == Accelerator::Kvm && spec.accelerator.is_none()) {
            return Ok(Self::of(Accelerator::Kvm, stock, kvm));
        }
        Ok(Self::of(Accelerator::Tcg, stock, kvm))
    }
}

impl Guest {
    /// Starts QEMU (or the wrapper) and waits until the guest's user space is up.
    pub fn start(spec: GuestSpec) -> Result<Self> {
        let timeout = spec.boot_timeout;
        let mut guest = Self::launch(spec)?;
        guest.await_report("its user space did not come up", timeout, |reported| (reported.boots > 0).then_some(()))?;
        Ok(guest)
    }

    /// Starts QEMU (or the wrapper) and waits for nothing.
    pub fn launch(spec: GuestSpec) -> Result<Self> {
        let platform = Platform::for_guest(&spec)?;
        Self::launch_on(spec, &platform)
    }

    /// Runs a guest to its end: script, exit code, power-off. The script must end with 0.
    pub fn run(spec: GuestSpec, timeout: Duration) -> Result<Reported> {
        let mut guest = Self::start(spec)?;
        let code = guest.wait_exit_code(timeout)?;
        if code != 0 {
            return Err(guest.failure(&format!("its script ended with {code}")));
        }
        let status = guest.wait_end(Duration::from_secs(60))?;
        if !status.success() {
            return Err(guest.failure(&format!("QEMU or its wrapper ended with {status}")));
        }
        Ok(guest.reported())
    }
}

fn native() -> Result<Platform> {
    let kvm = kvm();
    let forced = match variable("ACCEL") {
        None => None,
        Some(name) => Some(
            Accelerator::parse(&name)
                .ok_or_else(|| Error::Assets(format!("ACCEL is '{name}'; it must be 'kvm' or 'tcg', or unset")))?,
        ),
    };
    let given = match variable("AMBERLOG_GUEST_KERNEL") {
        None => None,
        Some(path) => Some(
            Kernel::of_file(&PathBuf::from(&path))
                .map_err(|error| Error::Assets(format!("AMBERLOG_GUEST_KERNEL cannot be used: {error}")))?,
        ),
    };
    let asset = || (kvm == Kvm::PageTable).then(paravirtual_asset).flatten();
    let kernel = |accelerator| match (&given, accelerator) {
        (Some(kernel), _) => Ok(kernel.clone()),
        (None, Accelerator::Kvm) => asset().map_or_else(|| Kernel::stock().cloned(), Ok),
        (None, Accelerator::Tcg) => Kernel::stock().cloned(),
    };
    let dressed = |accelerator| {
        let mut platform = Platform::of(accelerator, kernel(accelerator)?, kvm);
        platform.cpu = variable("AMBERLOG_GUEST_CPU").unwrap_or(platform.cpu);
        platform.bios = variable("AMBERLOG_GUEST_BIOS").or(platform.bios);
        Ok::<_, Error>(platform)
    };
    match forced {
        Some(accelerator) => dressed(accelerator),
        // A stock kernel would be interpreted: there is no need to try.
        None if kvm == Kvm::Absent || (kvm == Kvm::PageTable && given.is_none() && asset().is_none()) => {
            dressed(Accelerator::Tcg)
        }
        None => {
            let platform = dressed(Accelerator::Kvm)?;
            if boots(&platform, kvm)? { Ok(platform) } else { dressed(Accelerator::Tcg) }
        }
    }
}

/// An environment variable that says something.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned())
}

/// The optional asset, where there is one.
fn paravirtual_asset() -> Option<Kernel> {
    let path = |directory: &std::path::Path| directory.join("shared/kernel/vmlinux-kvm");
    let above = program::workspace().ancestors().skip(1);
    above.map(path).find(|path| path.is_file()).and_then(|path| Kernel::of_file(&path).ok())
}

/// Whether a tiny guest comes up, or did when the same was asked before.
fn boots(platform: &Platform, kvm: Kvm) -> Result<bool> {
    let version = program::run(program::command("qemu-system-x86_64")?.arg("--version"), &[0])?;
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let modified = std::fs::metadata(&platform.kernel.image).and_then(|metadata| metadata.modified()).ok();
    let modified = modified.and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok()).unwrap_or_default();
    let key = format!(
        "{} {} {kvm:?} {} {} {} {}",
        host.trim(),
        String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default(),
        platform.kernel.image.display(),
        modified.as_secs(),
        platform.cpu,
        platform.bios.as_deref().unwrap_or("-"),
    );
    let memory = program::workspace().join("build/guest/accelerator");
    if let Ok(text) = std::fs::read_to_string(&memory)
        && let Some((answer, remembered)) = text.trim_end().split_once('\n')
        && remembered == key
        && let Some(accelerator) = Accelerator::parse(answer)
    {
        return Ok(accelerator == Accelerator::Kvm);
    }
    let mut spec = GuestSpec::new("kvm-probe", "true");
    spec.at_end = AtEnd::PowerOffNow;
    let limit = if kvm == Kvm::PageTable { PARAVIRTUAL_LIMIT } else { STOCK_LIMIT };
    let boots = Guest::launch_on(spec, platform).is_ok_and(|mut guest| {
        guest.forgive();
        guest.wait_exit_code(limit).is_ok_and(|code| code == 0)
    });
    let answer = if boots { Accelerator::Kvm } else { Accelerator::Tcg };
    // Only a memory: if it cannot be kept, the next process asks again. Whole or not at all: others may be reading it.
    let partial = memory.with_extension(std::process::id().to_string());
    let _ = std::fs::write(&partial, format!("{}\n{key}\n", answer.name()))
        .and_then(|()| std::fs::rename(&partial, &memory));
    Ok(boots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_needs_more_processors_or_modules_gets_a_kernel_that_has_them() {
        let mut two = GuestSpec::new("two", "true");
        two.cpus = 2;
        let platform = Platform::for_guest(&two).unwrap();
        assert!(platform.kernel.is_smp, "{platform:?}");
        let mut modular = GuestSpec::new("modular", "true");
        modular.modules.push("brd".to_owned());
        let platform = Platform::for_guest(&modular).unwrap();
        assert!(platform.kernel.modules.is_some(), "{platform:?}");
        let mut emulated = GuestSpec::new("emulated", "true");
        emulated.accelerator = Some(Accelerator::Tcg);
        assert_eq!(Platform::for_guest(&emulated).unwrap().accelerator, Accelerator::Tcg);
    }
}
