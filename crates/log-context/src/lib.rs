//! Which VM and which disk a thread works for, so that every line it logs says so, whichever crate logs it.
//!
//! A thread is told once ([`enter`]), and threads that it starts with [`spawn`] take it over. What prints log lines asks for
//! [`prefix`]. Must never: allocate or lock where nothing is logged. Failure story: a thread that was not told prints lines without a
//! prefix.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

/// What a thread works for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    vm: Option<Arc<str>>,
    disk: Option<Arc<str>>,
}

thread_local! {
    static CURRENT: RefCell<Context> = RefCell::new(Context::default());
}

impl Context {
    /// Of a VM.
    pub fn vm(name: &str) -> Self {
        Context { vm: Some(name.into()), disk: None }
    }

    /// Of this thread.
    pub fn current() -> Self {
        CURRENT.with_borrow(Clone::clone)
    }

    /// The names of the VM and of the disk, as far as they are known.
    pub fn names(&self) -> (Option<&str>, Option<&str>) {
        (self.vm.as_deref(), self.disk.as_deref())
    }

    /// The same VM's disk.
    #[must_use]
    pub fn with_disk(mut self, name: &str) -> Self {
        self.disk = Some(name.into());
        self
    }
}

/// Puts back what was before when it is dropped.
#[derive(Debug)]
pub struct Entered(Context);

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(std::mem::take(&mut self.0));
    }
}

/// Says what this thread works for, until the result is dropped.
#[must_use = "it ends when this is dropped"]
pub fn enter(context: Context) -> Entered {
    Entered(CURRENT.replace(context))
}

/// Starts a thread that works for the same.
///
/// # Errors
/// When there can be no thread.
pub fn spawn<F, T>(builder: Builder, work: F) -> io::Result<JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let context = Context::current();
    builder.spawn(move || {
        let _entered = enter(context);
        work()
    })
}

/// What goes before a line of this thread. A line that says it itself gets it once.
pub fn prefix(line: &str) -> String {
    let context = Context::current();
    let mut prefix = String::new();
    for (kind, name) in [("vm", &context.vm), ("disk", &context.disk)] {
        let Some(name) = name else { continue };
        let said = format!("{kind} {name}");
        let is_said = line.match_indices(&said).any(|(at, _)| {
            let after = line[at + said.len()..].chars().next();
            let before = line[..at].chars().next_back();
            before.is_none_or(|c| !c.is_alphanumeric()) && after.is_none_or(|c| !c.is_alphanumeric() && c != '-')
        });
        if !is_said {
            prefix.push_str(&said);
            prefix.push_str(": ");
        }
    }
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_take_it_over_and_it_ends() {
        assert_eq!(prefix("a line"), "");
        let entered = enter(Context::vm("db"));
        assert_eq!(prefix("a line"), "vm db: ");
        let thread = spawn(Builder::new(), || {
            let _disk = enter(Context::current().with_disk("root"));
            (prefix("a line"), Context::current())
        });
        let (line, context) = thread.expect("started").join().expect("ends");
        assert_eq!(line, "vm db: disk root: ");
        assert_eq!(context, Context::vm("db").with_disk("root"));
        drop(entered);
        assert_eq!(prefix("a line"), "");
    }

    #[test]
    fn a_line_that_says_it_itself_gets_it_once() {
        let _entered = enter(Context::vm("db").with_disk("root"));
        assert_eq!(prefix("disk root: process 1 has connected"), "vm db: ");
        assert_eq!(prefix("vm db: disk root: ready"), "");
        assert_eq!(prefix("vm db2: disk root-2"), "vm db: disk root: ");
    }
}
