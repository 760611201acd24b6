#!/bin/sh
# Expert iteration: sample completions, keep the right ones, fine-tune on them, and repeat (STaR, RAFT).
#
#     sh examples/expert_iteration.sh [SEED]        (default: 1)
#
# Zelikman et al., "STaR: Bootstrapping Reasoning With Reasoning" (2022), https://arxiv.org/abs/2203.14465v2
# Dong et al., "RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment" (2023),
# https://arxiv.org/abs/2304.06767v4
#
# In each round, the newest model writes SAMPLES completions for each of the first PROMPTS training prompts. At most
# PER_PROMPT distinct right completions of each prompt are kept, and sft.py trains the newest model on them for EPOCHS
# epochs, as in RAFT; STaR trains the first model in every round. Left out: STaR's hints for prompts without a right
# completion, and RAFT's selection by a reward model.
#
# Every setting is an environment variable (TINY=--tiny: MODEL is a checkpoint of the bundled one). On a real model:
#
#     MODEL=Qwen/Qwen2.5-0.5B-Instruct DATASET=openai/gsm8k:main SFT="--learning-rate 1e-5 --warmup-steps 10" \
#         sh examples/expert_iteration.sh
#
# It stops at the first failure and keeps finished stages in the folder RUNS. Call it again to continue from there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
seed=${1:-1}
[ -n "${MODEL:-}" ] || : "${TINY:=--tiny}"
: "${RUNS:=runs/expert_iteration__$seed}" "${MODEL:=$root/models/tiny}" "${DATASET:=$root/data/addition}" "${TINY:=}"
: "${ROUNDS:=3}" "${PROMPTS:=512}" "${SAMPLES:=4}" "${PER_PROMPT:=4}" "${EPOCHS:=1}"
: "${EVAL_PROMPTS:=256}" "${MINIBATCH:=64}" "${SFT:=--learning-rate 3e-4 --warmup-steps 4}" "${SAMPLE:=}"
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
    right=$RUNS/right_$round.jsonl
    if [ ! -e "$right" ]; then
        echo "$right"
        python "$root/tools/sample.py" --model "$newest" $TINY --dataset "$DATASET" --split train \
            --num-prompts "$PROMPTS" --num-samples "$SAMPLES" --per-prompt "$PER_PROMPT" --keep right \
            --eval-prompts "$EVAL_PROMPTS" --seed "$((seed * 100 + round))" $SAMPLE --out "$right" >> "$RUNS/log.txt"
    fi
    steps=$((($(wc -l < "$right") * EPOCHS + MINIBATCH - 1) / MINIBATCH))
    run "sft_$round" sft.py --model "$newest" $TINY --dataset "$right" --num-steps "$steps" \
        --minibatch-size "$MINIBATCH" --eval-prompts 0 --seed "$seed" $SFT
    newest=$(ls -d "$RUNS/sft_$round"/checkpoint-* | tail -1)
    evaluate "$round" "$newest"
done

show() { # show LABEL METRICS: print a row of the table
    LC_ALL=C printf '%5s   %.3f\n' "$1" "$(echo "$2" | sed 's/.*"eval\/accuracy": \([^,}]*\).*/\1/')"
}

echo "round  sampled  kept  greedy"
for round in $(seq 0 "$ROUNDS"); do
    kept=$(cat "$RUNS/right_$round.jsonl" 2> /dev/null | wc -l)
    label=$(printf '%5d  %7d  %4d' "$round" "$((round * PROMPTS * SAMPLES))" "$kept")
    show "$label" "$(cat "$RUNS/eval_$round/metrics.jsonl")"
done
