#!/bin/bash
# Runs the same trace through other people's SSD simulators and through `amberlog ssd`, in the same run, and prints how
# much less processor time ours takes. Their sources are not part of this project (FlashSim is under the GPL): fetch them
# yourself and say where they are. Nothing is written there: they are copied, configured and built elsewhere.
#
#   scripts/compare-simulators.sh [--flashsim DIR] [--mqsim DIR] [--trace FILE --format F] [--requests N] [--runs N] \
#       [--seconds N]
#
#   --flashsim DIR   Extended FlashSim (github.com/MatiasBjorling/flashsim): its page FTL, DFTL and FAST
#   --mqsim DIR      MQSim (github.com/CMU-SAFARI/MQSim): page-level mapping with and without a cached mapping table
#   --trace FILE     any trace that amberlog reads, laid on the device modulo its size, in pages
#                    [default: fills 7/8 of a device of 1 GB in order, then single-page requests, 80 % random writes]
#   --requests N     how many of those single-page requests [default: 600000]
#   --runs N         each simulator is run this often, and its best time counts [default: 3]
#   --seconds N      a run of theirs that takes longer is ended and said so [default: 120]
#
# The environment names the binary of amberlog: AMBERLOG [default: a release build of this tree].
set -euo pipefail

flashsim= mqsim= trace= format=auto requests=600000 runs=3 seconds=120
while [ $# -gt 0 ]; do
    case $1 in
        --flashsim | --mqsim | --trace | --format | --requests | --runs | --seconds)
            [ $# -ge 2 ] || { echo "$1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        *) echo "$1 is not an option; see --help" >&2; exit 2 ;;
    esac
done
[ -n "$flashsim$mqsim" ] || { echo "name a simulator's sources with --flashsim or --mqsim; see --help" >&2; exit 2; }

root=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${AMBERLOG:-}" ]; then
    cargo build --quiet --release --manifest-path "$root/Cargo.toml" -p amberlog
    AMBERLOG=${CARGO_TARGET_DIR:-$root/target}/release/amberlog
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The device of both: 8192 logical blocks of 64 pages of 2 KB (1 GB), and 512 more.
blocks=8192 extra=512
pages=$((blocks * 64))
ours_device=(--blocks $blocks --extra-blocks $extra --read-us 88 --write-us 263 --erase-us 2000)

# One line for each page: time in ms, page, R or W. Requests come so slowly that no queue grows.
gap_ms=20
if [ -n "$trace" ]; then
    "$AMBERLOG" trace convert --format "$format" "$trace" --to ssdsim -o "$work/sectors"
    awk -v pages=$pages -v gap=$gap_ms '{
        for (p = int($3 / 4); p <= int(($3 + $4 - 1) / 4); p++) print n++ * gap, p % pages, ($5 == 0 ? "W" : "R")
    }' "$work/sectors" >"$work/pages"
else
    awk -v fill=$((pages * 7 / 8)) -v requests="$requests" -v gap=$gap_ms 'BEGIN {
        srand(42)
        for (n = 0; n < fill; n++) print n * gap, n, "W"
        for (; n < fill + requests; n++) print n * gap, int(rand() * fill), (rand() < 0.8 ? "W" : "R")
    }' >"$work/pages"
fi
count=$(wc -l <"$work/pages")

# Processor seconds of a command, the best of some runs; "-" and the reason if it does not end well.
measure() {
    local best= run code
    for ((run = 0; run < runs; run++)); do
        code=0
        # shellcheck disable=SC2034 # TIMEFORMAT is bash's.
        TIMEFORMAT='%U %S'
        { time timeout "$seconds" "$@" >"$work/out" 2>"$work/err" </dev/null; } 2>"$work/time" || code=$?
        case $code in
            0) ;;
            124) echo "- (more than $seconds s)"; return ;;
            *) echo "- (ended with $code)"; return ;;
        esac
        best=$(awk -v best="$best" '{ t = $1 + $2; print best != "" && best < t ? best : t }' "$work/time")
    done
    echo "$best"
}

