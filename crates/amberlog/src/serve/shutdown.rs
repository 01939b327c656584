//! Guests are asked to shut down before their VMMs are ended ([`crate::power_button`]), all at once.
//!
//! Must never: keep the end of the daemon waiting for longer than the configuration says, or for a second signal. Failure story: a guest that
//! does not shut down, or whose monitor others have, loses its VMM as if nobody had asked.

use super::config::Config;
use super::notify::Manager;
use crate::power_button::PowerButton;
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// How often it is looked for another signal.
const LOOK: Duration = Duration::from_millis(100);
/// What a service manager is asked for beside the guests' own time: their VMMs' ends, and what is owed.
const ENDING: Duration = Duration::from_secs(300);

/// Asks the guests of all VMs that have a monitor to shut down, and waits for them. Another signal ends the wait.
pub fn shut_down(config: &Config, manager: Option<&Manager>, signals: &mut Signals) {
    let wishes: Vec<_> = config.vms.iter().filter_map(|(name, vm)| Some((name, vm.shutdown.as_ref()?))).collect();
    let Some(longest) = wishes.iter().map(|(_, wish)| wish.patience).max() else { return };
    if let Some(manager) = manager {
        manager.tell(&format!("EXTEND_TIMEOUT_USEC={}", (longest + ENDING).as_micros()));
    }
    let is_wanted = AtomicBool::new(true);
    thread::scope(|scope| {
        let mut asking = Vec::new();
        for (name, wish) in wishes {
            let is_wanted = &is_wanted;
            let ask = move || {
                let _entered = log_context::enter(log_context::Context::vm(name));
                // It is not running, or has no such socket: then its VMM is ended as it was.
                match PowerButton::at(&wish.monitor) {
                    Err(error) => log::debug!("{}: {error}", wish.monitor.display()),
                    Ok(mut button) => {
                        log::info!("the guest is asked to shut down, and has {} s", wish.patience.as_secs());
                        match button.press() {
                            Ok(()) if button.wait(wish.patience, || is_wanted.load(Ordering::Relaxed)) => {}
                            Ok(()) => log::warn!("the guest has not shut down; its VMM is ended"),
                            Err(error) => {
                                log::warn!("the guest cannot be asked to shut down ({error}); its VMM is ended");
                            }
                        }
                    }
                }
            };
            match thread::Builder::new().spawn_scoped(scope, ask) {
                Ok(thread) => asking.push(thread),
                Err(error) => log::warn!("vm {name}: no thread that asks its guest to shut down: {error}"),
            }
        }
        while asking.iter().any(|thread| !thread.is_finished()) {
            if signals.pending().any(|signal| signal != signal_hook::consts::SIGHUP) {
                is_wanted.store(false, Ordering::Relaxed);
            }
            thread::sleep(LOOK);
        }
    });
}
