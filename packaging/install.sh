#!/bin/sh
# install.sh PROGRAMS PREFIX [DESTDIR]: installs what was built. 'make install PREFIX=' calls it, and so do the packages.
# PROGRAMS is the directory that cargo wrote to (target/release). Nothing is enabled, and no configuration is overwritten.
set -eu
programs=$1
prefix=$2
root=${3:-}
cd "$(dirname "$0")/.."

fail() {
    echo "install: $*" >&2
    exit 1
}

case "$prefix" in
    /*) ;;
    *) fail "PREFIX is an absolute path, not '$prefix'" ;;
esac
for file in amberlog amberlog-lab amberlog-journal-server libamberlog_vmm_shim.so; do
    [ -f "$programs/$file" ] || fail "$programs/$file is not there; run 'cargo build --release' first"
done

# The programs look for their configuration in /etc, where the system's own prefixes have it.
case "$prefix" in
    /usr | /usr/local) etc=/etc ;;
    *) etc=$prefix/etc ;;
esac
documents=$(mktemp -d)
trap 'rm -rf "$documents"' EXIT

for program in amberlog amberlog-lab amberlog-journal-server; do
    install -D -m 755 "$programs/$program" "$root$prefix/bin/$program"
    "$programs/$program" documents "$documents"
done
install -D -m 644 "$programs/libamberlog_vmm_shim.so" "$root$prefix/lib/amberlog/libamberlog_vmm_shim.so"

for page in "$documents"/man1/*.1; do
    install -D -m 644 "$page" "$root$prefix/share/man/man1/$(basename "$page")"
done
for file in "$documents"/bash/*; do
    install -D -m 644 "$file" "$root$prefix/share/bash-completion/completions/$(basename "$file")"
done
for file in "$documents"/zsh/*; do
    install -D -m 644 "$file" "$root$prefix/share/zsh/vendor-completions/$(basename "$file")"
done
for file in "$documents"/fish/*; do
    install -D -m 644 "$file" "$root$prefix/share/fish/vendor_completions.d/$(basename "$file")"
done

for unit in amberlog.service amberlog-journal-server.service; do
    install -d "$root$prefix/lib/systemd/system"
    sed "s|/usr/bin/amberlog|$prefix/bin/amberlog|; s|/usr/share/doc/|$prefix/share/doc/|" "packaging/$unit" \
        >"$root$prefix/lib/systemd/system/$unit"
    if [ "$etc" != /etc ]; then
        sed -i "s|^\(ExecStart=.*/amberlog serve\)|\1 --config $etc/amberlog/amberlog.toml|" "$root$prefix/lib/systemd/system/$unit"
    fi
    chmod 644 "$root$prefix/lib/systemd/system/$unit"
done
install -D -m 644 packaging/sysusers.d/amberlog.conf "$root$prefix/lib/sysusers.d/amberlog.conf"
install -D -m 644 packaging/tmpfiles.d/amberlog.conf "$root$prefix/lib/tmpfiles.d/amberlog.conf"
install -D -m 644 packaging/udev/70-amberlog.rules "$root$prefix/lib/udev/rules.d/70-amberlog.rules"

documentation=$root$prefix/share/doc/amberlog
# Every page that a page links to; not the results' raw data, nor the page of the lab's charts.
for page in *.md docs/*.md docs/status.schema.json docs/inside/* docs/results/*.md docs/results/shoot-out*; do
    install -D -m 644 "$page" "$documentation/$page"
done
# What is in packaging/ lies beside README.md there.
find "$documentation" -name '*.md' -exec sed -i 's|](\(\(\.\./\)*\)packaging/|](\1|g' {} +
install -D -m 644 packaging/amberlog.toml "$documentation/amberlog.toml"
for directory in amberlog.service.d apparmor libvirt prometheus grafana; do
    for file in packaging/"$directory"/*; do
        mode=644
        [ ! -x "$file" ] || mode=755
        install -D -m $mode "$file" "$documentation/$directory/$(basename "$file")"
    done
done
sed -i "s|/usr/bin/amberlog|$prefix/bin/amberlog|g" "$documentation/libvirt/amberlog"
sed -i "s|/usr/lib/amberlog|$prefix/lib/amberlog|g" "$documentation/apparmor/libvirt-qemu"

# Called where they are, so not among the documents: packages make those unexecutable.
for file in packaging/power/* packaging/backup/*; do
    installed=$root$prefix/lib/amberlog/${file#packaging/}
    install -D -m 755 "$file" "$installed"
    sed -i "s|/usr/lib/amberlog|$prefix/lib/amberlog|; s|/usr/bin/amberlog|$prefix/bin/amberlog|" "$installed"
done

if [ ! -e "$root$etc/amberlog/amberlog.toml" ]; then
    install -D -m 644 packaging/amberlog.toml "$root$etc/amberlog/amberlog.toml"
fi
echo "installed in $root$prefix"