# Processor seconds of ours, its report left in report.json.
ours() { # trace, options of ssd...
    local file=$1
    shift
    "$AMBERLOG" ssd --trace "$file" "${ours_device[@]}" --json "$@" </dev/null >"$work/report.json"
    measure "$AMBERLOG" ssd --trace "$file" "${ours_device[@]}" --json "$@"
}
field() { grep -o "\"$1\": *[0-9.]*" "$work/report.json" | head -1 | grep -o '[0-9.]*$'; }

row() { # label, their seconds, our seconds on text, our seconds on amber, requests
    awk -v label="$1" -v theirs="$2" -v text="$3" -v amber="$4" -v n="$5" 'BEGIN {
        ratio_text = ratio_amber = "-"
        if (theirs + 0 > 0) { ratio_text = sprintf("%.1f", theirs / text); ratio_amber = sprintf("%.1f", theirs / amber) }
        printf "%-34s %9d %14s %8.2f %8.2f %9s %9s\n", label, n, theirs, text, amber, ratio_text, ratio_amber
    }'
}

printf '%-34s %9s %14s %8s %8s %9s %9s\n' "" "" "processor" "seconds" "" "ratio" ""
printf '%-34s %9s %14s %8s %8s %9s %9s\n' simulator requests theirs "ours" "(amber)" "text" "amber"

as_disksim() { awk '{ print $1, 0, $2 * 4, 4, ($3 == "R" ? 1 : 0) }' "$1"; }

