//! Which system calls a thread may make: seccomp(2).
//!
//! The filters of a VM's threads name what their role needs ([`EVERY`], [`DISK`], [`VMM`], [`NETWORK`]): the lists were taken from real
//! guests in every placement, and hold beside that what the C library may choose for memory, locks, time and threads in another version.
//! Whatever is not named ends the process. The worker as a whole, which does much on behalf of its administrator and little on
//! behalf of a guest, is told what it never needs ([`NEVER`]).

use crate::{Error, Role, report};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;

/// What every thread of a VM may do: its memory, its locks, its time; files that are open, and those that landlock lets it open;
/// telling others.
const EVERY: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_membarrier,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Its arguments cannot be looked at: refused with an error by a filter of its own, and the C library uses the older one.
    libc::SYS_clone3,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getcwd,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_getdents64,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_memfd_create,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    // Of the families that the rule for socket() lets be.
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
];

/// Older forms of the same, which newer processors do not have.
#[cfg(target_arch = "x86_64")]
const OLD: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_mkdir,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_time,
    libc::SYS_getrlimit,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[libc::c_long] = &[];

/// Of a disk's threads: the io_uring that is there already.
const DISK: &[libc::c_long] = &[libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// Of the threads that answer a VMM: its connection, and its process, to see it end.
const VMM: &[libc::c_long] = &[libc::SYS_accept4, libc::SYS_pidfd_open];

/// Of those who speak with a journal server, and look its name up.
const NETWORK_CALLS: &[libc::c_long] =
    &[libc::SYS_bind, libc::SYS_socketpair, libc::SYS_sendmmsg, libc::SYS_recvmmsg, libc::SYS_sched_setaffinity];

/// What a worker as a whole never needs: programs, other processes, namespaces and mounts, privileges, keys, the kernel's own
/// knobs.
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
const NEVER_OLD: &[libc::c_long] = &[libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt, libc::SYS_mknod];
#[cfg(not(target_arch = "x86_64"))]
const NEVER_OLD: &[libc::c_long] = &[];

/// Calls for sockets of other kinds than these are refused.
const LOCAL: &[i32] = &[libc::AF_UNIX];
const INTERNET: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Requests of ioctl(2) by their type: of a userfaultfd, of block devices.
const IOCTL_TYPES: &[u64] = &[0xaa, 0x12];
/// And by their number: FIONBIO, FIONREAD, TCGETS (is it a terminal?).
const IOCTLS: &[u64] = &[0x5421, 0x541b, 0x5401];

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Outcome<T> = Result<T, seccompiler::BackendError>;

fn condition(argument: u8, operation: SeccompCmpOp, value: u64) -> Outcome<SeccompCondition> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operation, value)
}

/// One rule for each condition: any of them is enough.
fn any(conditions: impl IntoIterator<Item = Outcome<SeccompCondition>>) -> Outcome<Vec<SeccompRule>> {
    conditions.into_iter().map(|condition| SeccompRule::new(vec![condition?])).collect()
}

/// What a thread of a VM may do.
fn of_vm(role: Role, has_network: bool) -> Outcome<Rules> {
    let own: &[libc::c_long] = if role == Role::Disk { DISK } else { VMM };
    let network = if has_network { NETWORK_CALLS } else { &[] };
    let plain = EVERY.iter().chain(OLD).chain(own).chain(network);
    let mut rules: Rules = plain.map(|call| (*call, Vec::new())).collect();
    let families = if has_network { INTERNET } else { LOCAL };
    rules.insert(libc::SYS_socket, any(families.iter().map(|family| condition(0, SeccompCmpOp::Eq, *family as u64)))?);
    // Threads, no processes.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, any([condition(0, SeccompCmpOp::MaskedEq(thread), thread)])?);
    // Its own end alone is a thread's to signal: abort(3).
    let own_process = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, any([condition(0, SeccompCmpOp::Eq, own_process)])?);
    // The limits of this process are read, not set, and nobody else's.
    rules.insert(libc::SYS_prlimit64, any([condition(2, SeccompCmpOp::Eq, 0)])?);
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];
    rules.insert(libc::SYS_prctl, any(names.map(|option| condition(0, SeccompCmpOp::Eq, option as u64)))?);
    let types = IOCTL_TYPES.iter().map(|kind| condition(1, SeccompCmpOp::MaskedEq(0xff00), kind << 8));
    let numbers = IOCTLS.iter().map(|number| condition(1, SeccompCmpOp::Eq, *number));
    rules.insert(libc::SYS_ioctl, any(types.chain(numbers))?);
    // No new code. With a network, the C library may load some to look a host up.
    let executable = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let no_code = || any([condition(2, SeccompCmpOp::MaskedEq(executable), 0)]);
        rules.insert(call, if has_network { Vec::new() } else { no_code()? });
    }
    Ok(rules)
}

/// What a worker as a whole never does.
fn never_of_worker() -> Outcome<Rules> {
    let mut rules: Rules = NEVER.iter().chain(NEVER_OLD).map(|call| (*call, Vec::new())).collect();
    let others = INTERNET.iter().map(|family| condition(0, SeccompCmpOp::Ne, *family as u64));
    rules.insert(libc::SYS_socket, vec![SeccompRule::new(others.collect::<Outcome<_>>()?)?]);
    Ok(rules)
}

fn programs(role: Role, has_network: bool) -> Outcome<Vec<BpfProgram>> {
    let architecture = std::env::consts::ARCH.try_into()?;
    let compile = |rules, mismatch, matched| -> Outcome<BpfProgram> {
        SeccompFilter::new(rules, mismatch, matched, architecture)?.try_into()
    };
    if role == Role::Worker {
        return Ok(vec![compile(never_of_worker()?, SeccompAction::Allow, SeccompAction::Trap)?]);
    }
    let without_clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    Ok(vec![
        compile(without_clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?,
        // The last: it has no call for another filter.
        compile(of_vm(role, has_network)?, SeccompAction::Trap, SeccompAction::Allow)?,
    ])
}

/// Filters the calls of the calling thread.
pub(crate) fn filter(role: Role, has_network: bool) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Calls(error.to_string());
    report::install(role).map_err(|error| failed(&error))?;
    for program in programs(role, has_network).map_err(|error| failed(&error))? {
        seccompiler::apply_filter(&program).map_err(|error| failed(&error))?;
    }
    Ok(())
}
