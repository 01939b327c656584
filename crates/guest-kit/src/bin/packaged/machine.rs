//! A Debian that runs: a directory becomes the root of namespaces of its own, and its systemd is the first process there.
//!
//! Must never: change anything of the machine that it runs on. What is mounted is gone with the namespaces, and its control groups are below one
//! that is made for it and removed. Failure story: a systemd that does not come up is an error with what it has said.

use guest_kit::program;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long the first process may take until the services have been started.
const BOOT: Duration = Duration::from_secs(120);
/// How long a command in it may take: dpkg and systemd work for a while on a busy machine, and none of them for ever.
const COMMAND: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(5);

/// What is mounted before systemd is started: what a container has, of which systemd has a page (`CONTAINER_INTERFACE.md`).
const PRELUDE: &str = r#"
set -e
root=$1
shift
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for node in null zero full random urandom tty kvm userfaultfd; do
    [ ! -c /dev/$node ] || cp -a /dev/$node dev/
done
chmod 666 dev/null dev/zero dev/full dev/random dev/urandom dev/tty
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for place; do
    mkdir -p "./$place"
    mount --bind "$place" "./$place"
done
mkdir -p before
pivot_root . before
exec chroot . /bin/sh -c 'umount -l /before && rmdir /before &&
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=amberlog-test \
        setpriv --bounding-set=-sys_module,-sys_time,-sys_rawio,-syslog /lib/systemd/systemd --unit=multi-user.target'
"#;

/// See the module. It ends when this is dropped.
pub struct Machine {
    process: Child,
    /// The first process in it, by its number here.
    first: u32,
    control_group: PathBuf,
    /// Its root, as it is seen from here.
    pub root: PathBuf,
}

impl Machine {
    /// Boots the Debian in `root`; `places` are directories of this machine that are in it, too, under the same names.
    pub fn boot(root: &Path, places: &[&Path], log: &Path) -> Result<Self, String> {
        let id: String =
            read(Path::new("/proc/sys/kernel/random/uuid"))?.chars().filter(char::is_ascii_hexdigit).collect();
        write(&root.join("etc/machine-id"), &format!("{id}\n"))?;
        let control_group = control_group()?;
        let said = File::create(log).map_err(|error| format!("cannot write {}: {error}", log.display()))?;
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--", "sh", "-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""])
            .arg(&control_group)
            .args(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--net", "--cgroup"])
            .args(["sh", "-c", PRELUDE, "sh"])
            .arg(root)
            .args(places)
            .stdin(Stdio::null())
            .stdout(said.try_clone().map_err(sentence)?)
            .stderr(said);
        let process = match program::spawn(command) {
            Ok(process) => process,
            Err(error) => {
                let _ = fs::remove_dir(&control_group);
                return Err(format!("unshare cannot be started: {error}"));
            }
        };
        let mut machine = Self { process, first: 0, control_group, root: root.to_owned() };
        let deadline = Instant::now() + BOOT;
        let is_up = |machine: &mut Self| {
            machine.first = child_of(machine.process.id()).unwrap_or(0);
            // Before it has become systemd it still sees what is this machine's.
            let program = fs::read_link(format!("/proc/{}/exe", machine.first));
            program.is_ok_and(|program| program.ends_with("systemd/systemd"))
                && machine
                    .inside(&["systemctl", "is-active", "multi-user.target"])
                    .is_ok_and(|output| output.stdout == b"active\n")
        };
        while !is_up(&mut machine) {
            let ended = machine.process.try_wait().map_err(sentence)?;
            if ended.is_some() || Instant::now() > deadline {
                let said = read(log).unwrap_or_default();
                return Err(format!(
                    "systemd does not come up in namespaces of its own ({ended:?}); it takes root and a kernel with cgroup2\n{said}"
                ));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(machine)
    }

    /// The words before a command that is to run in it, as root and with its environment.
    pub fn enter(&self) -> Vec<String> {
        let target = self.first.to_string();
        let words = ["nsenter", "--target", &target, "--mount", "--pid", "--ipc", "--uts", "--net", "--cgroup", "--"];
        words.map(str::to_owned).to_vec()
    }

    /// Runs a command in it to its end.
    ///
    /// # Errors
    /// When it cannot be started, or has not ended in time: then it is killed, and what it has started is left to the end of the machine.
    pub fn inside(&self, words: &[&str]) -> std::io::Result<Output> {
        let enter = self.enter();
        let mut command = Command::new(&enter[0]);
        command.args(&enter[1..]).args(["env", "-i", "LC_ALL=C", "HOME=/root", "DEBIAN_FRONTEND=noninteractive"]);
        command.arg("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").args(words);
        output_within(command.current_dir("/"), COMMAND)
    }

    /// The same for one that has to succeed; gives what it prints.
    pub fn run(&self, words: &[&str]) -> Result<String, String> {
        let output = self.inside(words).map_err(sentence)?;
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        if output.status.success() {
            Ok(out)
        } else {
            Err(format!("{}: {}\n{out}{err}", words.join(" "), output.status))
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // What it has started goes with its first process.
        if let Some(first) = i32::try_from(self.first).ok().and_then(Pid::from_raw) {
            let _ = kill_process(first, Signal::KILL);
        }
        let _ = self.process.kill();
        let deadline = Instant::now() + BOOT;
        // One that cannot end (storage hangs) is left behind, and does not keep this from its end.
        while !matches!(self.process.try_wait(), Ok(Some(_)) | Err(_)) && Instant::now() < deadline {
            std::thread::sleep(PAUSE);
        }
        while !removed(&self.control_group) && Instant::now() < deadline {
            std::thread::sleep(PAUSE);
        }
    }
}

/// What a command prints, which has so long for it; it is killed then. What it prints goes to files: whoever it has started may keep a pipe open.
fn output_within(command: &mut Command, limit: Duration) -> std::io::Result<Output> {
    let (mut out, mut err) = (tempfile::tempfile()?, tempfile::tempfile()?);
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?);
    let mut child = command.spawn()?;
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let sentence = format!("{command:?} has not ended in {} s, and was killed", limit.as_secs());
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, sentence));
        }
        std::thread::sleep(LOOK);
    };
    let read = |file: &mut File| {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    Ok(Output { status, stdout: read(&mut out)?, stderr: read(&mut err)? })
}

