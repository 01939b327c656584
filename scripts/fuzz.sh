#!/bin/sh
# Fuzzing with libFuzzer, from the kept corpus and back into it.
#
#   scripts/fuzz.sh run TARGET SECONDS   unpacks the corpus, fuzzes, and says what libFuzzer says
#   scripts/fuzz.sh keep                 packs what covers most of what was found (small inputs first) as the new corpus
#   scripts/fuzz.sh seeds                makes the first inputs anew, for `keep` to add
#
# TARGET is journal, ext, chain or wire. `run` needs a nightly compiler and cargo-fuzz (`cargo install cargo-fuzz`); tests on
# the stable compiler run the same corpus and fixed mutations of it as a part of `make test`. Two more corpora are run there
# only: control (questions to the daemon's socket) and area (directories of dead processes that somebody has forged).
set -eu
cd "$(dirname "$0")/.."

targets="journal ext chain wire"
# A kept input is no longer than this, in bytes.
longest=70000

fail() {
    echo "fuzz: $*" >&2
    exit 1
}

unpack() {
    mkdir -p "fuzz/corpus/$1"
    [ ! -f "fuzz/corpus/$1.tar.zst" ] || tar --zstd -xf "fuzz/corpus/$1.tar.zst" -C "fuzz/corpus/$1"
}

# An input may take 10 s and 512 MB, both far more than any needs.
libfuzzer() {
    cargo +nightly fuzz "$@" -timeout=10 -rss_limit_mb=512 -max_len=$longest
}

case "${1:-}" in
    run)
        target=${2:?"usage: $0 run TARGET SECONDS"}
        seconds=${3:?"usage: $0 run TARGET SECONDS"}
        unpack "$target"
        libfuzzer run "$target" -- -max_total_time="$seconds" -print_final_stats=1
        ;;
    keep)
        for target in $targets; do
            unpack "$target"
            rm -rf fuzz/corpus/kept
            mkdir fuzz/corpus/kept
            # -merge=1 takes inputs from the second directory that cover something new, smallest first.
            libfuzzer run "$target" fuzz/corpus/kept "fuzz/corpus/$target" -- -merge=1
            tar --zstd --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=644 \
                -cf "fuzz/corpus/$target.tar.zst" -C fuzz/corpus/kept .
            rm -rf fuzz/corpus/kept
            ls -l "fuzz/corpus/$target.tar.zst"
        done
        ;;
    seeds)
        cargo test -p recovery --test fuzz -- --ignored seeds
        cargo test -p block-device --lib -- --ignored fuzzing::tests::seeds
        cargo test -p amberlog --bin amberlog -- --ignored serve::control::tests::seeds
        cargo test -p placement --test order -- --ignored tampered::seeds
        cargo test -p remote-journal --test wire -- --ignored seeds
        ;;
    *) fail "unknown command '${1:-}'; see the head of $0" ;;
esac
