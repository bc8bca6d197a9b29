#!/usr/bin/env bash
# Everything that is checked and measured on a GPU, in stages.
#
#     bash benchmarks/gpu_check.sh                      # all stages
#     bash benchmarks/gpu_check.sh speed                # one; also: speed resnet50-bn
#     OUT=somewhere PYTHON=python3 bash benchmarks/gpu_check.sh contract agreement
#
# Needs torch and torchvision; contract needs pytest; timm gives EfficientNet-Lite0. Files go to $OUT, by default
# results/speed/. Every stage ends with one line, and a stage that fails makes the exit code 1; the others still run.
# LIMIT is the seconds that a process of contract or agreement may take. Afterwards: python benchmarks/speed_docs.py

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
OUT=${OUT:-results/speed}
PYTHON=${PYTHON:-python}
PROCESSES=${PROCESSES:-8}
LIMIT=${LIMIT:-450}
NETS="resnet50-bn resnet50-gn vit-b16"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=2
mkdir -p "$OUT"

verdict() {  # of a stage, and the files that its processes should have written
    local stage=$1
    shift
    "$PYTHON" benchmarks/gpu_verdict.py "$stage" "$OUT" "$@"
}

contract() {  # every method with fast=True, on three networks, shared between processes
    rm -f "$OUT"/contract-*.log "$OUT/contract.json"
    for shard in $(seq 0 $((PROCESSES - 1))); do
        timeout "$LIMIT" "$PYTHON" -m pytest tests/test_contract.py --fast --device cuda --shard "$shard/$PROCESSES" \
            -m "slow or not slow" -q -p no:cacheprovider >"$OUT/contract-$shard.log" 2>&1 &
    done
    wait
    for log in "$OUT"/contract-*.log; do grep -E "^(FAILED|ERROR)|No module|Error:" "$log" | head -5; tail -n 1 "$log"; done
    verdict contract $(seq -f "contract-%g.log" 0 $((PROCESSES - 1)))
}

agreement() {  # fast=True against fast=False: every method on three small networks, some on three large ones
    rm -f "$OUT"/agreement*.json
    local files=()
    for shard in $(seq 0 $((PROCESSES - 1))); do
        timeout "$LIMIT" "$PYTHON" benchmarks/capture_check.py --nets digits-bn,digits-gn,digits-ln --methods every --size 32 \
            --shard "$shard/$PROCESSES" --out "$OUT/agreement-$shard.json" >"$OUT/agreement-$shard.log" 2>&1 &
        files+=("agreement-$shard.json")
    done
    for net in $NETS; do
        for part in "source,tent,eata,sar,deyo,auto" "roid,poem,poem-official" "deyo+poem,sar+poem,eata+poem"; do
            timeout "$LIMIT" "$PYTHON" benchmarks/capture_check.py --nets "$net" --methods "$part" --batches 20 \
                --out "$OUT/agreement-$net-${part%%,*}.json" >"$OUT/agreement-$net-${part%%,*}.log" 2>&1 &
            files+=("agreement-$net-${part%%,*}.json")
        done
        wait
    done
    verdict agreement "${files[@]}"
}

speed() {  # one network after the other, alone on the GPU
    local files=()
    for net in ${*:-$NETS}; do
        files+=("speed-$net.json")
        rm -f "$OUT/speed-$net.json"
        timeout 240 "$PYTHON" benchmarks/speed.py --device cuda --nets "$net" --batches 64,1 --seconds 0.25 --budget 150 \
            --methods source,bn,tent,poem1,poem2,auto,guarded-auto --modes eager,captured,bf16 --no-ratio \
            --out "$OUT/speed-$net.json"
    done
    verdict speed "${files[@]}"
}

curves() {  # POEM by batch size and network; methods beside it; shares selected
    rm -f "$OUT/curves.json"
    timeout 470 "$PYTHON" benchmarks/speed.py --device cuda --nets resnet50-bn --batches 64 --seconds 0.25 --budget 420 \
        --methods poem1,poem2,eata,sar,deyo,roid,rotta --modes bf16 --select 100,50,0 --curves --no-ratio --no-forward \
        --out "$OUT/curves.json"
    verdict curves curves.json
}

stream() {  # from files to answers, by number of loader processes
    rm -f "$OUT/stream.json"
    timeout 470 "$PYTHON" benchmarks/stream_speed.py --device cuda --seconds 8 --budget 400 --out "$OUT/stream.json"
    verdict stream stream.json
}

stacked() {  # 64 streams of single images as one batch, beside one stream of 64 images
    rm -f "$OUT/stacked.json"
    timeout 240 "$PYTHON" benchmarks/stacked.py --device cuda --net resnet50 --methods tent,poem,auto --streams 64 \
        --seconds 1 --rounds 3 --tf32 --out "$OUT/stacked.json"
    verdict stacked stacked.json
}

failed=0
[ $# -gt 0 ] || set -- contract agreement speed stacked curves stream
while [ $# -gt 0 ]; do
    stage=$1 nets=()
    shift
    while [ "$stage" = speed ] && [[ " $NETS " == *" ${1:-none} "* ]]; do nets+=("$1"); shift; done
    case "$stage" in
        contract | agreement | speed | stacked | curves | stream) $stage "${nets[@]}" || failed=1 ;;
        *) echo "expected contract, agreement, speed, stacked, curves or stream, got $stage"; failed=1 ;;
    esac
done
exit $failed