/// A control group for it alone, below the one that this process is in.
fn control_group() -> Result<PathBuf, String> {
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    let place = mounts.lines().find(|line| line.contains(" - cgroup2 ")).and_then(|line| line.split(' ').nth(4));
    let place = place.ok_or("no cgroup2 is mounted here, and systemd cannot be started without")?;
    let own = read(Path::new("/proc/self/cgroup"))?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).ok_or("this process is in no cgroup2")?;
    let path = Path::new(place).join(own).join(format!("amberlog-packaged-{}", std::process::id()));
    fs::create_dir(&path).map_err(|error| format!("the control group {} cannot be made: {error}", path.display()))?;
    Ok(path)
}

/// Removes a control group with all below it, if nobody is in them any more.
fn removed(group: &Path) -> bool {
    let below = fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in below.filter(|path| path.is_dir()) {
        removed(&path);
    }
    fs::remove_dir(group).is_ok() || !group.exists()
}

fn child_of(parent: u32) -> Option<u32> {
    let numbers = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let line = format!("PPid:\t{parent}");
    numbers.into_iter().find(|number: &u32| {
        fs::read_to_string(format!("/proc/{number}/status")).is_ok_and(|status| status.lines().any(|of| of == line))
    })
}

pub fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

pub fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

pub fn sentence(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_prints_is_there_and_one_that_does_not_end_is_killed() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let output = output_within(&mut shell("echo out; echo err >&2; exit 3"), COMMAND).expect("it ends");
        assert_eq!(
            (output.status.code(), &output.stdout[..], &output.stderr[..]),
            (Some(3), &b"out\n"[..], &b"err\n"[..])
        );
        // What it leaves behind has its output open still.
        let output = output_within(&mut shell("sleep 1 & echo out"), COMMAND).expect("it ends");
        assert_eq!(output.stdout, b"out\n");
        let error =
            output_within(&mut shell("exec sleep 1000"), Duration::from_millis(50)).expect_err("it does not end");
        assert!(error.kind() == std::io::ErrorKind::TimedOut && error.to_string().contains("was killed"), "{error}");
    }
}
