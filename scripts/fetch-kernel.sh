#!/bin/sh
# Fetches the kernel that the test guests run: the package that Debian's linux-image-cloud-amd64
# depends on, unpacked into build/guest/kernel and never installed on this machine. Cached: does
# nothing when it is there. Remove build/guest/kernel to fetch the newest one again.
set -eu
cd "$(dirname "$0")/.."

target=build/guest/kernel
meta=linux-image-cloud-amd64

fail() {
    echo "fetch-kernel: $*" >&2
    exit 1
}

[ -f "$target/package" ] && exit 0

mkdir -p build/guest
exec 9>build/guest/kernel.lock
flock 9
[ -f "$target/package" ] && exit 0

real_name() {
    apt-cache depends --important "$meta" 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1
}

update() {
    if [ "$(id -u)" = 0 ]; then
        apt-get -q update >/dev/null
    else
        sudo apt-get -q update >/dev/null
    fi || fail "apt-get update failed; check the network and /etc/apt/sources.list"
}

work=$(mktemp -d build/guest/kernel-fetch.XXXXXX)
trap 'rm -rf "$work"' EXIT INT TERM

package=$(real_name)
if [ -z "$package" ]; then
    update
    package=$(real_name)
fi
[ -n "$package" ] || fail "apt knows no package $meta; Debian 12 (bookworm, main) has it"

echo "fetching the guests' kernel: $package"
download() {
    (cd "$work" && apt-get -q download "$package" >apt.log 2>&1)
}
if ! download; then
    # The package lists may be older than the archive: refresh them, once.
    update
    package=$(real_name)
    download || { cat "$work/apt.log" >&2; fail "apt-get download $package failed"; }
fi
dpkg-deb -x "$work"/linux-image-*.deb "$work/tree" || fail "cannot unpack $package"
ls "$work"/tree/boot/vmlinuz-* >/dev/null 2>&1 || fail "$package holds no boot/vmlinuz-*"
echo "$package" >"$work/tree/package"
rm -rf "$target"
mv "$work/tree" "$target"
