#!/bin/sh
# Builds the Debian packages: build-deb.sh PROGRAMS OUT [VERSION]. 'make packages-deb' calls it. PROGRAMS is the directory that cargo
# wrote to. VERSION is that of the workspace if none is given (the test of upgrades gives another one).
set -eu
programs=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
version=${3:-$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)}

tree=$out/tree
rm -rf "$tree"
mkdir -p "$tree/amberlog"
cp -r packaging/debian "$tree/amberlog/debian"
packaging/install.sh "$programs" /usr "$tree/amberlog/stage" >/dev/null
# Each package has its pages.
for page in "$tree"/amberlog/stage/usr/share/man/man1/*.1; do
    case "$(basename "$page")" in
        amberlog-lab*) package=amberlog-lab ;;
        amberlog-journal-server*) package=amberlog-journal-server ;;
        *) package=amberlog ;;
    esac
    echo "debian/tmp/${page#"$tree/amberlog/stage/"}" >>"$tree/amberlog/debian/$package.manpages"
done
# A changelog of one entry, as old as the commit, so that the same sources give the same packages.
epoch=$(git log -1 --format=%ct 2>/dev/null || date +%s)
{
    echo "amberlog ($version) unstable; urgency=medium"
    echo
    echo "  * See /usr/share/doc/amberlog/CHANGELOG.md."
    echo
    echo " -- amberlog developers <amberlog@example.org>  $(date -u -R -d "@$epoch")"
} >"$tree/amberlog/debian/changelog"
(cd "$tree/amberlog" && SOURCE_DATE_EPOCH=$epoch DEB_BUILD_OPTIONS=noautodbgsym dpkg-buildpackage -b -us -uc --no-sign) >"$out/build.log" 2>&1 || {
    tail -n 30 "$out/build.log" >&2
    echo "build-deb: dpkg-buildpackage failed; all of it is in $out/build.log" >&2
    exit 1
}
mv "$tree"/*.deb "$out"
rm -rf "$tree"
ls "$out"/*_"$version"_*.deb
