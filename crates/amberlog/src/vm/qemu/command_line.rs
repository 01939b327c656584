//! QEMU's command line, taken apart: which words are options, and which are their values.
//!
//! A command line may begin with other programs (`ip netns exec x qemu-system-x86_64 …`): what comes before QEMU's name is none
//! of its options. Where no word looks like QEMU's name, all words after the first are taken for its.

use super::properties::Properties;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// QEMU's options that have no value, of versions 5 to 10. All others have one. A test asks the installed QEMU.
const WITHOUT_VALUE: &[&str] = &[
    "S",
    "alt-grab",
    "async-teardown",
    "audio-help",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nographic",
    "nouserconfig",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "s",
    "semihosting",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// One option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given<'a> {
    /// Its name without dashes; empty for a disk image that is given without an option.
    pub name: String,
    /// Its value.
    pub value: Option<&'a OsStr>,
}

/// A command line.
#[derive(Clone, Debug)]
pub struct CommandLine<'a> {
    /// Where QEMU's name is.
    pub program: usize,
    /// Its options, in order.
    pub options: Vec<Given<'a>>,
}

fn is_qemu(word: &OsStr) -> bool {
    let name = Path::new(word).file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("qemu-system-") || matches!(&*name, "qemu" | "qemu-kvm" | "kvm")
}

/// Whether a process with these arguments is QEMU, or something that goes by its name.
pub fn is_known(words: &[OsString]) -> bool {
    let is_like_it = |name: &OsStr| name.to_string_lossy().contains("qemu");
    words.first().is_some_and(|word| is_qemu(word) || Path::new(word).file_name().is_some_and(is_like_it))
}

impl<'a> CommandLine<'a> {
    /// Takes a command line apart.
    pub fn parse(words: &'a [OsString]) -> Self {
        let program = words.iter().position(|word| is_qemu(word)).unwrap_or(0);
        let mut options = Vec::new();
        let mut rest = words.iter().skip(program + 1);
        while let Some(word) = rest.next() {
            let text = word.to_string_lossy();
            // QEMU takes one dash or two.
            let name = text.strip_prefix("--").or_else(|| text.strip_prefix('-')).filter(|name| !name.is_empty());
            options.push(match name {
                None => Given { name: String::new(), value: Some(word) },
                Some(name) if WITHOUT_VALUE.contains(&name) => Given { name: name.to_owned(), value: None },
                Some(name) => Given { name: name.to_owned(), value: rest.next().map(OsString::as_os_str) },
            });
        }
        CommandLine { program, options }
    }

    /// Whether an option is there.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|option| option.name == name)
    }

    /// The values of an option, in order.
    pub fn values<'b>(&'b self, name: &'b str) -> impl Iterator<Item = &'a OsStr> + 'b {
        self.options.iter().filter(move |option| option.name == name).filter_map(|option| option.value)
    }

    /// The values of an option, read; `implied` is the key of their first part.
    ///
    /// # Errors
    /// A sentence when one begins as JSON and is none.
    pub fn properties(&self, name: &str, implied: Option<&str>) -> Result<Vec<Properties>, String> {
        let read = |value| Properties::parse(value, implied).map_err(|error| format!("-{name}: {error}"));
        self.values(name).map(read).collect()
    }

    /// All of `-machine` and `-M` together.
    ///
    /// # Errors
    /// As [`CommandLine::properties`].
    pub fn machine(&self) -> Result<Properties, String> {
        let mut machine = Properties::default();
        for option in self.options.iter().filter(|option| matches!(option.name.as_str(), "machine" | "M")) {
            if let Some(value) = option.value {
                let later =
                    Properties::parse(value, Some("type")).map_err(|error| format!("-{}: {error}", option.name))?;
                machine.merge(later);
            }
        }
        Ok(machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn list(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn options_and_values_are_told_apart() {
        let words = list("ip netns exec -x /usr/bin/qemu-system-x86_64 -snapshot -name -snapshot --m 1G disk.img -S");
        let line = CommandLine::parse(&words);
        let options: Vec<_> = line.options.iter().map(|o| (o.name.as_str(), o.value.and_then(OsStr::to_str))).collect();
        assert_eq!(line.program, 4);
        assert_eq!(
            options,
            [("snapshot", None), ("name", Some("-snapshot")), ("m", Some("1G")), ("", Some("disk.img")), ("S", None)]
        );
        let words = list("my-vmm -m 2G");
        assert_eq!(CommandLine::parse(&words).values("m").collect::<Vec<_>>(), ["2G"]);
    }

    #[test]
    fn machines_are_merged() {
        let words = list("qemu-system-x86_64 -M q35,usb=off -machine memory-backend=a --M microvm");
        let machine = CommandLine::parse(&words).machine().expect("understood");
        assert_eq!((machine.get("type"), machine.get("memory-backend")), (Some("microvm"), Some("a")));
    }

    /// In QEMU's help a value follows the option after one space, what it does after more than one or on the next line.
    #[test]
    fn the_list_of_options_without_value_is_that_of_the_installed_qemu() {
        let help = Command::new("qemu-system-x86_64").arg("-help").output().expect("QEMU is installed").stdout;
        let help = String::from_utf8(help).expect("text");
        let mut seen = 0;
        for line in help.lines().filter(|line| line.starts_with('-')) {
            let (name, rest) =
                line.trim_start_matches('-').split_once(' ').unwrap_or((line.trim_start_matches('-'), ""));
            // "-fda/-fdb file" and "-h or -help"; "-dtb    file" has its value after more than one, "-async-teardown enable" none.
            if name.contains('/') || rest.starts_with("or ") || ["dtb", "async-teardown"].contains(&name) {
                continue;
            }
            let has_value = !rest.is_empty() && !rest.starts_with(' ');
            assert_eq!(WITHOUT_VALUE.contains(&name), !has_value, "{line}");
            seen += 1;
        }
        assert!(seen > 100, "{seen} options in the help");
    }
}
