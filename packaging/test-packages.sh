#!/bin/sh
# Tries the Debian packages: test-packages.sh PROGRAMS PACKAGES [--quick]. 'make packages-test' calls it.
#
# lintian judges them. Then, unless it is to be quick (or nobody here is root), they are installed into a Debian of its own, used,
# upgraded while the daemon runs, removed and purged; what a package may not do is looked for after each. Then the same once more with that
# Debian's systemd, which runs the unit as it is, and under guests that work (PROGRAMS/packaged, crates/guest-kit/src/bin/packaged).
set -eu
programs=$1
packages=$(cd "$2" && pwd)
quick=${3:-}
cd "$(dirname "$0")/.."

step() {
    echo "packages: $*"
}
fail() {
    echo "packages: $*" >&2
    exit 1
}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
for package in amberlog amberlog-lab amberlog-journal-server; do
    [ -f "$packages/${package}_${version}_amd64.deb" ] || fail "$packages has no ${package}_${version}_amd64.deb"
done

step "lintian"
# Tags that are not overridden by name fail it, down to those that are only information.
lintian --display-info --fail-on error,warning,info --tag-display-limit 0 --allow-root "$packages"/*_"$version"_amd64.deb ||
    fail "lintian finds fault with them"

step "what is in them"
contents() {
    dpkg-deb -c "$packages/$1_${version}_amd64.deb" | awk '{ print $6 }'
}
for file in ./usr/bin/amberlog ./usr/lib/amberlog/libamberlog_vmm_shim.so ./lib/systemd/system/amberlog.service \
    ./usr/lib/sysusers.d/amberlog.conf ./usr/lib/tmpfiles.d/amberlog.conf ./lib/udev/rules.d/70-amberlog.rules \
    ./etc/amberlog/amberlog.toml ./usr/share/man/man1/amberlog.1.gz ./usr/share/man/man1/amberlog-run.1.gz \
    ./usr/share/bash-completion/completions/amberlog ./usr/share/zsh/vendor-completions/_amberlog \
    ./usr/share/fish/vendor_completions.d/amberlog.fish ./usr/share/doc/amberlog/apparmor/libvirt-qemu; do
    contents amberlog | grep -qxF "$file" || fail "the package amberlog has no $file"
done
# What is called where it is can be called.
for file in nut-notify apcupsd-onbattery apcupsd-offbattery; do
    dpkg-deb -c "$packages/amberlog_${version}_amd64.deb" | grep "^-rwxr-xr-x .* \./usr/lib/amberlog/power/$file\$" >/dev/null ||
        fail "/usr/lib/amberlog/power/$file is not there, or not executable"
done
contents amberlog-lab | grep -qxF ./usr/share/man/man1/amberlog-lab.1.gz || fail "the package amberlog-lab has no manual page"
[ "$(for package in amberlog amberlog-lab amberlog-journal-server; do contents $package; done | grep -v '/$' | sort | uniq -d)" = "" ] ||
    fail "two packages have the same file"

step "what a purge says of directories that anybody can have made"
# The script itself, with other places: it is root's otherwise.
played=$(mktemp -d /var/tmp/amberlog-purge.XXXXXX)
trap 'rm -rf "$played"' EXIT
mkdir "$played/shm"
sed -e "s|/dev/shm|$played/shm|g" -e "s|/var/lib/amberlog|$played/none|g" -e "s|/etc/|$played/etc/|g" -e '/#DEBHELPER#/d' \
    packaging/debian/amberlog.postrm >"$played/postrm"
own=$(id -u)
other=$((own + 1))
for name in amberlog "amberlog-$own" "amberlog-$own.0123456789abcdef" "amberlog-$other" "amberlog-$own;reboot" "amberlog-$own.x y" \
    "amberlog-$own$(printf '\033')]0;x" 'amberlog-1\033]0;x' 'amberlog-x;reboot'; do
    mkdir -p "$played/shm/$name/owed"
done
mkdir "$played/elsewhere" "$played/elsewhere/owed"
ln -s "$played/elsewhere" "$played/shm/amberlog-$own.1"
sh "$played/postrm" purge 2>"$played/said" || fail "the purge of what anybody can have made fails: $(cat "$played/said")"
[ "$(grep -c ' is not empty and is left' "$played/said")" = 3 ] || fail "a purge says this of directories in /dev/shm: $(cat -v "$played/said")"
for name in amberlog "amberlog-$own" "amberlog-$own.0123456789abcdef"; do
    grep -qF " --area $played/shm/$name)" "$played/said" || fail "a purge does not say what is left in /dev/shm/$name"
done
if LC_ALL=C grep -q "[[:cntrl:]]\|reboot\|-$other\|elsewhere" "$played/said"; then fail "a purge says what others want it to"; fi
rm -r "$played"

if [ "$quick" = --quick ] || [ "$(id -u)" != 0 ]; then
    step "good (not installed: that takes root and no --quick)"
    exit 0
fi

step "a Debian of its own"
root=$(mktemp -d /var/tmp/amberlog-packages.XXXXXX)
mounted=""
end() {
    [ -z "$mounted" ] || { umount "$root/proc" "$root/dev/shm" 2>/dev/null || true; }
    rm -rf --one-file-system "$root"
}
trap end EXIT
[ -x "$programs/packaged" ] || fail "$programs/packaged is not there; run 'cargo build --release -p guest-kit --bin packaged' first"
mmdebstrap --quiet --variant=minbase --include=systemd,procps,e2fsprogs,man-db,bash-completion,qemu-system-x86 bookworm "$root" 2>"$packages/debian.log" ||
    fail "mmdebstrap failed; $packages/debian.log says why"
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/dev/shm"
mounted=yes
inside() {
    chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive "$@"
}
before=$(inside dpkg-query -f '${Package}\n' -W | sort)
files() {
    (cd "$root" && find . -xdev \( -path ./proc -o -path ./dev -o -path ./var/lib/dpkg -o -path ./var/cache -o -path ./var/log -o -path ./root \
        -o -path ./etc/ld.so.cache -o -path ./tmp \) -prune -o -print | sort)
}
files >"$packages/files.before"

step "installed"
mkdir "$root/root/packages"
cp "$packages"/*_"$version"_amd64.deb "$root/root/packages"
# A udev that notes what it is told.
mkdir -p "$root/run/udev"
: >"$root/run/udev/control"
printf '#!/bin/sh\necho "$@" >>/root/udev.log\n' >"$root/usr/local/bin/udevadm"
chmod 755 "$root/usr/local/bin/udevadm"
inside sh -c 'dpkg -i /root/packages/*.deb' >"$packages/install.log" 2>&1 || fail "dpkg -i failed; $packages/install.log says why"
[ "$(cat "$root/root/udev.log" 2>/dev/null)" = "control --reload
trigger --subsystem-match=misc --sysname-match=userfaultfd" ] || fail "udev is not told of the device that is there already"
rm -r "$root/usr/local/bin/udevadm" "$root/run/udev"
inside getent passwd amberlog | grep -q ':/usr/sbin/nologin$' || fail "there is no user amberlog"
inside amberlog --version | grep -qx "amberlog $version" || fail "the program does not start"
inside amberlog serve --check >/dev/null || fail "the default configuration is not good"
inside amberlog-lab list >/dev/null || fail "amberlog-lab does not start"
inside amberlog lab list >/dev/null || fail "amberlog does not find amberlog-lab"
inside amberlog-journal-server --version >/dev/null || fail "amberlog-journal-server does not start"
inside man -w amberlog-serve >/dev/null || fail "there is no manual page amberlog-serve(1)"
inside bash -c '. /usr/share/bash-completion/bash_completion; _load_comp() { _completion_loader amberlog || true; complete -p amberlog; }; _load_comp' |
    grep -q _amberlog || fail "bash does not complete amberlog's commands"
said=$(inside systemd-analyze verify --man=no /lib/systemd/system/amberlog.service 2>&1 || true)
[ -z "$said" ] || fail "systemd finds fault with the unit: $said"

step "used: the image in the guest's stead is replayed by hand, and a daemon serves it"
inside sh -c 'mkdir -p /srv && truncate -s 64M /srv/a.img && mkfs.ext4 -q /srv/a.img && chown amberlog /srv/a.img'
inside amberlog recover --disk /srv/a.img | grep -q 'clean' || fail "recover does not work"
printf '\n[[vm]]\nname = "db"\ndisks = ["/srv/a.img"]\n' >>"$root/etc/amberlog/amberlog.toml"
mkdir -p "$root/run/amberlog"
inside chown amberlog: /run/amberlog
chroot "$root" setpriv --reuid amberlog --regid amberlog --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
    amberlog serve 2>"$packages/daemon.log" &
daemon=$!
tries=0
until inside amberlog status db 2>/dev/null | grep -q waiting; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || { cat "$packages/daemon.log" >&2; fail "the daemon does not serve the VM"; }
    sleep 0.1
done

step "the power goes and comes back, as NUT and apcupsd tell it"
# As the pages have them called: where they are, or after install(1).
inside install /usr/lib/amberlog/power/apcupsd-onbattery /usr/local/bin/onbattery
inside install /usr/lib/amberlog/power/apcupsd-offbattery /usr/local/bin/offbattery
for called in "NOTIFYTYPE=ONBATT /usr/lib/amberlog/power/nut-notify" "NOTIFYTYPE=ONLINE /usr/lib/amberlog/power/nut-notify" \
    /usr/local/bin/onbattery /usr/local/bin/offbattery; do
    # shellcheck disable=SC2086
    inside $called >"$packages/power.log" 2>&1 || fail "$called fails; $packages/power.log says why"
    case $called in
        *ONBATT* | */onbattery) [ -e "$root/run/amberlog/on-battery" ] || fail "$called does not put the daemon on battery" ;;
        *) [ ! -e "$root/run/amberlog/on-battery" ] || fail "$called does not put the daemon on mains" ;;
    esac
