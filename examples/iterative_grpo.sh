#!/bin/sh
# Iterative GRPO: rounds of grpo.py. Each round starts from the last round's checkpoint, which becomes its reference.
#
#     sh examples/iterative_grpo.sh [SEED]                  (default: 1)
#     ROUNDS=1 STEPS=30 RUNS=runs/fixed__1 sh examples/iterative_grpo.sh 1        (with a fixed reference)
#
# Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (2024), algorithm 1,
# https://arxiv.org/abs/2402.03300v3
#
# The KL penalty holds the policy near its state at the start of the round, not near the initial model. Each round has
# its own seed, and so its own prompts. Each round restarts AdamW's moments and the warm-up; the paper does not say
# whether it does. Left out: the paper also trains its reward model in each iteration; here a rule gives the reward.
#
# Every setting is an environment variable; GRPO holds flags of grpo.py. With TINY=--tiny, MODEL is a checkpoint
# of the bundled model. On a real model:
#
#     MODEL=Qwen/Qwen2.5-0.5B-Instruct DATASET=openai/gsm8k:main STEPS=100 GRPO="--kl-coef 0.04" \
#         sh examples/iterative_grpo.sh
#
# It stops at the first failure and keeps finished stages in the folder RUNS. Call it again to continue from there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
seed=${1:-1}
[ -n "${MODEL:-}" ] || : "${TINY:=--tiny}"
: "${RUNS:=runs/iterative_grpo__$seed}" "${MODEL:=$root/models/tiny}" "${DATASET:=$root/data/addition}" "${TINY:=}"
: "${ROUNDS:=3}" "${STEPS:=10}" "${EVAL_PROMPTS:=128}" "${GRPO:=--kl-coef 2 --warmup-steps 2}"
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

newest=$MODEL round=0
while [ "$round" -lt "$ROUNDS" ]; do
    round=$((round + 1))
    run "round_$round" grpo.py --model "$newest" $TINY --dataset "$DATASET" --num-steps "$STEPS" \
        --eval-every "$STEPS" --eval-prompts "$EVAL_PROMPTS" --seed "$((seed * 100 + round))" $GRPO
    newest=$(ls -d "$RUNS/round_$round"/checkpoint-* | tail -1)
done

show() { # show LABEL METRICS: print a row of the table
    LC_ALL=C printf '%5s   %.3f\n' "$1" "$(echo "$2" | sed 's/.*"eval\/accuracy": \([^,}]*\).*/\1/')"
}

echo " step  greedy"
show 0 "$(head -n 1 "$RUNS/round_1/metrics.jsonl")"
for round in $(seq "$ROUNDS"); do
    show "$((round * STEPS))" "$(tail -n 1 "$RUNS/round_$round/metrics.jsonl")"
done
