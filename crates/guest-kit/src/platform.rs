//! A platform: accelerator, kernel, processor and firmware of a guest; and what KVM this machine has.

use crate::accelerator::Accelerator;
use crate::error::Result;
use crate::kernel::{Format, Kernel};
use kvm_bindings::{Msrs, kvm_msr_entry};
use std::sync::OnceLock;

/// Accelerator, kernel, processor, firmware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// What executes instructions.
    pub accelerator: Accelerator,
    /// What boots.
    pub kernel: Kernel,
    /// QEMU's `-cpu`.
    pub cpu: String,
    /// QEMU's `-bios`; without one, its own.
    pub bios: Option<String>,
    /// Words for the kernel's command line.
    pub kernel_arguments: &'static str,
}

/// A KVM, as far as it matters to guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kvm {
    /// None, or one that we may not use.
    Absent,
    /// One that runs any kernel, as far as can be told without trying.
    Ordinary,
    /// One that runs paravirtual kernels alone.
    PageTable,
}

impl Platform {
    /// Emulation with the stock kernel, which can do everything, slowly.
    ///
    /// # Errors
    /// When the stock kernel cannot be fetched.
    pub fn emulated() -> Result<Self> {
        Ok(Self::of(Accelerator::Tcg, Kernel::stock()?.clone(), Kvm::Absent))
    }

    /// In words: "kvm, Linux 6.12.117".
    pub fn describe(&self) -> String {
        format!("{}, Linux {}", self.accelerator.name(), self.kernel.version)
    }

    pub(crate) fn of(accelerator: Accelerator, kernel: Kernel, kvm: Kvm) -> Self {
        let is_paravirtual = accelerator == Accelerator::Kvm && kvm == Kvm::PageTable;
        let cpu = match accelerator {
            // QEMU 7.2 sets an MSR for it that such a KVM does not have, and aborts.
            Accelerator::Kvm if is_paravirtual => "host,-arch-capabilities",
            Accelerator::Kvm => "host",
            // RDRAND seeds the kernel's random numbers at once. QEMU 7.2 emulates CMPXCHG16B with flags that are none now and then: Linux 6.12,
            // whose slabs use it without a lock, dies of that, on QEMU's own disk as well.
            Accelerator::Tcg => "qemu64,+rdrand,+ssse3,+sse4.2,-cx16",
        };
        Self {
            accelerator,
            // Whatever runs before the kernel is interpreted: it had better be little.
            bios: (is_paravirtual && kernel.format == Format::Elf).then(|| "qboot.rom".to_owned()),
            kernel,
            cpu: cpu.to_owned(),
            kernel_arguments: if is_paravirtual { "no-kvmapf" } else { "" },
        }
    }
}

/// The KVM of this machine.
pub(crate) fn kvm() -> Kvm {
    static KVM: OnceLock<Kvm> = OnceLock::new();
    *KVM.get_or_init(|| look_at_kvm().unwrap_or(Kvm::Absent))
}

/// The MSR in which a page-table-based KVM ("PVM") tells its guests that it is one, and what it says; any other KVM has
/// no such MSR.
fn look_at_kvm() -> Option<Kvm> {
    const SIGNATURE: u32 = 0x4b56_4d11;
    const PVM: u64 = 0x4d_5650;
    let machine = kvm_ioctls::Kvm::new().ok()?.create_vm().ok()?;
    let processor = machine.create_vcpu(0).ok()?;
    let mut registers = Msrs::from_entries(&[kvm_msr_entry { index: SIGNATURE, ..Default::default() }]).ok()?;
    let is_page_table = processor.get_msrs(&mut registers).is_ok_and(|read| read == 1)
        && registers.as_slice().first().is_some_and(|register| register.data == PVM);
    Some(if is_page_table { Kvm::PageTable } else { Kvm::Ordinary })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn kernel(is_smp: bool, modules: bool) -> Kernel {
        Kernel {
            image: PathBuf::from("/kernel"),
            modules: modules.then(|| PathBuf::from("/modules")),
            version: "6.12".to_owned(),
            is_smp,
            format: Format::Elf,
        }
    }

    #[test]
    fn a_page_table_kvm_gets_the_words_that_it_needs_and_nothing_else_does() {
        let native = Platform::of(Accelerator::Kvm, kernel(false, false), Kvm::PageTable);
        assert_eq!((native.cpu.as_str(), native.bios.as_deref()), ("host,-arch-capabilities", Some("qboot.rom")));
        assert_eq!(native.kernel_arguments, "no-kvmapf");
        let ordinary = Platform::of(Accelerator::Kvm, kernel(true, true), Kvm::Ordinary);
        assert_eq!((ordinary.cpu.as_str(), ordinary.bios, ordinary.kernel_arguments), ("host", None, ""));
        let emulated = Platform::of(Accelerator::Tcg, kernel(false, false), Kvm::PageTable);
        assert!(emulated.cpu.starts_with("qemu64") && emulated.bios.is_none() && emulated.kernel_arguments.is_empty());
    }
}
