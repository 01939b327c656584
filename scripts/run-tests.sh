#!/bin/sh
# Runs every test of the workspace: what `cargo test --workspace` runs, but several programs beside each other. Those with guests wait more
# than they compute, and one after the other they leave the processors idle for half of the time.
#
#   scripts/run-tests.sh [PROGRAMS AT ONCE]
#
# Prints a line for each program, and all of what one that failed has said. Exit code 1 when one failed.
set -eu
cd "$(dirname "$0")/.."
at_once=${1:-3}
# Guests' tests wait more than they compute: one more of them at a time than there are processors.
guests_at_once=${RUST_TEST_THREADS:-$(($(nproc) + 1))}
export guests_at_once
logs=target/test-logs
rm -rf "$logs"
mkdir -p "$logs"

cargo test --workspace --no-run --message-format=json-render-diagnostics > "$logs/artifacts"

# One line a program: the directory of its crate, in which it is run, and its file. The one with the guests takes longest, and begins.
sed -n 's/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"test":true},"features":.*"executable":"\([^"]*\)".*/\1 \2/p' "$logs/artifacts" |
    sort -u | awk '{ print ($2 ~ /\/guests-[0-9a-f]*$/ ? 0 : 1), $0 }' | sort -s -k1,1n | cut -d ' ' -f 2- > "$logs/programs"
[ -s "$logs/programs" ] || { echo "no test was built" >&2; exit 1; }

# Whoever sees only the end of what this prints is to know why it failed.
name_panics() {
    while read -r _ program; do
        log=$logs/$(basename "$program")
        tail -n 2 "$log" 2> /dev/null | grep -q '^test result: ok' && continue
        echo "== why $(basename "$program") failed"
        grep -A 3 '^thread .* panicked at ' "$log" | cut -c 1-400 | head -n 40
    done < "$logs/programs"
}

# shellcheck disable=SC2016
xargs -P "$at_once" -L 1 sh -c '
    name=$(basename "$2"); log=$0/$name
    cd "$1" || exit 1
    began=$(date +%s)
    case "$name" in guests-*) export RUST_TEST_THREADS="$guests_at_once" ;; esac
    if "$2" > "$log" 2>&1; then
        echo "$name: $(sed -n "s/^test result: //p" "$log" | tail -n 1), $(($(date +%s) - began)) s"
    else
        echo "$name FAILED after $(($(date +%s) - began)) s:"
        cat "$log"
        exit 1
    fi
' "$PWD/$logs" < "$logs/programs" || { name_panics; exit 1; }

# A test that leaves its files in tmpfs takes memory from every one after it, and nobody sees which it was.
left=$(find /dev/shm -maxdepth 1 -name '.tmp*' -newer "$logs/artifacts")
[ -z "$left" ] || { echo "tests have left these directories in tmpfs; whoever holds one is to remove it:" "$left"; exit 1; }

cargo test --workspace --doc --quiet
