//! The end of a thread that asked for what its role never needs: a sentence, then abort.

use crate::Role;
use std::cell::Cell;
use std::io;
use std::sync::Once;

thread_local! {
    static ROLE: Cell<&'static str> = const { Cell::new("") };
}

/// The register in which a thread says which call it asks for.
#[cfg(target_arch = "x86_64")]
fn call_of(context: &libc::ucontext_t) -> i64 {
    context.uc_mcontext.gregs[libc::REG_RAX as usize]
}

#[cfg(target_arch = "aarch64")]
fn call_of(context: &libc::ucontext_t) -> i64 {
    context.uc_mcontext.regs[8] as i64
}

fn tell(bytes: &[u8]) {
    // SAFETY: a system call that reads bytes which live across it. It is one of those that a handler may make.
    unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Decimal digits, at the end of `space`.
fn digits(mut number: u64, space: &mut [u8; 20]) -> &[u8] {
    let mut at = space.len();
    loop {
        at -= 1;
        space[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &space[at..];
        }
    }
}

extern "C" fn ended(_signal: libc::c_int, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO the interrupted thread's context, valid until it returns.
    let call = unsafe { context.cast::<libc::ucontext_t>().as_ref() }.map_or(0, call_of);
    let mut space = [0; 20];
    tell(b"amberlog: a thread of the role '");
    tell(ROLE.try_with(Cell::get).unwrap_or("").as_bytes());
    tell(b"' asked for system call ");
    tell(digits(call.unsigned_abs(), &mut space));
    tell(
        b", which that role never needs: an attack, or a bug in amberlog's sandbox (with --no-sandbox it goes on). The process \
        ends; what was committed is kept.\n",
    );
    // SAFETY: no requirement; a handler may call it.
    unsafe { libc::abort() }
}

/// Has the calling thread's role be known, and the sentence be said.
pub(crate) fn install(role: Role) -> io::Result<()> {
    static INSTALLED: Once = Once::new();
    ROLE.set(role.name());
    let mut outcome = Ok(());
    INSTALLED.call_once(|| {
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = ended;
        // SAFETY: an all-zero sigaction is valid; the handler has the signature that SA_SIGINFO asks for and calls only what
        // a handler may call.
        let set = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
        };
        if set != 0 {
            outcome = Err(io::Error::last_os_error());
        }
    });
    outcome
}
