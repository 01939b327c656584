#!/bin/sh
# phase.sh NAME COMMAND...: runs a command under a heading and tells how long it took.
set -u
name=$1
shift
echo "== $name"
start=$(date +%s)
"$@"
code=$?
echo "== $name: $(($(date +%s) - start)) s$([ $code = 0 ] || echo ", FAILED with $code")"
exit $code
