#!/bin/sh
# The figure and the tables of docs/phases.md: goodput of schedulers and placements under two kinds of traffic.
#
#   scripts/goodput_phases.sh MODEL TRACE OUT
#
# MODEL is a checkpoint, TRACE the Azure conversation trace (AzureLLMInferenceTrace_conv.csv: TIMESTAMP, ContextTokens,
# GeneratedTokens), OUT the beginning of the names of what is written: OUT.jsonl, OUT.png, OUT.md. About half an hour
# on two cores, with nothing else running.
set -eu
model=$1 trace=$2 out=$3

run() {
    rates=$1 workload=$2
    shift 2
    phasewise bench goodput \
        schedule=prefill_first schedule=sarathi:budget=256 schedule=splitfuse:budget=256 schedule=layered \
        place=disaggregated:prefill=1,decode=1 place=semi_pd \
        --model "$model" --kv-bytes 1G --requests 24 --rates "$rates" --workload "$workload" \
        --slo tight=800/80 --slo medium=2000/150 --slo relaxed=5000/300 --out "$out.jsonl" "$@" >>"$out.md"
}

rm -f "$out.jsonl" "$out.md"
run 0.5,1,1.5,2.5 "trace:path=$trace,scale=0.1"
run 0.4,0.7,1,1.4 lognormal:prompt=150,longest=600,new=24,new_longest=64 --plot "$out.png"
