#!/bin/sh
# Figures 2 to 5 of the 2010 paper from recorded traces: scripts/ssd-figures.sh DIR [options of `amberlog ssd`]
#
# DIR holds one trace per workload and journaling mode, as `amberlog run --trace` records it:
# DIR/WORKLOAD-MODE.amber (or .amber.zst), WORKLOAD one of seq_write, rnd_write, postmark, untar, kernel_compile,
# MODE one of writeback, ordered, journal, vma. Where a vma trace is missing, the journal trace is replayed without
# its journal writes: what a guest in data=journal mode writes when its journal is retained.
set -eu
directory=${1:?"usage: $0 DIR [options of amberlog ssd]"}
shift
amberlog=${AMBERLOG:-amberlog}
found=0
for workload in seq_write rnd_write postmark untar kernel_compile; do
    for mode in writeback ordered journal vma; do
        for file in "$directory/$workload-$mode.amber" "$directory/$workload-$mode.amber.zst"; do
            [ -f "$file" ] || continue
            found=1
            set -- "$@" --trace "$workload/$mode=$file"
            break
        done
    done
    if [ ! -f "$directory/$workload-vma.amber" ] && [ ! -f "$directory/$workload-vma.amber.zst" ]; then
        for file in "$directory/$workload-journal.amber" "$directory/$workload-journal.amber.zst"; do
            [ -f "$file" ] || continue
            set -- "$@" --trace "$workload/vma=$file"
            break
        done
    fi
done
if [ "$found" = 0 ]; then
    echo "$0: no trace called WORKLOAD-MODE.amber in $directory" >&2
    exit 3
fi
# Journal writes of a `vma` trace were retained in memory: they never reached the device, however they were recorded.
case " $* " in *"/vma="*) set -- --without-journal vma "$@" ;; esac
exec "$amberlog" ssd --compare --ftl fast,superblock,dftl "$@"
