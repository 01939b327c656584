#!/bin/sh
# Builds the NATS server that the tests of the JetStream store start, from the Go module proxy into
# build/nats-server. Cached: does nothing when it is there. Needs Go 1.21 or newer, which is not
# installed here: where it is missing those tests say that they are left out, but in CI (CI=true)
# that is an error. AMBERLOG_NATS_SERVER names a server of your own, 2.12 or newer.
set -eu
cd "$(dirname "$0")/.."

version=v2.15.2
target=build/nats-server

[ -z "${AMBERLOG_NATS_SERVER:-}" ] || exit 0
[ -x "$target" ] && exit 0

give_up() {
    echo "fetch-nats-server: $*" >&2
    [ "${CI:-}" = true ] && exit 1
    echo "fetch-nats-server: THE TESTS OF THE JETSTREAM STORE ARE LEFT OUT" >&2
    exit 0
}

PATH="$PATH:/usr/local/go/bin"
command -v go >/dev/null 2>&1 ||
    give_up "there is no Go: install it from https://go.dev/dl, or set AMBERLOG_NATS_SERVER"

mkdir -p build
exec 9>build/nats-server.lock
flock 9
[ -x "$target" ] && exit 0

# Modules and objects are kept apart from the user's and removed: the program is all that is needed.
work=$(mktemp -d "$PWD/build/nats-server-fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
GOBIN="$work/bin" GOMODCACHE="$work/modules" GOCACHE="$work/objects" GOFLAGS=-modcacherw CGO_ENABLED=0 \
    go install -trimpath -ldflags "-s -w" "github.com/nats-io/nats-server/v2@$version" >"$work/log" 2>&1 || {
    tail -n 5 "$work/log" >&2
    give_up "go install github.com/nats-io/nats-server/v2@$version failed"
}
mv "$work/bin/nats-server" "$target"
