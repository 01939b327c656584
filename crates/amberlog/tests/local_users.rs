//! What another user of the host can put in amberlog's way, tried with a second uid that is real, in a mount namespace of
//! its own with a /dev/shm, a /run and a /tmp of its own. Needs root, and says so where it is not.
//!
//! Each case is a shell script: `nobody` runs a line as the other user, `dear` is root's and has to be as it was.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// A hang is a failure, too.
const LIMIT: Duration = Duration::from_secs(60);

fn can_play_two() -> bool {
    let works = Command::new("unshare").args(["-m", "true"]).output().is_ok_and(|output| output.status.success());
    if !works {
        println!("skipped: a second user in a mount namespace of his own can only be played by root");
    }
    works
}

const PRELUDE: &str = r#"
set -u
mount --make-rprivate /
mount -t tmpfs -o mode=1777 none /dev/shm
mount -t tmpfs -o mode=0755 none /run
cd /dev/shm
mkdir -m 700 dear && echo dear > dear/file && chmod 600 dear/file
mkdir -m 755 images && truncate -s 16M images/a.img && mke2fs -q -F -t ext4 -J size=4 images/a.img
KEY=$(stat -c 'file-%d-%i' images/a.img | awk -F- '{ printf "file-%x-%x", $2, $3 }')
SHM=/dev/shm PLACE=/dev/shm/amberlog-0
nobody() { setpriv --reuid 65534 --regid 65534 --clear-groups sh -c "$1"; }
forged='{"schema":1,"ram":[{"path":"/dev/shm/dear/file","first_page":0}],"logs":[]}'
"#;

const EPILOGUE: &str = r#"
[ "$(cat dear/file)" = dear ] || { echo "DAMAGED: dear/file"; exit 99; }
[ "$(ls dear)" = file ] || { echo "DAMAGED: dear has $(ls dear)"; exit 99; }
[ "$(stat -c '%a %u' dear dear/file | tr '\n' ' ')" = "700 0 600 0 " ] || { echo "DAMAGED: modes"; exit 99; }
exit $RC
"#;

fn run(script: &str) -> Output {
    let mut command = Command::new("unshare");
    let script = format!("{PRELUDE}\n{script}\nRC=$?\n{EPILOGUE}");
    command.args(["-m", "timeout", "-k", "1", &LIMIT.as_secs().to_string(), "bash", "-c", &script]);
    command.env("AMBERLOG", env!("CARGO_BIN_EXE_amberlog")).env("NO_COLOR", "1");
    command.output().expect("unshare")
}

/// Runs a script whose last command has to end so, and to say that.
#[track_caller]
fn expect(script: &str, code: i32, sentence: &str) {
    let begun = Instant::now();
    let output = run(script);
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(begun.elapsed() < LIMIT, "it hangs: {script}\n{text}");
    assert_eq!(output.status.code(), Some(code), "{script}\n{text}");
    assert!(text.contains(sentence), "'{sentence}' was expected of {script}\n{text}");
}

#[test]
fn a_registry_that_somebody_else_made_is_not_believed() {
    if !can_play_two() {
        return;
    }
    let start = "$AMBERLOG run --disk images/a.img -- true";
    for theirs in [
        // As it was found: the link was followed, and what it led to removed.
        "mkdir -p $PLACE/by-image; ln -s /dev/shm/dear $PLACE/by-image/$KEY",
        "mkdir -p $PLACE/by-image $PLACE/a; echo '$forged' > $PLACE/a/area.json; ln -s $PLACE/a $PLACE/by-image/$KEY",
        "mkdir -p -m 777 $PLACE; ln -s /dev/shm/dear $PLACE/by-image",
        "ln -s /dev/shm/dear $PLACE",
        "ln -s nowhere $PLACE",
        "touch $PLACE",
        "mkfifo $PLACE",
        "ln -s /dev/shm/dear /dev/shm/amberlog",
    ] {
        let script = format!("export PLACE KEY forged; nobody \"{theirs}\"; {start} && ! ls -d nowhere 2>/dev/null");
        expect(&script, 0, "");
    }
    // And the one that root makes is root's alone.
    expect(&format!("{start}; stat -c '%a %u' $PLACE $PLACE/by-image | sort -u"), 0, "700 0");
}

