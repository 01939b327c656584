//! A guest's power button, as QEMU's monitor (QMP) presses it (ACPI): a guest that heeds it shuts down in good order, and its VMM ends.
//!
//! Must never: take anything that a VMM says for more than a sign of life. Failure story: without a monitor, or with a guest that does not
//! listen, the time is up, and the VMM is ended as if it had no button.

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A monitor says at once who it is, unless it speaks with somebody else.
const GREETING_PATIENCE: Duration = Duration::from_secs(2);
/// How often it is looked whether there is still somebody who wants to wait.
const LOOK: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub struct PowerButton {
    monitor: UnixStream,
}

impl PowerButton {
    /// At the other end of a socket that the VMM has.
    pub fn of(monitor: UnixStream) -> Self {
        PowerButton { monitor }
    }

    /// At the socket where its VMM listens (`-qmp unix:PATH,server=on,wait=off`).
    ///
    /// # Errors
    /// When nobody listens there, or as many wait there already as can.
    pub fn at(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        let monitor = UnixStream::from(socket);
        monitor.set_nonblocking(false)?;
        Ok(PowerButton { monitor })
    }

    /// Whether the VMM is at its end, looked at for a moment. What it says is passed over.
    fn has_ended(&mut self, moment: Duration) -> io::Result<bool> {
        self.monitor.set_read_timeout(Some(moment))?;
        match self.monitor.read(&mut [0; 4096]) {
            Ok(count) => Ok(count == 0),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(true),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Err(error),
            Err(_) => Ok(true),
        }
    }

    /// Presses it.
    ///
    /// # Errors
    /// When the VMM does not answer, or speaks with somebody else.
    pub fn press(&mut self) -> io::Result<()> {
        let silent = |_| io::Error::other("its monitor says nothing: somebody else may be connected to it");
        self.has_ended(GREETING_PATIENCE).map_err(silent)?;
        self.monitor.set_write_timeout(Some(GREETING_PATIENCE))?;
        self.monitor.write_all(b"{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"system_powerdown\"}\n")
    }

    /// Waits until the VMM has ended. False when it has not within `patience`, or nobody wants to wait any more.
    pub fn wait(&mut self, patience: Duration, is_wanted: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            if self.has_ended(LOOK).unwrap_or(false) {
                return true;
            }
            if Instant::now() >= deadline || !is_wanted() {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread;

    #[test]
    fn it_is_pressed_and_waited_for() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("qmp");
        let listener = UnixListener::bind(&path)?;
        let vmm = thread::spawn(move || -> io::Result<Vec<String>> {
            let (mut stream, _) = listener.accept()?;
            stream.write_all(b"{\"QMP\": {}}\n")?;
            BufReader::new(stream.try_clone()?).lines().take(2).collect()
        });
        let mut button = PowerButton::at(&path)?;
        button.press()?;
        assert!(button.wait(Duration::from_secs(20), || true), "the VMM has ended");
        let heard = vmm.join().expect("no panic")?;
        assert_eq!(heard, ["{\"execute\": \"qmp_capabilities\"}", "{\"execute\": \"system_powerdown\"}"]);
        assert!(PowerButton::at(&path).is_err(), "nobody listens any more");
        Ok(())
    }

    #[test]
    fn nobody_waits_for_a_guest_that_does_not_listen() -> io::Result<()> {
        let (ours, mut theirs) = UnixStream::pair()?;
        theirs.write_all(b"{\"QMP\": {}}\n")?;
        let mut button = PowerButton::of(ours);
        button.press()?;
        assert!(!button.wait(Duration::from_millis(1), || true), "the time is up");
        assert!(!button.wait(Duration::from_secs(3600), || false), "nobody wants to");
        drop(theirs);
        assert!(button.wait(Duration::from_secs(20), || true));
        Ok(())
    }

    #[test]
    fn a_monitor_that_others_have_is_not_waited_for() -> io::Result<()> {
        let (ours, _theirs) = UnixStream::pair()?;
        let refused = PowerButton::of(ours).press();
        assert!(refused.is_err_and(|error| error.to_string().contains("somebody else")));
        Ok(())
    }
}