done
rm "$root/usr/local/bin/onbattery" "$root/usr/local/bin/offbattery"

step "upgraded while the daemon runs"
packaging/build-deb.sh "$programs" "$packages/next" "$version+next" >/dev/null
cp "$packages"/next/*.deb "$root/root/packages"
inside sh -c 'dpkg -i /root/packages/*+next_amd64.deb' >"$packages/upgrade.log" 2>&1 || fail "the upgrade failed; $packages/upgrade.log says why"
[ "$(inside dpkg-query -f '${Version}' -W amberlog)" = "$version+next" ] || fail "it was not upgraded"
grep -q 'name = "db"' "$root/etc/amberlog/amberlog.toml" || fail "the upgrade has overwritten the configuration"
kill -0 $daemon 2>/dev/null && inside amberlog status db | grep -q waiting || fail "the upgrade has ended the daemon"

step "removed and purged"
# A VM that has a VMM keeps the package, and so does a daemon that does not say: both played.
prerm=/var/lib/dpkg/info/amberlog.prerm
inside "$prerm" remove >"$packages/refused.log" 2>&1 || fail "a daemon whose VM waits keeps the package; $packages/refused.log says why"
inside amberlog status --json >"$packages/status.json"
mv "$root/usr/bin/amberlog" "$root/usr/bin/amberlog.real"
printf '#!/bin/sh\ncat /root/status.json\n' >"$root/usr/bin/amberlog"
chmod 755 "$root/usr/bin/amberlog"
for state in running held failed restarting recovering preparing; do
    sed "s/^      \"state\": \"waiting\"/      \"state\": \"$state\"/" "$packages/status.json" >"$root/root/status.json"
    if inside "$prerm" remove >"$packages/refused.log" 2>&1; then fail "it is removed under a VM that is $state"; fi
    grep -q '1 VMs run on disks that amberlog serves' "$packages/refused.log" || fail "the refusal does not say why: see $packages/refused.log"
done
if inside dpkg -r amberlog >"$packages/refused.log" 2>&1; then fail "it was removed under a VM that is preparing"; fi
echo '{"vms": [{"state": "running"}]}' >"$root/root/status.json"
if inside "$prerm" remove 2>/dev/null; then fail "an answer that is not understood counts as no VM"; fi
printf '{\n  "schema": 1,\n  "vms": []\n}\n' >"$root/root/status.json"
inside "$prerm" remove || fail "a daemon without VMs keeps the package"
printf '#!/bin/sh\nexit 1\n' >"$root/usr/bin/amberlog"
mv "$root/bin/systemctl" "$root/bin/systemctl.real"
mkdir -p "$root/run/systemd/system"
for state in active activating deactivating reloading ""; do
    printf '#!/bin/sh\necho %s\n' "$state" >"$root/bin/systemctl"
    chmod 755 "$root/bin/systemctl"
    if inside "$prerm" remove >"$packages/refused.log" 2>&1; then fail "a daemon that is '$state' and does not answer is taken for none"; fi
    grep -q 'does not say what it serves' "$packages/refused.log" || fail "the refusal does not say why: see $packages/refused.log"
done
rm -r "$root/run/systemd/system" "$root/root/status.json"
mv "$root/bin/systemctl.real" "$root/bin/systemctl"
mv "$root/usr/bin/amberlog.real" "$root/usr/bin/amberlog"
kill $daemon
wait $daemon || true
mkdir "$root/dev/shm/amberlog/vm-owed"
# What people put beside the reports, by accident or because the unit may write there.
state=$root/var/lib/amberlog
mkdir -p "$state/journals"
printf '{\n  "schema": 1,\n  "vm": "db",\n  "disks": []\n}' >"$state/db.json"
for file in journals/segment-0 data.img other.json; do echo precious >"$state/$file"; done
ln -s other.json "$state/link.json"
install -D -m 755 packaging/libvirt/amberlog "$root/etc/libvirt/hooks/qemu.d/amberlog"
inside dpkg -r amberlog amberlog-lab amberlog-journal-server >"$packages/remove.log" 2>&1 || fail "dpkg -r failed; $packages/remove.log says why"
for operation in "prepare begin" "reconnect begin" "release end"; do
    # shellcheck disable=SC2086
    inside /etc/libvirt/hooks/qemu.d/amberlog other $operation - || fail "the hook that was left fails at $operation, and with it every domain"
done
grep -q 'qemu.d/amberlog is left' "$packages/remove.log" || fail "removing does not say that the hook was left"
rm -r "$root/etc/libvirt"
[ -f "$root/etc/amberlog/amberlog.toml" ] || fail "removing has taken the configuration along"
inside dpkg -P amberlog amberlog-lab amberlog-journal-server >"$packages/purge.log" 2>&1 || fail "dpkg -P failed; $packages/purge.log says why"
[ -d "$root/dev/shm/amberlog/vm-owed" ] || fail "purging has removed what a guest is owed"
grep -q 'may hold what guests' "$packages/purge.log" || fail "purging does not say that something was left"
for file in journals/segment-0 data.img other.json link.json; do
    grep -qx precious "$state/$file" || fail "purging has removed $file, which is no report"
done
[ ! -e "$state/db.json" ] || fail "purging has left a report"
grep -q 'has more than reports' "$packages/purge.log" || fail "purging does not say that more than reports was left"
rm -rf "$state/journals" "$state/data.img" "$state/other.json" "$state/link.json"
inside sh -c 'dpkg -i /root/packages/amberlog_*+next_amd64.deb && dpkg -P amberlog' >"$packages/again.log" 2>&1 ||
    fail "it cannot be installed and purged again; $packages/again.log says why"
[ ! -e "$state" ] || fail "purging has left an empty $state"
rm -rf "$root/srv/a.img" "$root/run/amberlog" "$root/run/systemd"
files >"$packages/files.after"
# systemd keeps users for good, and its own state.
left=$(comm -13 "$packages/files.before" "$packages/files.after" | grep -vE '^\./(var/lib/systemd|run/|etc/(\.pwd\.lock|(passwd|group|shadow|gshadow)-?)$)' || true)
[ -z "$left" ] || fail "left behind: $left"
[ "$(inside dpkg-query -f '${Package}\n' -W | sort)" = "$before" ] || fail "packages are left"

umount "$root/proc" "$root/dev/shm"
mounted=""
mkdir "$root/root/old" "$root/root/new"
mv "$root"/root/packages/*+next_amd64.deb "$root/root/new"
mv "$root"/root/packages/*.deb "$root/root/old"
"$programs/packaged" "$root" "$packages" || fail "the packages fail on a Debian that runs"
step "good"
