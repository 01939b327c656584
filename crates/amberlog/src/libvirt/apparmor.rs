//! AppArmor: what libvirt's profile of a QEMU lets it use.
//!
//! libvirt gives each QEMU a profile of its own, made at every start from files in /etc/apparmor.d, if its daemon has one itself. The profile knows of the images
//! that the domain names, and of nothing of amberlog's: `packaging/apparmor/libvirt-qemu` has the rules that are to be added. A QEMU without them asks
//! for its sockets for ever, with nothing to be read but a line of the kernel's.
//!
//! What is read here is text: rules, not what the kernel has loaded, for that profile is not there before its QEMU. Must never: refuse a domain
//! for a rule that is not understood, which counts as one that lets everything pass. Failure story: what cannot be read has no rules.

use super::xml::Element;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The profiles that are loaded; only root reads it.
const PROFILES: &str = "sys/kernel/security/apparmor/profiles";
/// What the profile of a QEMU is made from.
const ABSTRACTION: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
/// What an administrator adds to that.
pub const LOCAL: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";
/// What a brace expands to, at most: more counts as everything.
const CHOICES_MAX: usize = 64;

/// The programs of libvirt's that start QEMUs.
const DAEMONS: [&str; 2] = ["libvirtd", "virtqemud"];
/// How many processes may be between a hook and the daemon that calls it.
const ANCESTORS_MAX: usize = 8;

/// The program among the ancestors of a process that starts QEMUs: a hook is called by the one that is about to. Nothing where it is not
/// found: somebody calls the hook by hand, or may not look.
fn daemon(root: &Path, hook: u32) -> Option<PathBuf> {
    let of = |process: u32| root.join("proc").join(process.to_string());
    let mut process = hook;
    for _ in 0..ANCESTORS_MAX {
        let status = read_to_string(of(process).join("status")).ok()?;
        process = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())?;
        let program = std::fs::read_link(of(process).join("exe")).ok()?;
        // One that was upgraded under the process.
        let program = program.to_string_lossy();
        let program = Path::new(program.trim_end_matches(" (deleted)"));
        if program.file_name().is_some_and(|name| DAEMONS.iter().any(|daemon| name == *daemon)) {
            return Some(program.to_owned());
        }
    }
    None
}

/// Whether libvirt confines this domain's QEMU, on the machine whose root directory is `root`. `hook` is a process that libvirt has called: the
/// daemon that did so looks for a profile of its own, and whether another daemon has one is nothing to it.
pub fn confines(root: &Path, domain: &Element, qemu_conf: &str, hook: u32) -> bool {
    let setting = |key: &str| {
        let of = qemu_conf.lines().find_map(|line| line.split_once('=').filter(|(name, _)| name.trim() == key));
        of.map(|(_, value)| value.split('#').next().unwrap_or_default().trim().to_owned())
    };
    let is_other = setting("security_driver").is_some_and(|driver| !driver.contains("apparmor"));
    let label = domain
        .elements()
        .find(|element| element.name == "seclabel" && element.get("model").is_none_or(|model| model == "apparmor"));
    let is_free = match label.and_then(|label| label.get("type")) {
        // "static" is a profile of the administrator's own, of which nothing is known here.
        Some(kind) => kind != "dynamic",
        None => setting("security_default_confined").is_some_and(|value| value == "0"),
    };
    let daemon = daemon(root, hook);
    let daemon = daemon.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    // "libvirtd (enforce)"; in older ones its path.
    let is_libvirts = |line: &str| {
        let name = line.rsplit_once(" (").map_or(line, |(name, _)| name);
        let name = name.rsplit('/').next();
        name.is_some_and(|name| daemon.map_or_else(|| DAEMONS.contains(&name), |daemon| daemon == name))
    };
    let profiles = read_to_string(root.join(PROFILES)).unwrap_or_default();
    !is_other && !is_free && profiles.lines().any(is_libvirts)
}

/// The first of these files that no rule lets this domain's QEMU use so (letters of a rule: `rw`).
pub fn refused<'f>(root: &Path, domain: &Element, files: &'f [(PathBuf, &str)]) -> Option<&'f Path> {
    let rules = rules(root, domain);
    let refused = files.iter().find(|(file, wanted)| {
        let file = file.to_string_lossy();
        !rules.iter().any(|rule| rule.allows(&file, wanted))
    });
    refused.map(|(file, _)| file.as_path())
}

