#!/bin/sh
# Fetches the kernel that the test guests run: the package that Debian's linux-image-cloud-amd64
# depends on, unpacked into build/guest/kernel and never installed on this machine. Cached: does
# nothing when it is there. Remove build/guest/kernel to fetch the newest one again.
#
#   fetch-kernel.sh [SUITE]
#
# With a suite of Debian's (bookworm-backports, trixie, sid), its kernel, into build/guest/kernels/SUITE, by way of package lists
# of its own: the machine's are left as they are.
set -eu
cd "$(dirname "$0")/.."

suite=${1:-}
target=build/guest/kernel${suite:+s/$suite}
meta=linux-image-cloud-amd64

fail() {
    echo "fetch-kernel: $*" >&2
    exit 1
}

[ -f "$target/package" ] && exit 0

mkdir -p "$(dirname "$target")"
exec 9>"$target.lock"
flock 9
[ -f "$target/package" ] && exit 0

apt_options=""
if [ -n "$suite" ]; then
    lists=$PWD/build/guest/apt/$suite
    mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial"
    # The mirror that this machine is set up with.
    release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        sed -n "s/ $release\$//p" | head -n 1)
    [ -n "$mirror" ] || fail "apt has no lists of $release: run apt-get update"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" \
        >"$lists/sources.list"
    apt_options="-o Dir::Etc::SourceList=$lists/sources.list -o Dir::Etc::SourceParts=/dev/null
        -o Dir::State::Lists=$lists/lists -o Dir::Cache=$lists/cache"
fi

# shellcheck disable=SC2086 # lists of words are meant, here and below
real_name() {
    apt-cache $apt_options depends --important "$meta" 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1
}

update() {
    if [ -n "$suite" ] || [ "$(id -u)" = 0 ]; then
        apt-get $apt_options -q update >/dev/null
    else
        sudo apt-get -q update >/dev/null
    fi || fail "apt-get update failed; check the network and /etc/apt/sources.list"
}

work=$(mktemp -d "$PWD/build/guest/kernel-fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM

package=$(real_name)
if [ -z "$package" ]; then
    update
    package=$(real_name)
fi
[ -n "$package" ] || fail "apt knows no package $meta${suite:+ in $suite}; Debian 12 (bookworm, main) has it"

# Newer suites have image, modules and what is built in in packages of their own.
parts() {
    apt-cache $apt_options depends --important "$package" 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-\(base\|binary\|modules\)-[0-9][^ ]*\)$/\1/p'
}

echo "fetching the guests' kernel: $package"
download() {
    (cd "$work" && apt-get $apt_options -q download "$package" $(parts) >apt.log 2>&1)
}
if ! download; then
    # The package lists may be older than the archive: refresh them, once.
    update
    package=$(real_name)
    download || { cat "$work/apt.log" >&2; fail "apt-get download $package failed"; }
fi
for part in "$work"/*.deb; do
    dpkg-deb -x "$part" "$work/tree" || fail "cannot unpack $part"
done
if [ -d "$work/tree/usr/lib/modules" ]; then
    mkdir -p "$work/tree/lib"
    mv "$work/tree/usr/lib/modules" "$work/tree/lib/modules"
fi
if ! ls "$work"/tree/boot/vmlinuz-* >/dev/null 2>&1; then
    image=$(find "$work/tree" -type f -name 'vmlinuz*' | head -n 1)
    [ -n "$image" ] || fail "$package holds no vmlinuz"
    mkdir -p "$work/tree/boot"
    mv "$image" "$work/tree/boot/vmlinuz-${package#linux-image-}"
fi
# A guest's init inserts plain files.
find "$work/tree/lib/modules" -name '*.ko.xz' -exec xz -d {} +
find "$work/tree/lib/modules" -name '*.ko.zst' -exec zstd -q -d --rm {} +
echo "$package" >"$work/tree/package"
rm -rf "$target"
mv "$work/tree" "$target"
