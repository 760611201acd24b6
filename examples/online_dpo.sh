#!/bin/sh
# Online DPO: sample completions, pair right ones with wrong ones, train on the pairs, and repeat.
#
#     sh examples/online_dpo.sh [SEED]        (default: 1)
#
# Pang et al., "Iterative Reasoning Preference Optimization" (2024), https://arxiv.org/abs/2404.19733v1
# Guo et al., "Direct Language Model Alignment from Online AI Feedback" (2024), https://arxiv.org/abs/2402.04792v1
#
# In each round, the newest model writes SAMPLES completions for each of the first PROMPTS training prompts. At most
# PER_PROMPT pairs of each prompt are kept, each with a right and a wrong completion, and dpo.py trains on them for
# EPOCHS epochs. The model that sampled is the reference, so each round has a new one, as in Pang et al. Left out: Pang
# et al.'s likelihood term in the loss; Guo et al.'s judge model, and their new pairs for every optimizer step.
#
# Every setting is an environment variable (TINY=--tiny: MODEL is a checkpoint of the bundled one). On a real model:
#
#     MODEL=Qwen/Qwen2.5-0.5B-Instruct DATASET=openai/gsm8k:main DPO="--learning-rate 1e-6 --warmup-steps 10" \
#         sh examples/online_dpo.sh
#
# It stops at the first failure and keeps finished stages in the folder RUNS. Call it again to continue from there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
seed=${1:-1}
[ -n "${MODEL:-}" ] || : "${TINY:=--tiny}"
: "${RUNS:=runs/online_dpo__$seed}" "${MODEL:=$root/models/tiny}" "${DATASET:=$root/data/addition}" "${TINY:=}"
: "${ROUNDS:=2}" "${PROMPTS:=640}" "${SAMPLES:=4}" "${PER_PROMPT:=2}" "${EPOCHS:=1}"
: "${EVAL_PROMPTS:=256}" "${MINIBATCH:=32}" "${DPO:=--learning-rate 3e-4 --warmup-steps 4}" "${SAMPLE:=}"
mkdir -p "$RUNS"

# run FOLDER SCRIPT FLAGS...: start a run; resume a stopped run from its last save, or restart it if it has none
run() {
    folder=$RUNS/$1 script=$root/$2
    shift 2
    [ ! -e "$folder/done" ] || return 0
    echo "$folder"
    if ls -d "$folder"/checkpoint-* > /dev/null 2>&1; then
        python "$script" --resume "$folder" >> "$RUNS/log.txt"
    else
        rm -rf "$folder"
        python "$script" "$@" --run-dir "$folder" >> "$RUNS/log.txt"
    fi
    touch "$folder/done"
}

evaluate() { # evaluate ROUND MODEL: measure greedy accuracy
    run "eval_$1" grpo.py --model "$2" $TINY --dataset "$DATASET" --eval-prompts "$EVAL_PROMPTS" $SAMPLE \
        --num-steps 0 --kl-coef 0 --seed "$seed"
}

evaluate 0 "$MODEL"
newest=$MODEL round=0
while [ "$round" -lt "$ROUNDS" ]; do
    round=$((round + 1))
    pairs=$RUNS/pairs_$round.jsonl
    if [ ! -e "$pairs" ]; then
        echo "$pairs"
        python "$root/tools/sample.py" --model "$newest" $TINY --dataset "$DATASET" --split train \
            --num-prompts "$PROMPTS" --num-samples "$SAMPLES" --per-prompt "$PER_PROMPT" --keep pairs \
            --eval-prompts "$EVAL_PROMPTS" --seed "$((seed * 100 + round))" $SAMPLE --out "$pairs" >> "$RUNS/log.txt"
    fi
    steps=$((($(wc -l < "$pairs") * EPOCHS + MINIBATCH - 1) / MINIBATCH))
    run "dpo_$round" dpo.py --model "$newest" $TINY --dataset "$pairs" --num-steps "$steps" \
        --minibatch-size "$MINIBATCH" --eval-prompts 0 --seed "$seed" $DPO
    newest=$(ls -d "$RUNS/dpo_$round"/checkpoint-* | tail -1)
    evaluate "$round" "$newest"
done

show() { # show LABEL METRICS: print a row of the table
    LC_ALL=C printf '%5s   %.3f\n' "$1" "$(echo "$2" | sed 's/.*"eval\/accuracy": \([^,}]*\).*/\1/')"
}

echo "round  sampled  pairs  greedy"
for round in $(seq 0 "$ROUNDS"); do
    kept=$(cat "$RUNS/pairs_$round.jsonl" 2> /dev/null | wc -l)
    label=$(printf '%5d  %7d  %5d' "$round" "$((round * PROMPTS * SAMPLES))" "$kept")
    show "$label" "$(cat "$RUNS/eval_$round/metrics.jsonl")"
done
