//! The sandbox as the kernel sees it: which threads are fenced in, and that a VMM inherits nothing.

use crate::support::*;
use guest_kit::image::ExtRecipe;
use std::collections::BTreeMap;
use std::process::Command;

/// What the command that stands for a VMM says of the threads of the worker beside it, and of itself: a name and a number of `Seccomp:` each.
/// It looks until those of a disk are there with the number that is wanted of them, or for 20 s.
const LOOK: &str = "look() {
    for process in /proc/[0-9]*; do
        grep -q \"^PPid:[[:space:]]*$PPID\\$\" $process/status 2>/dev/null || continue
        for thread in $process/task/*/status; do awk '/^Name:/ {name=$2} /^Seccomp:/ {print name, $2}' $thread; done
    done
}
is_seen() { echo \"$found\" | grep -q \"^$1\\$\"; }
sleep 0.5
tries=0
while found=$(look); ! { is_seen \"disk $1\" && is_seen \"vhost $1\"; } && [ $tries -lt 200 ]; do
    tries=$((tries + 1)); sleep 0.1
done
echo \"$found\"
awk '/^Seccomp:/ {print \"vmm\", $2}' /proc/self/status";

fn look(options: &[&str], wanted: &str) -> BTreeMap<String, String> {
    let bench = Bench::new();
    let image = bench.path("disk.img");
    ExtRecipe::ext4(32, 4).make(&image).unwrap();
    let words = bench.words(options.iter().map(Into::into).chain(disk(&image)));
    let output =
        Command::new(&words[0]).args(&words[1..]).args(["--", "sh", "-c", LOOK, "look", wanted]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains("amberlog goes on without that"), "{}", text(&output.stderr));
    let pair = |line: &str| line.split_once(' ').map(|(name, number)| (name.to_owned(), number.to_owned()));
    text(&output.stdout).lines().filter_map(pair).collect()
}

#[test]
fn threads_of_a_guest_are_fenced_in_and_its_vmm_is_not() {
    let own = look(&["--no-sandbox"], "[0-9]*")["vmm"].clone();
    let found = look(&[], "2");
    for thread in ["disk", "vhost"] {
        assert_eq!(found[thread], "2", "{found:?}");
    }
    assert_eq!(found["vmm"], own, "{found:?}");
    assert_eq!(look(&["--no-sandbox"], "[0-9]*")["disk"], own, "switched off");
}
