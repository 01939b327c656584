//! What executes a guest's instructions.

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

    pub(crate) fn parse(name: &str) -> Option<Self> {
        [Self::Kvm, Self::Tcg].into_iter().find(|accelerator| accelerator.name() == name)
    }
}