/// What is written for every QEMU, and for this one.
fn rules(root: &Path, domain: &Element) -> Vec<Rule> {
    let mut files: Vec<PathBuf> =
        [ABSTRACTION, LOCAL, "etc/apparmor.d/libvirt/TEMPLATE.qemu"].map(|name| root.join(name)).to_vec();
    files.extend(
        domain
            .find("uuid")
            .map(|uuid| root.join("etc/apparmor.d/libvirt").join(format!("libvirt-{}", uuid.text().trim()))),
    );
    for directory in [ABSTRACTION, LOCAL] {
        let more = std::fs::read_dir(root.join(format!("{directory}.d"))).into_iter().flatten().flatten();
        files.extend(more.map(|file| file.path()));
    }
    let shipped = root.join(ABSTRACTION);
    let mut rules = vec![Rule::of("/{usr/,}lib{,32,64}/**", "mr")];
    for file in files {
        let Ok(text) = read_to_string(&file) else { continue };
        rules.extend(text.lines().filter_map(Rule::parse));
        // libvirt's own file includes what its base rule above stands for, and what is read here besides. Another's may include anything.
        if file != shipped && text.lines().any(is_beyond_us) {
            rules.push(Rule::of("/**", EVERYTHING));
        }
    }
    rules
}

/// Every letter that is asked for.
const EVERYTHING: &str = "rwkmlaix";

/// Whether a line of a profile may let pass what is not read here: another file, a rule over several lines, a profile that only complains.
fn is_beyond_us(line: &str) -> bool {
    let line = line.trim();
    let line = line.split(" #").next().unwrap_or_default().trim();
    let include = line.strip_prefix('#').unwrap_or(line).strip_prefix("include");
    if let Some(included) = include.filter(|rest| rest.starts_with([' ', '\t'])) {
        let known = ["abstractions/libvirt-qemu>", "tunables/global>", ".files>"];
        return !known.iter().any(|name| included.trim_end().ends_with(name));
    }
    if line.is_empty() || line.starts_with('#') {
        return false;
    }
    let is_profile = line.ends_with('{') || line == "}";
    let is_definition = line.starts_with("@{") && line.contains('=');
    line.contains("complain")
        || matches!(line, "file," | "all," | "allow file," | "allow all,")
        || !(line.ends_with(',') || is_profile || is_definition)
}

/// A rule about files.
struct Rule {
    /// Without braces.
    patterns: Vec<Vec<char>>,
    /// Letters.
    permissions: String,
}

impl Rule {
    fn of(path: &str, permissions: &str) -> Self {
        let mut patterns = Vec::new();
        expand(path, &mut patterns);
        Rule { patterns, permissions: permissions.to_owned() }
    }

    /// Nothing for a line that is about something else.
    fn parse(line: &str) -> Option<Self> {
        let line = line.trim();
        let rule = line.split(" #").next().unwrap_or_default().trim().strip_suffix(',')?;
        let mut words = Vec::new();
        // A path in quotes may hold spaces.
        for (at, part) in rule.split('"').enumerate() {
            if at % 2 == 1 { words.push(part) } else { words.extend(part.split_whitespace()) }
        }
        if words.contains(&"deny") {
            return None;
        }
        let words: Vec<&str> =
            words.into_iter().filter(|word| !matches!(*word, "owner" | "audit" | "allow" | "file")).collect();
        let is_path = |word: &&&str| word.starts_with('/') || word.starts_with("@{");
        let path = *words.iter().find(is_path)?;
        let is_permission = |word: &&&str| **word != path && word.chars().all(|letter| letter.is_ascii_alphabetic());
        let permissions = words.iter().find(is_permission)?;
        let mut patterns = Vec::new();
        expand(&path.replace("@{run}", "{/run,/var/run}").replace("@{RUN}", "/run"), &mut patterns);
        Some(Rule { patterns, permissions: permissions.to_lowercase() })
    }

