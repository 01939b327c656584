#!/bin/sh
# Puts newer results of the lab among those of docs/results, and makes everything anew that is made of them:
#   scripts/merge-results.sh DIR [SUFFIX [--any-source]]
#
# DIR is what `amberlog lab run … --out DIR` wrote to; a run that was cut off is as good as far as it came. Earlier results with cells that DIR
# does not have (more guests) are kept as ID-SUFFIX (tenth); the others are replaced. So are results of another program or machine, unless
# --any-source joins them. Nothing is committed: look at `git status`, and
# mend by hand what docs/papers.md (its head), docs/results/README.md and each experiment's "What we found" say.
#
# AMBERLOG_LAB names the program (target/release/amberlog-lab).
set -eu
from=$(realpath "${1:?"usage: $0 DIR [SUFFIX [--any-source]]"}")
suffix=${2:-tenth}
cd "$(dirname "$0")/.."
lab=${AMBERLOG_LAB:-target/release/amberlog-lab}
results=docs/results page=docs/papers.md
begin='<!-- amberlog lab table docs/results -->' end='<!-- end -->'

rm -rf "$results"/*/raw "$results"/*/failed
tar --zstd -xf "$results/raw.tar.zst" -C "$results"
"$lab" merge "$from" "$results" --keep-as "$suffix" ${3:+"$3"}
"$lab" summarise "$results"
"$lab" report "$results"

"$lab" table "$results" >"$page.table"
awk -v begin="$begin" -v end="$end" -v table="$page.table" '
    $0 == end { within = 0 }
    !within { print }
    $0 == begin { within = 1; while ((getline line <table) > 0) print line }
' "$page" >"$page.new"
mv "$page.new" "$page"
rm "$page.table"

files=$(find "$results"/*/raw -name '*.json' | wc -l)
sed -i "s/raw\.tar\.zst\` ([0-9,]* files)/raw.tar.zst\` ($files files)/" "$results/README.md"
(cd "$results" && find . -path './*/raw/*.json' -o -path './*/failed/*.json' | LC_ALL=C sort |
    tar --owner=0 --group=0 --numeric-owner --mtime="$(date -u +%F)" --zstd -cf raw.tar.zst -T -)
rm -rf "$results"/*/raw "$results"/*/failed
git status --short
