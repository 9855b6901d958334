#!/usr/bin/env bash
# The runs behind the figures of README.md and LOG.md, on a machine with a GPU (two for some), about 45 minutes:
#
#   benchmarks/figures.sh WORK                        # all of them
#   benchmarks/figures.sh WORK kimi small             # some of them, by the names below
#
# WORK is a folder on a disk with 60 GB; states that are to be in memory go to $RAM (default /dev/shm). Each run's output
# is WORK/NAME.txt, and its last lines are shown. PYTHON, MODEL, PROMPTS and ENGINE_ARGS may be set.
set -u
cd "$(dirname "$0")/.."
work=${1:?usage: benchmarks/figures.sh WORK [name ...]}
shift
python=${PYTHON:-.venv/bin/python} ram=${RAM:-/dev/shm} model=${MODEL:-build/SmolLM2-135M-Instruct}
gpus=$(nvidia-smi -L | wc -l)
train="--tokens-per-step 16384 --learning-rate 1e-3 --cuda-graphs True --eval-fraction 0.05 --log-every 20"
mkdir -p "$work"

runs() {  # name, program and its arguments
    echo "tests -m pytest -m gpu"
    echo "kimi benchmarks/extraction.py --dims kimi --prompts 96 --returned 8 --ram $ram/kimi --disk $work/kimi"
    echo "story benchmarks/end_to_end.py --model $model --work $work/story --train '$train --eval-every 1000 --max-steps 6000'" \
        "${PROMPTS:+--prompts $PROMPTS}"
    echo "small benchmarks/extraction.py --model $model --data $work/story/states/chats.jsonl --prompts 8000 --writers 4" \
        "--returned 8 --ram $ram/small --disk $work/small"
    echo "fp8 benchmarks/state_dtypes.py --states $work/story/states --work $work/fp8 --seeds 3 $train --max-steps 1200"
    echo "training benchmarks/training.py --together"
    echo "disk benchmarks/training_disk.py --work $work/disk --dims kimi --samples 300"
    echo "disk-dense benchmarks/training_disk.py --work $work/disk-dense --dims kimi --length 2048 --samples 150"
    echo "disk-warm benchmarks/training_disk.py --work $work/disk-warm --dims kimi --samples 300 --warm-cache"
    for number in 0 2; do
        echo "readers-$number benchmarks/training_disk.py --work $ram/readers-$number --dims smollm2 --samples 6000 --length 410" \
            "--warm-cache --steps 1000 --cuda-graphs True --log-every 20 --reader-processes $number"
    done
    echo "cold benchmarks/training_disk.py --work $work/cold --dims smollm2 --samples 10000 --length 48 --steps 2"
    [ "$gpus" -gt 1 ] && echo "gpus benchmarks/training_gpus.py --work $work/gpus --dims kimi --samples 200 --ranks 2" \
        "--tokens-per-rank 16384"
}

failed=0
while read -r name command; do
    [ $# -gt 0 ] && [[ " $* " != *" $name "* ]] && continue
    echo "== $name: $command"
    started=$SECONDS
    caches=
    [ "$name" = cold ] && caches="TORCHINDUCTOR_CACHE_DIR=$work/cold/inductor TRITON_CACHE_DIR=$work/cold/triton"
    eval "$caches $python $command" >"$work/$name.txt" 2>&1 </dev/null || { echo "FAILED, see $work/$name.txt"; failed=1; }
    grep -v '^RESULT' "$work/$name.txt" | tail -25
    echo "== $name took $((SECONDS - started)) s"
done < <(runs)
exit $failed
