//! The sandbox as the kernel sees it: which threads are fenced in, and that a VMM inherits nothing.

use crate::support::*;
use guest_kit::image::ExtRecipe;
use std::collections::BTreeMap;
use std::process::Command;

/// What the command that stands for a VMM says of the threads of the worker beside it, and of itself: a name and a number of `Seccomp:` each.
const LOOK: &str = "sleep 0.5
for process in /proc/[0-9]*; do
    grep -q \"^PPid:[[:space:]]*$PPID\\$\" $process/status 2>/dev/null || continue
    for thread in $process/task/*/status; do awk '/^Name:/ {name=$2} /^Seccomp:/ {print name, $2}' $thread; done
done
awk '/^Seccomp:/ {print \"vmm\", $2}' /proc/self/status";

fn look(options: &[&str]) -> BTreeMap<String, String> {
    let bench = Bench::new();
    let image = bench.path("disk.img");
    ExtRecipe::ext4(32, 4).make(&image).unwrap();
    let words = bench.words(options.iter().map(Into::into).chain(disk(&image)));
    let output = Command::new(&words[0]).args(&words[1..]).args(["--", "sh", "-c", LOOK]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains("amberlog goes on without that"), "{}", text(&output.stderr));
    let pair = |line: &str| line.split_once(' ').map(|(name, number)| (name.to_owned(), number.to_owned()));
    text(&output.stdout).lines().filter_map(pair).collect()
}

#[test]
fn threads_of_a_guest_are_fenced_in_and_its_vmm_is_not() {
    let own = look(&["--no-sandbox"])["vmm"].clone();
    let found = look(&[]);
    for thread in ["disk", "vhost"] {
        assert_eq!(found[thread], "2", "{found:?}");
    }
    assert_eq!(found["vmm"], own, "{found:?}");
    assert_eq!(look(&["--no-sandbox"])["disk"], own, "switched off");
}
