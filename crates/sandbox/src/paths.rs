//! Which files can be opened: landlock(7). Access through descriptors that are open is not touched.

use crate::Error;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus,
};
use std::path::Path;

/// What is asked for; a kernel that has less of it does what it can.
const ABI_WANTED: ABI = ABI::V5;

/// Lets the calling thread write below `directory` only, and read there and what its own process and program are; with
/// `has_network`, read everywhere.
pub(crate) fn fence(directory: &Path, has_network: bool) -> Result<(), Error> {
    let failed = |what: &str, error: &dyn std::fmt::Display| Error::Paths(format!("{what}: {error}"));
    let read = AccessFs::from_read(ABI_WANTED) & !AccessFs::Execute;
    let write_device = AccessFs::IoctlDev;
    // No ioctl of a device that is opened later, and nothing but reading and writing below the directory.
    let below = (AccessFs::from_all(ABI_WANTED) & !AccessFs::Execute) & !write_device;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI_WANTED))
        .map_err(|error| failed("preparing landlock", &error))?;
    if !has_network {
        rules = rules
            .handle_access(AccessNet::from_all(ABI_WANTED))
            .map_err(|error| failed("preparing landlock", &error))?;
    }
    let mut rules = rules.create().map_err(|error| failed("preparing landlock", &error))?;
    let own = PathFd::new(directory).map_err(|error| failed("opening the VM's directory", &error))?;
    rules = rules.add_rule(PathBeneath::new(own, below)).map_err(|error| failed("preparing landlock", &error))?;
    // /proc: a VMM's arguments, its age; this process's own files. The program: for the lines of a backtrace.
    let program = std::env::current_exe().unwrap_or_default();
    let readable: Vec<&Path> =
        if has_network { vec![Path::new("/")] } else { vec![Path::new("/proc"), Path::new("/sys/devices"), &program] };
    for path in readable {
        let Ok(descriptor) = PathFd::new(path) else { continue };
        let access = if path == program { AccessFs::ReadFile.into() } else { read };
        rules = rules
            .add_rule(PathBeneath::new(descriptor, access))
            .map_err(|error| failed("preparing landlock", &error))?;
    }
    let status = rules.restrict_self().map_err(|error| failed("landlock", &error))?;
    match status.ruleset {
        RulesetStatus::NotEnforced => {
            Err(Error::Paths("this kernel has no landlock, or it is switched off".to_owned()))
        }
        _ => Ok(()),
    }
}