#[test]
fn directories_that_others_can_have_changed_are_refused() {
    if !can_play_two() {
        return;
    }
    let run = |shm: &str| format!("$AMBERLOG run --shm {shm} --disk images/a.img -- true");
    for (theirs, shm, sentence) in [
        ("nobody 'mkdir -m 700 x'", "x", "it belongs to user 65534"),
        ("nobody 'mkdir -m 777 x'", "x", "it belongs to user 65534"),
        ("nobody 'ln -s dear x'", "x", "it is a link"),
        ("nobody 'ln -s nowhere x'", "x", "it is a link"),
        ("nobody 'mkdir x'", "x/y", "it belongs to user 65534"),
        ("mkdir x; chmod 777 x", "x", "others can write to it"),
        ("mkdir x; chmod 777 x", "x/y", "others can write to it"),
        ("mkdir x; chmod 770 x", "x", "others can write to it"),
    ] {
        expect(
            &format!("{theirs}; {}; RC=$?; [ $(ls -A x 2>/dev/null | wc -l) -le 1 ] || RC=98; (exit $RC)", run(shm)),
            2,
            sentence,
        );
    }
    // In a shared one where nobody can exchange what is ours, ours is ours.
    expect(&format!("mkdir x; chmod 1777 x; {}", run("x")), 0, "");
    // The daemon's own directory.
    let serve = "printf 'run = \"/dev/shm/x\"\\n' > c.toml; $AMBERLOG serve --config c.toml";
    for (theirs, sentence) in [
        ("nobody 'mkdir -m 700 x'", "it belongs to user 65534"),
        ("nobody 'ln -s dear x'", "it is a link"),
        ("mkdir x; chmod 777 x", "others can enter it or write to it"),
    ] {
        expect(&format!("{theirs}; {serve}"), 2, sentence);
    }
}

#[test]
fn recover_trusts_a_directory_no_more_than_its_owner() {
    if !can_play_two() {
        return;
    }
    let recover = "$AMBERLOG recover --area";
    // The former default's place, made by somebody else before the first start.
    let theirs =
        "nobody 'mkdir -p -m 755 amberlog/vm-1-0; cd amberlog/vm-1-0; touch lock; echo \"$forged\" > area.json'";
    expect(&format!("export forged; {theirs}; {recover} amberlog"), 2, "it belongs to user 65534");
    expect(&format!("export forged; {theirs}; {recover} amberlog/vm-1-0"), 2, "it belongs to user 65534");
    // A link to something of root's in a place of root's.
    expect(&format!("mkdir -m 700 x; ln -s ../dear x/vm-1-0; {recover} x"), 0, "it is a link");
    // Root's own directory, in which something lies that amberlog has not put there.
    let own = "mkdir -m 700 x; mkdir -m 700 x/vm-1-0; cd x/vm-1-0; touch lock; echo '{\"schema\":1,\"ram\":[],\"logs\":[]}' > area.json";
    let after = format!("cd ../..; {recover} x/vm-1-0");
    for (what, code, sentence) in [
        ("ln -sf /dev/shm/dear/file area.json", 2, "it is a link"),
        ("rm area.json; ln /dev/shm/dear/file area.json; chmod 600 area.json", 2, "2 names"),
        ("rm area.json; mkfifo area.json", 2, "no plain file"),
        ("rm area.json; mknod area.json c 1 3", 2, ""),
        ("chown 65534 area.json", 2, "it belongs to user 65534"),
        ("rm lock; ln -s /dev/shm/dear/new lock", 2, "it is a link"),
        ("rm lock; ln -s /dev/shm/dear/file lock", 2, "it is a link"),
        ("rm lock; mkfifo lock", 2, "no plain file"),
        ("ln -s /dev/shm/dear/file vmms", 2, "it is a link"),
        ("mkfifo vmms", 2, "no plain file"),
        ("chmod 755 .", 2, "others can enter it"),
        ("chown 65534 .", 2, "it belongs to user 65534"),
        ("truncate -s 100M area.json", 2, "it has more than"),
    ] {
        let script = format!("{own}; {what}; {after}");
        // The hard link to it is one of its names.
        expect(&format!("{script}; RC=$?; rm -f x/vm-1-0/area.json; (exit $RC)"), code, sentence);
    }
    // What is not amberlog's stays, and so does what a link leads to.
    for what in
        ["echo mine > mine", "mkdir deep; echo mine > deep/mine", "ln -s /dev/shm/dear log-0.table", "mkdir ram"]
    {
        expect(
            &format!("{own}; {what}; {after}; RC=$?; ls x/vm-1-0 > /dev/null || RC=98; (exit $RC)"),
            0,
            "amberlog has not made",
        );
    }
}

