//! Which system calls end the process: seccomp(2).
//!
//! The filters name what a role never needs, and let pass what is left: which calls the C library makes for memory, locks, time
//! and threads changes from one version to the next, and a guest's disks must not end with that. What is named is what turns
//! a foothold in this process into more: other programs, other processes, other privileges, the kernel's rarely used doors.

use crate::{Error, Role, report};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;

/// What nobody here needs: programs, other processes, namespaces and mounts, privileges, keys, the kernel's own knobs.
const NEVER: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capset,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_fanotify_init,
    libc::SYS_personality,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    libc::SYS_lookup_dcookie,
    libc::SYS_memfd_secret,
    libc::SYS_mknodat,
];

/// Those of them that only older machines have.
#[cfg(target_arch = "x86_64")]
const OLD: &[libc::c_long] = &[libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt, libc::SYS_mknod];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[libc::c_long] = &[];

/// The same of those that the threads of a VM do not need.
#[cfg(target_arch = "x86_64")]
const OLD_IN_A_VM: &[libc::c_long] = &[libc::SYS_fork, libc::SYS_vfork, libc::SYS_symlink, libc::SYS_link];
#[cfg(not(target_arch = "x86_64"))]
const OLD_IN_A_VM: &[libc::c_long] = &[];

/// What the threads of a VM do not need either: new io_urings, whose operations no filter sees (landlock does); message queues and System V's
/// objects; watching files; other processes' memory and places.
const NEVER_IN_A_VM: &[libc::c_long] = &[
    libc::SYS_io_uring_setup,
    libc::SYS_inotify_init1,
    libc::SYS_fanotify_mark,
    libc::SYS_mq_open,
    libc::SYS_msgget,
    libc::SYS_semget,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
];

/// Calls for sockets of other kinds than these are refused.
const LOCAL: &[i32] = &[libc::AF_UNIX];
const NETWORK: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

fn condition(argument: u8, operation: SeccompCmpOp, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operation, value)
}

fn program(role: Role, has_network: bool) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = NEVER.iter().chain(OLD).map(|call| (*call, Vec::new())).collect();
    let families = if has_network { NETWORK } else { LOCAL };
    let others = families.iter().map(|family| condition(0, SeccompCmpOp::Ne, *family as u64));
    let no_family = SeccompRule::new(others.collect::<Result<_, _>>()?)?;
    rules.insert(libc::SYS_socket, vec![no_family]);
    if role != Role::Daemon {
        rules.extend(NEVER_IN_A_VM.iter().chain(OLD_IN_A_VM).map(|call| (*call, Vec::new())));
        if !has_network {
            // No new code. With a network, the C library may load some to look a host up.
            let executable = libc::PROT_EXEC as u64;
            for call in [libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_pkey_mprotect] {
                let maps_code = condition(2, SeccompCmpOp::MaskedEq(executable), executable)?;
                rules.insert(call, vec![SeccompRule::new(vec![maps_code])?]);
            }
        }
    }
    let architecture = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Trap, architecture)?.try_into()
}

/// Filters the calls of the calling thread.
pub(crate) fn filter(role: Role, has_network: bool) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Calls(error.to_string());
    report::install(role).map_err(|error| failed(&error))?;
    let program = program(role, has_network).map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(&error))
}
