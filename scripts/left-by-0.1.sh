#!/bin/sh
# Makes the archives of crates/amberlog/tests/left that an earlier amberlog has to make, and that are not there: what commit 0e81c47 of
# this repository, version 0.1, leaves of a guest whose journal is in a region of NVM, and of one whose journal is on a server, when all
# of it is killed. The test `left` finishes what is in them.
#
#   scripts/left-by-0.1.sh [TREE]
#
# TREE is a work tree of that commit, perhaps a built one; without it one is made in build/0e81c47. crates/amberlog/tests/left/maker.rs
# goes among its tests with guests, and is run there: so this needs what `make test` needs. An archive that is there is never made anew:
# remove it for that, and say why in the commit.
#
# In an archive: `image`; `vm`, the VM's directory in tmpfs, without the guest's memory, which no journal is in; `acknowledged`, how many
# records the guest had been told are there; `region`, or `store`, the journal server's; and `recovered`, the image as 0e81c47's own
# recovery made it.
set -eu
cd "$(dirname "$0")/.."

commit=0e81c47398097ba98beee4db2dea959e0512cecd
left=$PWD/crates/amberlog/tests/left
tree=${1:-build/0e81c47}

fail() {
    echo "left-by-0.1: $*" >&2
    exit 1
}

missing=""
for name in nvm-journal-4096 remote-journal-4096; do
    [ -f "$left/$name.tar.zst" ] || missing="$missing $name"
done
[ -n "$missing" ] || fail "every archive is there: nothing was made"

if [ ! -d "$tree" ]; then
    mkdir -p "$(dirname "$tree")"
    git worktree add --detach "$tree" "$commit"
fi
tree=$(cd "$tree" && pwd)
[ "$(git -C "$tree" rev-parse HEAD)" = "$commit" ] || fail "$tree is no work tree of $commit"

# The same kernel for its guests, where this tree has one; else it fetches its own.
mkdir -p "$tree/build"
[ ! -d build/guest ] || [ -e "$tree/build/guest" ] || ln -s "$PWD/build/guest" "$tree/build/guest"

guests=$tree/crates/amberlog/tests/guests
cp "$left/maker.rs" "$guests/left_maker.rs"
grep -q '^mod left_maker;$' "$guests/main.rs" || echo 'mod left_maker;' >>"$guests/main.rs"

for name in $missing; do
    # Tests find the shim beside the program: hence the build of the whole workspace first. Descriptions that are kept name files in /tmp.
    (cd "$tree" && cargo build --workspace &&
        env -u TMPDIR cargo test -p amberlog --test guests -- --ignored --exact "left_maker::$(echo "$name" | tr - _)")
    [ -f "$tree/build/left/$name/recovered" ] || fail "the guest left nothing in $tree/build/left/$name"
    tar -S --zstd --sort=name --owner=0 --group=0 -cf "$left/$name.tar.zst.new" -C "$tree/build/left/$name" .
    mv "$left/$name.tar.zst.new" "$left/$name.tar.zst"
    echo "$left/$name.tar.zst: $(stat -c %s "$left/$name.tar.zst") bytes"
done
echo "now run: cargo test -p amberlog --test left"
