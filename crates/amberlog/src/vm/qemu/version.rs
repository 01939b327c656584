//! What a QEMU is called to be asked to connect again: that depends on its version.
//!
//! Must never: run a program that the user has not named or has on PATH. A QEMU that cannot be asked counts as Debian 12's.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

/// A version of QEMU: major and minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

/// From here on the time until a socket is tried again is in milliseconds (QEMU's docs/about/deprecated.rst). The option in seconds was
/// deprecated then: 10.0 still has it, 11.1 does not.
const IN_MILLISECONDS: Version = Version(9, 2);

impl Version {
    /// What `program --version` says.
    pub fn of(program: &OsStr) -> Option<Self> {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| Self::parse(&String::from_utf8_lossy(&output.stdout)))?
    }

    /// "QEMU emulator version 7.2.22 (Debian …)".
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.lines().next()?.split_once(" version ")?.1.split('.');
        let mut number = || numbers.next()?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
        Some(Self(number()?, number()?))
    }
}

/// The property of a socket that has it connected again a second after it was closed: name and value.
pub fn reconnect_property(version: Option<Version>) -> (&'static str, u32) {
    match version {
        Some(version) if version >= IN_MILLISECONDS => ("reconnect-ms", 1000),
        _ => ("reconnect", 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_connected_again_in_the_words_of_the_version() {
        for (text, version, name) in [
            (
                "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright",
                Some(Version(7, 2)),
                "reconnect",
            ),
            ("QEMU emulator version 9.1.0", Some(Version(9, 1)), "reconnect"),
            ("QEMU emulator version 9.2.0-rc1", Some(Version(9, 2)), "reconnect-ms"),
            ("QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)", Some(Version(10, 0)), "reconnect-ms"),
            ("QEMU emulator version 11.1.3", Some(Version(11, 1)), "reconnect-ms"),
            ("something else", None, "reconnect"),
            ("QEMU emulator version", None, "reconnect"),
            ("", None, "reconnect"),
        ] {
            assert_eq!(Version::parse(text), version, "{text}");
            assert_eq!(reconnect_property(version).0, name, "{text}");
        }
        assert_eq!(Version::of(OsStr::new("/nonexistent/qemu")), None);
    }

    #[test]
    fn the_qemu_that_is_installed_understands_it() {
        let program = OsStr::new("qemu-system-x86_64");
        let (name, value) = reconnect_property(Version::of(program));
        let chardev = format!("socket,id=a,path=/nonexistent/socket,server=off,{name}={value}");
        let mut started = Command::new(program);
        started.args(["-nodefaults", "-display", "none", "-machine", "none", "-S", "-chardev", &chardev]);
        started.args(["-chardev", "file,id=b,path=/nonexistent/at/all"]);
        let said = started.output().expect("QEMU is installed").stderr;
        let said = String::from_utf8_lossy(&said);
        // It ends at the second one, which it looks at after the first.
        assert!(said.contains("/nonexistent/at/all") && !said.contains("reconnect"), "{said}");
    }
}