    fn allows(&self, file: &str, wanted: &str) -> bool {
        let file: Vec<char> = file.chars().collect();
        let is_there = |letter: char| self.permissions.contains(letter);
        wanted.chars().all(is_there) && self.patterns.iter().any(|pattern| matches(pattern, &file))
    }
}

/// All that braces stand for. What is not understood stands for everything.
fn expand(pattern: &str, found: &mut Vec<Vec<char>>) {
    if found.len() >= CHOICES_MAX {
        found.push("**".chars().collect());
        return;
    }
    let open = pattern.char_indices().find(|(at, letter)| *letter == '{' && !pattern[..*at].ends_with('@'));
    let Some((open, _)) = open else {
        let mut rest = pattern.to_owned();
        while let Some(start) = rest.find("@{") {
            let end = rest[start..].find('}').map_or(rest.len(), |end| start + end + 1);
            rest.replace_range(start..end, "**");
        }
        found.push(rest.chars().collect());
        return;
    };
    let (mut depth, mut from) = (0, open + 1);
    let mut choices = Vec::new();
    for (at, letter) in pattern.char_indices().skip_while(|(at, _)| *at < open) {
        match letter {
            '{' => depth += 1,
            ',' if depth == 1 => {
                choices.push(&pattern[from..at]);
                from = at + 1;
            }
            '}' => {
                depth -= 1;
                if depth == 0 {
                    choices.push(&pattern[from..at]);
                    for choice in choices {
                        expand(&format!("{}{choice}{}", &pattern[..open], &pattern[at + 1..]), found);
                    }
                    return;
                }
            }
            _ => {}
        }
    }
    found.push("**".chars().collect());
}