#[test]
fn a_forged_description_reaches_nothing_outside_its_directory() {
    if !can_play_two() {
        return;
    }
    let make = |description: &str| {
        format!(
            "mkdir -m 700 x; mkdir -m 700 x/vm-1-0; touch x/vm-1-0/lock; cat > x/vm-1-0/area.json <<'EOF'\n{description}\nEOF\n\
             $AMBERLOG recover --area x/vm-1-0"
        )
    };
    // Guest memory elsewhere was punched to zeros.
    for path in ["/dev/shm/dear/file", "../../dear/file", "/dev/shm/x/vm-1-0/../../dear/file", "dear/file"] {
        let description = format!(r#"{{"schema":1,"ram":[{{"path":"{path}","first_page":0}}],"logs":[]}}"#);
        expect(&make(&description), 0, "");
    }
    let place = r#"{"home_disk":0,"journal_disk":0,"home_start":0,"home_blocks":1,"block_bytes":4096,"log_blocks":1024,"runs":[],"own_blocks":[],"is_external":false,"file_system_uuid":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}"#;
    for name in ["../../dear/file", "/dev/shm/dear/file", "log-0"] {
        let description = format!(
            r#"{{"schema":1,"ram":[],"logs":[{{"name":"{name}","home_image":"/dev/shm/dear/file","journal_image":"/dev/shm/dear/file","place":{place}}}]}}"#
        );
        let output = run(&make(&description));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(matches!(output.status.code(), Some(1..=3)), "{text}");
        assert!(!text.is_empty(), "{name}");
    }
}

#[test]
fn outputs_and_sockets_are_nobody_elses() {
    if !can_play_two() {
        return;
    }
    for option in ["--report", "--samples", "--trace"] {
        let run = format!("$AMBERLOG run {option} out --disk images/a.img -- true");
        expect(&format!("ln -s dear/file out; {run}"), 2, "it is a link");
        expect(&format!("ln -s dear/new out; {run}"), 2, "it is a link");
        expect(&format!("ln dear/file out; {run}; RC=$?; rm out; (exit $RC)"), 2, "2 names");
        expect(&format!("mkfifo out; {run}"), 2, "no plain file");
        // The user's own mask decides who may read it.
        expect(&format!("umask 022; {run}; stat -c '%a' out"), 0, "644");
        expect(&format!("umask 077; {run}; stat -c '%a' out"), 0, "600");
    }
    // What the VMM makes has the user's mask; its memory is there before it, for its owner alone.
    let vmm = "sh -c 'touch made; stat -c \"%n %a\" made /dev/shm/amberlog-0/vm-*/* | sort'";
    let run = format!("umask 022; $AMBERLOG run --disk images/a.img -- {vmm} | sed 's#.*/##'");
    expect(&run, 0, "ram 600");
    expect(&run, 0, "made 644");
    expect(&format!("{run} | grep -v made | grep -v ' 600$' ; [ $? = 1 ]"), 0, "");
    let serve = "printf 'run = \"/run/x\"\\n[[vm]]\\nname = \"a\"\\ndisks = [\"/dev/shm/images/a.img\"]\\n' > c.toml
        umask 0; $AMBERLOG serve --config c.toml & PID=$!
        for i in $(seq 300); do $AMBERLOG status --run /run/x 2>/dev/null | grep waiting && break; sleep 0.1; done
        stat -c '%a %n' /run/x /run/x/control.sock /run/x/a /run/x/a/*.sock /dev/shm/amberlog-0/vm-*/*
        nobody \"$AMBERLOG status --run /run/x\" && exit 97
        kill $PID; wait $PID";
    let output = self::run(serve);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let mut lines = text.lines().filter(|line| line.contains('/')).peekable();
    assert!(lines.peek().is_some());
    for line in lines {
        let expected = if Path::new(line.split(' ').nth(1).unwrap_or_default()).extension().is_none()
            && (line.ends_with("/x") || line.ends_with("/a"))
        {
            "700 "
        } else {
            "600 "
        };
        assert!(line.starts_with(expected), "{line}");
    }
}

/// Root checks what a daemon of another user is to serve: what that may not do is found.
#[test]
fn a_check_says_what_the_daemon_may() {
    if !can_play_two() {
        return;
    }
    let script = |prepare: &str| {
        format!(
            r#"
mkdir -m 700 /run/x /dev/shm/y; chown 65534:65534 /run/x /dev/shm/y
printf 'run = "/run/x"\nshm = "/dev/shm/y"\n' > c.toml; chmod 644 c.toml
setpriv --reuid 65534 --regid 65534 --clear-groups $AMBERLOG serve --config /dev/shm/c.toml 2> log & PID=$!
for i in $(seq 300); do [ -S /run/x/control.sock ] && break; sleep 0.1; done
printf '[[vm]]\nname = "a"\nmemory_budget_mib = 1\ndisks = ["/dev/shm/images/a.img"]\n' >> c.toml
{prepare}
$AMBERLOG serve --check --config c.toml; RC=$?
kill $PID; wait $PID
(exit $RC)"#
        )
    };
    expect(&script("chmod 600 images/a.img"), 1, "a.img cannot be read and written: Permission denied");
    expect(&script("chmod 600 images/a.img; chown 65534 images/a.img"), 0, "good, 1 VMs");
    expect(
        &script("kill $PID; wait $PID; chown -R 0:0 /run/x /dev/shm/y; chmod 600 images/a.img"),
        0,
        "this is what root sees",
    );
}

/// A daemon may write to an image that is not its own, and cannot seal it: its guest cannot be moved, and that is said before it is tried.
#[test]
fn status_says_that_a_guest_cannot_be_moved_whose_image_is_somebody_elses() {
    if !can_play_two() {
        return;
    }
    let script = |prepare: &str| {
        format!(
            r#"
mkdir -m 700 /run/x /dev/shm/y; chown 65534:65534 /run/x /dev/shm/y; {prepare}
printf 'run = "/run/x"\nshm = "/dev/shm/y"\n[migration]\nexperimental = true\n' > c.toml
printf '[[vm]]\nname = "a"\ndisks = ["/dev/shm/images/a.img"]\n' >> c.toml
chmod 644 c.toml
setpriv --reuid 65534 --regid 65534 --clear-groups $AMBERLOG serve --config /dev/shm/c.toml 2> log & PID=$!
for i in $(seq 300); do $AMBERLOG status --json a --run /run/x > status 2> /dev/null && grep -q '"state": "waiting"' status && break; sleep 0.1; done
kill $PID; wait $PID
cat status log
grep -q '"state": "waiting"' status"#
        )
    };
    expect(
        &script("chmod 666 images/a.img"),
        0,
        "only its owner, or root, can seal it for another host: chown 65534 /dev/shm/images/a.img",
    );
    expect(&script("chmod 666 images/a.img"), 0, "\"possible\": false");
    expect(&script("chown 65534 images/a.img"), 0, "\"possible\": true");
}

/// A VMM that is another user than the daemon: who is named gets to the disk's socket and the guest's memory, and to nothing
/// else; who is not named gets to neither. The VMM is a real QEMU whose guest is not started.
#[test]
fn sockets_are_for_those_whom_the_configuration_names() {
    if !can_play_two() {
        return;
    }
    let script = |sockets: &str, member: &str| {
        format!(
            r#"
member() {{ setpriv --reuid 65534 --regid 65534 {member} sh -c "$1"; }}
other() {{ setpriv --reuid 65533 --regid 65533 --clear-groups sh -c "$1"; }}
may='import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])'
export may
mkdir -m 755 /run/x.d; chmod 755 /dev/shm/images
printf 'run = "/run/x"\n[sockets]\n{sockets}\n[[vm]]\nname = "a"\ndisks = ["/dev/shm/images/a.img"]\n' > c.toml
$AMBERLOG serve --config c.toml 2> /run/log & PID=$!
for i in $(seq 300); do [ -S /run/x/a/disk0.sock ] && $AMBERLOG arguments a --run /run/x --memory 64 > /run/words 2>/dev/null && break; sleep 0.1; done
end() {{ echo "$1"; cat /run/log; kill $PID; wait $PID; exit 90; }}
RAM=$(ls /dev/shm/amberlog-0/vm-*/ram) || end 'no memory'
member "python3 -c \"\$may\" /run/x/a/disk0.sock" || end 'who is named cannot connect'
member ": <> $RAM" || end 'who is named cannot open the memory'
member "ls /run/x/a" 2>/dev/null && end 'directories are listed'
member "ls $(dirname $RAM)" 2>/dev/null && end 'the VM directory is listed'
member "python3 -c \"\$may\" /run/x/control.sock" 2>/dev/null && end 'the control socket is open'
for file in $(dirname $RAM)/*; do
    [ $file = $RAM ] || ! member "cat $file" > /dev/null 2>&1 || [ -S $file ] || end "$file can be read"
done
other "python3 -c \"\$may\" /run/x/a/disk0.sock" 2>/dev/null && end 'anybody can connect'
other ": <> $RAM" 2>/dev/null && end 'anybody can open the memory'
cat /run/words
WORDS=$(cat /run/words | tr '\n' ' ')
export WORDS
member "exec env $WORDS -machine accel=tcg -display none -nodefaults -S -monitor none" 2> /run/qemu & VMM=$!
for i in $(seq 200); do $AMBERLOG status --run /run/x > /run/status; grep -q running /run/status && break; sleep 0.1; done
grep running /run/status || {{ cat /run/qemu /run/status; end 'the VMM is not served'; }}
kill $VMM; wait $VMM
kill $PID; wait $PID"#
        )
    };
    expect(&script("group = \"4242\"", "--groups 4242"), 0, "running");
    expect(&script("owner = \"65534\"", "--clear-groups"), 0, "running");
}

/// A place that is ours by its owner and not by its mode may hold what an image is owed: nobody starts beside it.
#[test]
fn a_place_of_ours_that_others_can_enter_is_not_passed_over() {
    if !can_play_two() {
        return;
    }
    let start = "$AMBERLOG run --disk images/a.img -- true";
    for mode in ["755", "777"] {
        let opened = format!("{start}; chmod {mode} $PLACE");
        expect(&format!("{opened}; {start}"), 2, "others can enter it");
        expect(&format!("{opened}; $AMBERLOG recover --disk images/a.img"), 3, "others can enter it");
        expect(&format!("{opened}; chmod 700 $PLACE; {start}"), 0, "");
    }
}

/// Outputs and regions in a place that others can write to, by a link that leads to where nothing is yet.
#[test]
fn links_that_lead_nowhere_are_not_made_into_files_elsewhere() {
    if !can_play_two() {
        return;
    }
    let link = "nobody 'ln -s /dev/shm/dear/new /dev/shm/out'";
    for option in ["placement=nvm=/dev/shm/out,nvm-size=16", "log-writes=/dev/shm/out"] {
        let output = run(&format!("{link}; $AMBERLOG run --disk images/a.img,{option} -- true"));
        assert!(matches!(output.status.code(), Some(1..=3)), "{option}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let theirs = "nobody 'touch /dev/shm/out; chmod 666 /dev/shm/out'";
    expect(&format!("{theirs}; $AMBERLOG run --disk images/a.img,log-writes=/dev/shm/out -- true"), 2, "user 65534");
}

/// What is no image is not waited for, by anybody.
#[test]
fn a_pipe_in_the_place_of_an_image_is_refused_at_once() {
    if !can_play_two() {
        return;
    }
    let run = "$AMBERLOG run --disk images/a.img -- true; mkfifo images/pipe";
    for command in [
        "run --disk images/pipe -- true",
        "run --disk images/pipe,format=raw -- true",
        "run --disk images/a.img --journal-disk images/pipe -- true",
        "recover --disk images/pipe",
        "recover --disk images/a.img --journal images/pipe",
        "inspect --disk images/pipe",
    ] {
        let output = self::run(&format!("{run}; $AMBERLOG {command}"));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(matches!(output.status.code(), Some(1..=3)), "{command}: {:?}: {text}", output.status);
        assert!(text.contains("neither"), "{command}: {text}");
    }
    let serve = "printf 'run = \"/run/x\"\\n[[vm]]\\nname = \"a\"\\ndisks = [\"/dev/shm/images/pipe\"]\\n' > c.toml
        $AMBERLOG serve --config c.toml & PID=$!
        for i in $(seq 100); do $AMBERLOG status --run /run/x 2>/dev/null | grep -q neither && break; sleep 0.1; done
        $AMBERLOG status --run /run/x; kill $PID; wait $PID";
    expect(&format!("{run}; {serve}"), 0, "neither");
}

/// An output that is what is served is refused before it is emptied, by whatever name.
#[test]
fn no_output_is_written_over_an_image() {
    if !can_play_two() {
        return;
    }
    for option in ["--report", "--samples", "--trace"] {
        for name in ["images/a.img", "images/b"] {
            let script = format!(
                "ln images/a.img images/b; A=$(sha1sum < images/a.img)
                $AMBERLOG run {option} {name} --disk images/a.img -- true; RC=$?
                [ \"$A\" = \"$(sha1sum < images/a.img)\" ] || RC=97; (exit $RC)"
            );
            expect(&script, 2, "it would be written over");
        }
    }
    expect("$AMBERLOG run --disk images/a.img,log-writes=images/a.img -- true", 2, "it would be written over");
}

/// What is started may be a script that adds what contradicts the promise: it is seen when the VMM connects.
#[test]
fn a_script_in_the_place_of_the_vmm_hides_nothing() {
    if !can_play_two() {
        return;
    }
    for (added, sentence) in
        [("-snapshot", "-snapshot has no effect"), ("-incoming defer", "-incoming: a guest that comes from elsewhere")]
    {
        let script = format!(
            "printf '#!/bin/sh\\nexec qemu-system-x86_64 {added} \"$@\"\\n' > vmm; chmod 755 vmm
            $AMBERLOG run --disk images/a.img -- ./vmm -machine accel=tcg -m 64 -display none -nodefaults -S -monitor none"
        );
        expect(&script, 1, sentence);
    }
}