if [ -n "$flashsim" ]; then
    cp -R "$flashsim" "$work/flashsim"
    (
        cd "$work/flashsim"
        rm -f ./*.o FTLs/*.o
        sources=(run_ufliptrace.cpp SSDSim.cpp FTLs/*.cpp)
        for file in ssd_*.cpp; do [ "$file" = ssd_ftl.cpp ] || sources+=("$file"); done
        g++ -std=c++11 -O2 -w "${sources[@]}" -o ufliptrace
        mkdir trace
    )
    # Its driver plays a trace twice, the second time with counters on: ours gets the trace twice. Its DFTL's cache limit
    # is in translation pages of 256 entries; 32 of them are our default of 8192 entries. FAST: log blocks as ours.
    for ftl in 0:page:page 3:dftl:DFTL 2:fast:FAST; do
        IFS=: read -r number name label <<<"$ftl"
        head -n "$count" "$work/pages" >"$work/some"
        # Its FAST looks through every log block for every request.
        if [ "$name" = fast ] && [ -z "$trace" ]; then head -n $((pages * 7 / 8 + requests / 100)) "$work/pages" >"$work/some"; fi
        n=$(wc -l <"$work/some")
        awk '{ print "S; " $3 "; " $2 "; 0; 1; " $1 / 10 }' "$work/some" >"$work/flashsim/trace/SR01_P1_"
        cat >"$work/flashsim/ssd.conf" <<CONFIGURATION
SSD_SIZE 1
PACKAGE_SIZE 1
DIE_SIZE 1
PLANE_SIZE $((blocks + extra))
BLOCK_SIZE 64
PAGE_SIZE 2048
PAGE_ENABLE_DATA 0
BLOCK_ERASES 1000000
PAGE_READ_DELAY 88
PAGE_WRITE_DELAY 263
BLOCK_ERASE_DELAY 2000
FTL_IMPLEMENTATION $number
FAST_LOG_BLOCK_LIMIT $((extra - 64))
CACHE_DFTL_LIMIT 32
PARALLELISM_MODE 0
VIRTUAL_BLOCK_SIZE 1
VIRTUAL_PAGE_SIZE 1
CONFIGURATION
        cp "$work/some" "$work/twice"
        awk -v gap=$gap_ms -v n="$n" '{ print $1 + n * gap, $2, $3 }' "$work/some" >>"$work/twice"
        as_disksim "$work/twice" >"$work/twice.disksim"
        "$AMBERLOG" trace convert --format disksim "$work/twice.disksim" -o "$work/twice.amber"
        theirs=$(cd "$work/flashsim" && measure ./ufliptrace trace/)
        options=(--ftl "$name")
        if [ "$name" = fast ]; then options+=(--rw-log-blocks $((extra - 64))); fi
        text=$(ours "$work/twice.disksim" --format disksim "${options[@]}")
        amber=$(ours "$work/twice.amber" "${options[@]}")
        row "FlashSim $label" "$theirs" "$text" "$amber" $((2 * n))
        echo "    ours: $(field erases) erases, write amplification $(field write_amplification)"
    done
fi

if [ -n "$mqsim" ]; then
    cp -R "$mqsim" "$work/mqsim"
    (cd "$work/mqsim" && rm -rf build MQSim && make checkdirs >/dev/null && make -j"$(nproc)" >"$work/mqsim-build.log" 2>&1) ||
        { tail -5 "$work/mqsim-build.log" >&2; exit 1; }
    # 0 is a write, times in ns.
    awk '{ printf "%.0f 0 %d 4 %d\n", $1 * 1000000, $2 * 4, ($3 == "R") }' "$work/pages" >"$work/mqsim.trace"
    "$AMBERLOG" trace convert --format mqsim "$work/mqsim.trace" -o "$work/mqsim.amber"
    set_tag() { sed -i "s|<$1>[^<]*</$1>|<$1>$2</$1>|" "$work/mqsim/ssdconfig.xml"; }
    # One chip of one die of one plane, as ours.
    for tag in Caching_Mechanism=SIMPLE Enabled_Preconditioning=false Flash_Channel_Count=1 Chip_No_Per_Channel=1 \
        Die_No_Per_Chip=1 Plane_No_Per_Die=1 Block_No_Per_Plane=$((blocks + extra)) Page_No_Per_Block=64 Page_Capacity=2048 \
        Page_Metadat_Capacity=64 Overprovisioning_Ratio=0.0588 GC_Exec_Threshold=0.002 GC_Hard_Threshold=0.001 \
        GC_Block_Selection_Policy=GREEDY CMT_Capacity=65536 Static_Wearleveling_Enabled=false \
        Dynamic_Wearleveling_Enabled=false Flash_Technology=SLC Block_PE_Cycles_Limit=1000000 \
        Page_Read_Latency_LSB=25000 Page_Program_Latency_LSB=200000 Block_Erase_Latency=2000000; do
        set_tag "${tag%%=*}" "${tag#*=}"
    done
    cat >"$work/mqsim/comparison.xml" <<WORKLOAD
<?xml version="1.0" encoding="us-ascii"?>
<MQSim_IO_Scenarios>
	<IO_Scenario>
		<IO_Flow_Parameter_Set_Trace_Based>
			<Priority_Class>HIGH</Priority_Class>
			<Device_Level_Data_Caching_Mode>TURNED_OFF</Device_Level_Data_Caching_Mode>
			<Channel_IDs>0</Channel_IDs>
			<Chip_IDs>0</Chip_IDs>
			<Die_IDs>0</Die_IDs>
			<Plane_IDs>0</Plane_IDs>
			<Initial_Occupancy_Percentage>0</Initial_Occupancy_Percentage>
			<File_Path>$work/mqsim.trace</File_Path>
			<Percentage_To_Be_Executed>100</Percentage_To_Be_Executed>
			<Relay_Count>1</Relay_Count>
			<Time_Unit>NANOSECOND</Time_Unit>
		</IO_Flow_Parameter_Set_Trace_Based>
	</IO_Scenario>
</MQSim_IO_Scenarios>
WORKLOAD
    for mapping in true:page false:dftl; do
        IFS=: read -r ideal name <<<"$mapping"
        set_tag Ideal_Mapping_Table "$ideal"
        rm -f "$work/mqsim"/comparison_scenario_1.xml
        theirs=$(cd "$work/mqsim" && measure ./MQSim -i ssdconfig.xml -w comparison.xml)
        cp "$work/mqsim"/comparison_scenario_1.xml "$work/mqsim-$name.xml" 2>/dev/null || true
        text=$(ours "$work/mqsim.trace" --format mqsim --ftl "$name")
        amber=$(ours "$work/mqsim.amber" --ftl "$name")
        label="MQSim, ideal map against page"
        if [ "$name" = dftl ]; then label="MQSim, cached map against DFTL"; fi
        row "$label" "$theirs" "$text" "$amber" "$count"
        echo "    ours: $(field erases) erases, write amplification $(field write_amplification);" \
            "theirs: $(grep -o 'Issued_Flash_[A-Za-z_]*="[1-9][0-9]*"' "$work/mqsim-$name.xml" 2>/dev/null | tr '\n' ' ')"
    done
fi