/// Whether a path is one that a pattern means: `*` is anything but a slash, `**` anything, `?` and a class one letter.
fn matches(pattern: &[char], path: &[char]) -> bool {
    match pattern {
        [] => path.is_empty(),
        ['*', '*', rest @ ..] => (0..=path.len()).any(|at| matches(rest, &path[at..])),
        ['*', rest @ ..] => {
            let name = path.iter().take_while(|letter| **letter != '/').count();
            (0..=name).any(|at| matches(rest, &path[at..]))
        }
        ['?', rest @ ..] => path.first().is_some_and(|letter| *letter != '/') && matches(rest, &path[1..]),
        ['[', rest @ ..] => {
            let end = rest.iter().position(|letter| *letter == ']').map_or(rest.len(), |end| end + 1);
            !path.is_empty() && matches(&rest[end..], &path[1..])
        }
        ['\\', letter, rest @ ..] | [letter, rest @ ..] => path.first() == Some(letter) && matches(rest, &path[1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libvirt::xml;

    /// The process that libvirt has called.
    const HOOK: u32 = 4712;
    const DOMAIN: &str = "<domain><uuid>4dea22b3-1d52-d8f3-2516-782e98ab3fa0</uuid></domain>";
    /// As the package has it.
    const OURS: &str = include_str!("../../../../packaging/apparmor/libvirt-qemu");

    struct Host(tempfile::TempDir);

    impl Host {
        /// A machine with AppArmor, on which libvirtd is confined.
        fn new() -> Self {
            let host = Host(tempfile::tempdir().expect("a directory"));
            host.write(
                PROFILES,
                "/usr/bin/man (enforce)\nlibvirtd//qemu_bridge_helper (enforce)\nlibvirtd (enforce)\n",
            );
            host.write(
                ABSTRACTION,
                "  include <abstractions/base>\n  capability dac_override,\n  network inet stream,\n  /dev/kvm rw,\n  owner @{PROC}/*/auxv r,\n  \
                 deny /run/amberlog/** rw,\n  signal (receive) peer=libvirtd,\n",
            );
            host
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            std::fs::write(path, text).expect("written");
        }

        fn confines(&self, domain: &str, qemu_conf: &str) -> bool {
            confines(self.0.path(), &xml::parse(domain).expect("it is XML"), qemu_conf, HOOK)
        }

        /// The hook's parent is a shell, and that one's the program.
        fn is_called_by(&self, program: &str) {
            for (process, parent, program) in
                [(HOOK, 4711, "/usr/bin/amberlog"), (4711, 700, "/bin/sh"), (700, 1, program)]
            {
                self.write(&format!("proc/{process}/status"), &format!("Name:\tx\nPid:\t{process}\nPPid:\t{parent}\n"));
                let exe = self.0.path().join(format!("proc/{process}/exe"));
                let _ = std::fs::remove_file(&exe);
                std::os::unix::fs::symlink(program, exe).expect("made");
            }
        }

        fn refused(&self, file: &str, wanted: &str) -> bool {
            let domain = xml::parse(DOMAIN).expect("it is XML");
            refused(self.0.path(), &domain, &[(PathBuf::from(file), wanted)]).is_some()
        }
    }

    #[test]
    fn a_qemu_is_confined_where_libvirt_is_unless_somebody_says_otherwise() {
        let host = Host::new();
        assert!(host.confines(DOMAIN, "") && host.confines(DOMAIN, "#security_driver = \"none\"\n"));
        assert!(host.confines(DOMAIN, "security_driver = [ \"selinux\", \"apparmor\" ]\n"));
        assert!(!host.confines(DOMAIN, "security_driver = \"none\"\n"));
        assert!(!host.confines(DOMAIN, "security_default_confined = 0\n"));
        let labelled = |label: &str| format!("<domain><seclabel {label}/></domain>");
        assert!(!host.confines(&labelled("type='none' model='apparmor'"), ""));
        assert!(!host.confines(&labelled("type='none'"), ""));
        assert!(host.confines(&labelled("type='none' model='dac'"), ""));
        assert!(host.confines(&labelled("type='dynamic' model='apparmor'"), "security_default_confined = 0\n"));
        assert!(!host.confines(&labelled("type='static' model='apparmor'"), ""));
        assert!(!host.confines(DOMAIN, "security_default_confined = 0 # as on all our hosts\n"));
        for (profiles, is) in [
            ("/usr/sbin/libvirtd (complain)\n", true),
            ("virtqemud (enforce)\n", true),
            ("libvirt-4dea22b3-1d52-d8f3-2516-782e98ab3fa0 (enforce)\n", false),
            ("", false),
        ] {
            host.write(PROFILES, profiles);
            assert_eq!(host.confines(DOMAIN, ""), is, "{profiles}");
        }
        std::fs::remove_file(host.0.path().join(PROFILES)).expect("removed");
        assert!(!host.confines(DOMAIN, ""), "there is no AppArmor");
    }

    /// Each daemon looks for a profile of its own: that of one which does not run confines nobody.
    #[test]
    fn the_profile_that_counts_is_that_of_the_daemon_that_starts_the_qemu() {
        let host = Host::new();
        let (libvirtd, virtqemud) =
            ("/usr/sbin/libvirtd (enforce)\n", "virtqemud (enforce)\nvirtqemud//qemu_bridge_helper (enforce)\n");
        for (program, profiles, is) in [
            ("/usr/sbin/libvirtd", virtqemud, false),
            ("/usr/sbin/libvirtd", libvirtd, true),
            ("/usr/sbin/libvirtd (deleted)", libvirtd, true),
            ("/usr/sbin/virtqemud", virtqemud, true),
            ("/usr/sbin/virtqemud", libvirtd, false),
            // Who calls it is not known: whichever is there counts.
            ("/usr/bin/bash", virtqemud, true),
            ("/usr/bin/bash", libvirtd, true),
        ] {
            host.write(PROFILES, &format!("/usr/bin/man (enforce)\n{profiles}"));
            host.is_called_by(program);
            assert_eq!(host.confines(DOMAIN, ""), is, "{program}, {profiles}");
        }
        host.is_called_by("/usr/sbin/virtqemud");
        host.write(PROFILES, &format!("{libvirtd}{virtqemud}"));
        assert!(host.confines(DOMAIN, ""), "both");
    }

    /// The rules of the package let pass all that the configuration of the package has.
    #[test]
    fn what_is_to_be_added_is_enough_and_without_it_is_not() {
        let needed = [
            ("/run/amberlog/web/disk0.sock", "rw"),
            ("/run/amberlog/web/shim.sock", "rw"),
            ("/usr/lib/amberlog/libamberlog_vmm_shim.so", "mr"),
            ("/dev/shm/amberlog-112/web-4711-0/ram", "rwk"),
            ("/dev/shm/amberlog-112.0123456789abcdef/web-4711-0/ram", "rwk"),
            ("/dev/userfaultfd", "rw"),
        ];
        let host = Host::new();
        // Libraries may be loaded whatever there is.
        assert!(needed.iter().all(|(file, wanted)| host.refused(file, wanted) != file.starts_with("/usr/lib/")));
        host.write(LOCAL, OURS);
        for (file, wanted) in needed {
            assert!(!host.refused(file, wanted), "{file}");
        }
        for other in
            ["/run/amberlog/control.sock", "/dev/shm/amberlog-112/web-4711-0/log-0.table", "/dev/shm/other/ram"]
        {
            assert!(host.refused(other, "rw"), "{other}");
        }
        assert!(host.refused("/usr/lib/amberlog/libamberlog_vmm_shim.so", "w"), "it is only read");
    }

    #[test]
    fn rules_of_an_administrators_own_count_and_so_does_what_is_not_understood() {
        let socket = "/run/amberlog/web/disk0.sock";
        for (name, rule, is_refused) in [
            (LOCAL, "/run/amberlog/*/*.sock rw,", false),
            (LOCAL, "  @{run}/amberlog/** rw,  # ours", false),
            (LOCAL, "rw /{,var/}run/{libvirt,amberlog}/web/disk[0-9].sock,", false),
            (LOCAL, "owner \"/run/amberlog/web/disk?.sock\" rwk,", false),
            (LOCAL, "@{SOMEWHERE}/web/disk0.sock rw,", false),
            (LOCAL, "/run/{a,{b,amberlog/web}}/disk0.sock rw,", false),
            ("etc/apparmor.d/libvirt/TEMPLATE.qemu", "/run/** rw,", false),
            ("etc/apparmor.d/libvirt/libvirt-4dea22b3-1d52-d8f3-2516-782e98ab3fa0", "/run/** rw,", false),
            ("etc/apparmor.d/abstractions/libvirt-qemu.d/amberlog", "/run/** rw,", false),
            ("etc/apparmor.d/libvirt/libvirt-00000000-1d52-d8f3-2516-782e98ab3fa0", "/run/** rw,", true),
            (LOCAL, "#/run/amberlog/*/*.sock rw,", true),
            (LOCAL, "/run/amberlog/*/*.sock r,", true),
            (LOCAL, "/run/amberlog/*.sock rw,", true),
            (LOCAL, "deny /run/amberlog/** rw,", true),
            (LOCAL, "/run/amberlog/db/*.sock rw,", true),
        ] {
            let host = Host::new();
            host.write(name, rule);
            assert_eq!(host.refused(socket, "rw"), is_refused, "{name}: {rule}");
        }
    }

    /// A domain that AppArmor lets start is never kept from it: what is not understood lets everything pass.
    #[test]
    fn what_is_not_understood_lets_everything_pass() {
        let socket = "/run/amberlog/web/disk0.sock";
        for rules in [
            "  include <local/ours>\n",
            "#include <abstractions/amberlog-of-ours>\n",
            "  file,\n",
            "  all,\n",
            "  /run/amberlog/**\n    rw,\n",
        ] {
            let host = Host::new();
            host.write(LOCAL, rules);
            assert!(!host.refused(socket, "rw"), "{rules}");
        }
        let host = Host::new();
        let template = "#include <tunables/global>\n\nprofile LIBVIRT_TEMPLATE flags=(attach_disconnected) {\n  #include <abstractions/libvirt-qemu>\n}\n";
        host.write("etc/apparmor.d/libvirt/TEMPLATE.qemu", template);
        host.write(LOCAL, "# Site-specific rules.\n/srv/images/** rwk,\n");
        assert!(host.refused(socket, "rw"), "these say nothing of it");
        host.write("etc/apparmor.d/libvirt/TEMPLATE.qemu", &template.replace("attach_disconnected", "complain"));
        assert!(!host.refused(socket, "rw"));
    }
}
