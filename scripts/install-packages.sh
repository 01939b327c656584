#!/bin/sh
# The one list of Debian packages that `make demo`, `make test` and the other targets need.
# Does nothing, in a fraction of a second, when all of them are there; otherwise installs the
# missing ones as root or through sudo. Also checks for a Rust toolchain (which it never
# installs itself), and fetches the guests' kernel (scripts/fetch-kernel.sh).
set -eu
cd "$(dirname "$0")/.."

packages="
    qemu-system-x86 qemu-utils
    chromium
    e2fsprogs busybox-static postmark fio sqlite3
    xfsprogs btrfs-progs f2fs-tools
    fdisk util-linux procps dmsetup kexec-tools
    gcc libc6-dev
    zstd xz-utils
    ca-certificates
    systemd
    prometheus python3-jsonschema
    debhelper lintian mmdebstrap
"

fail() {
    echo "install-packages: $*" >&2
    exit 1
}

case "$(uname -m)" in
    x86_64) ;;
    *) fail "the guests are x86-64 and this machine is $(uname -m); only x86-64 hosts are supported" ;;
esac
command -v dpkg-query >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1 ||
    fail "this is not a Debian system (no dpkg or apt-get); install by hand what scripts/install-packages.sh lists"

missing=""
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done

if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif command -v sudo >/dev/null 2>&1; then
        as_root="sudo"
    else
        fail "these packages are missing and can only be installed by root:$missing"
    fi
    echo "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # lists of words are meant
    $as_root apt-get -q update >/dev/null ||
        fail "apt-get update failed; check the network and /etc/apt/sources.list"
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends $missing >/dev/null ||
        fail "apt-get install$missing failed; see its messages above"
fi

if ! command -v cargo >/dev/null 2>&1 && [ -x "$HOME/.cargo/bin/cargo" ]; then
    PATH="$HOME/.cargo/bin:$PATH"
fi
command -v cargo >/dev/null 2>&1 ||
    fail "no Rust toolchain: install one from https://rustup.rs and put cargo on PATH"
needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
have=$(cargo --version | sed 's/^cargo \([0-9]*\.[0-9]*\).*/\1/')
[ "$(printf '%s\n%s\n' "$needed" "$have" | sort -V | head -n 1)" = "$needed" ] ||
    fail "cargo is version $have and $needed or newer is needed; run 'rustup update'"
command -v cc >/dev/null 2>&1 || fail "no C linker: cc is not on PATH although the package gcc is installed"

scripts/fetch-kernel.sh
