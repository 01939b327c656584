#!/bin/sh
# Figures 2 to 5 of the 2010 paper from recorded traces:
#   scripts/ssd-figures.sh DIR [--vms N] [--stagger SECONDS] [--split BYTES] [options of `amberlog ssd`]
#
# DIR holds one trace per workload and journaling mode, as the program record-traces of crates/guest-kit leaves them:
# DIR/WORKLOAD-MODE.amber (or .amber.zst), WORKLOAD one of seq_write, rnd_write, postmark, untar, kernel_compile,
# MODE one of writeback, ordered, journal, vma. Where a vma trace is missing, the journal trace is replayed without
# its journal writes: what a guest in data=journal mode writes when its journal is retained.
#
# --vms N lays N of each trace on one device, 4 GB apart (the paper's virtual data disks), each beginning SECONDS (3)
# after the one before. --split cuts requests to what a driver takes at once (Xen 2: 45056, eleven pages), which
# decides how many requests Figure 2 counts.
set -eu
directory=${1:?"usage: $0 DIR [--vms N] [--stagger SECONDS] [--split BYTES] [options of amberlog ssd]"}
shift
amberlog=${AMBERLOG:-amberlog}
vms=1 stagger=3 split=
while :; do
    case "${1:-}" in
    --vms) vms=$2 ;;
    --stagger) stagger=$2 ;;
    --split) split=$2 ;;
    *) break ;;
    esac
    shift 2
done

merged=$(mktemp -d)
trap 'rm -rf "$merged"' EXIT
trap 'exit 130' INT TERM

# prepare FILE NAME: sets `trace` to the file to replay.
prepare() {
    trace=$1
    [ "$vms" = 1 ] && [ -z "$split" ] && return
    trace=$merged/$2.amber
    copies=
    number=0
    while [ $number -lt "$vms" ]; do
        # The name of a file in DIR has no blanks; DIR itself may have.
        copies="$copies ./$(basename "$1")"
        number=$((number + 1))
    done
    # shellcheck disable=SC2086 # the list of copies is meant to be several words
    (cd "$(dirname "$1")" && "$amberlog" trace convert --merge --onto-one-disk stride:4294967296 \
        --stagger "$stagger" ${split:+--split "$split"} -o "$trace" $copies)
}

found=0
for workload in seq_write rnd_write postmark untar kernel_compile; do
    for mode in writeback ordered journal vma; do
        recorded=$mode
        [ "$mode" != vma ] || [ -f "$directory/$workload-vma.amber" ] || [ -f "$directory/$workload-vma.amber.zst" ] ||
            recorded=journal
        for file in "$directory/$workload-$recorded.amber" "$directory/$workload-$recorded.amber.zst"; do
            [ -f "$file" ] || continue
            found=1
            prepare "$file" "$workload-$mode"
            set -- "$@" --trace "$workload/$mode=$trace"
            break
        done
    done
done
if [ "$found" = 0 ]; then
    echo "$0: no trace called WORKLOAD-MODE.amber in $directory" >&2
    exit 3
fi
# Journal writes of a `vma` trace were retained in memory: they never reached the device, however they were recorded.
case " $* " in *"/vma="*) set -- --without-journal vma "$@" ;; esac
"$amberlog" ssd --compare --ftl fast,superblock,dftl "$@"
