#!/bin/sh
# Expert iteration: sample, keep what is right, fine-tune on it, and again (STaR, RAFT).
#
#     sh examples/expert_iteration.sh [SEED]        (default: 1)
#
# Zelikman et al., "STaR: Bootstrapping Reasoning With Reasoning" (2022), https://arxiv.org/abs/2203.14465v2
# Dong et al., "RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment" (2023),
# https://arxiv.org/abs/2304.06767v4
#
# A round: SAMPLES completions of each of the first PROMPTS training prompts by the newest model; of a prompt's distinct
# right ones at most PER_PROMPT; EPOCHS passes of sft.py over them. With START=last training goes on from the newest
# model, as in RAFT, with START=first it begins each time from the first one, as in STaR. Not done: STaR's hints for
# prompts without a right completion; RAFT's choice of the best by a reward model.
#
# Every setting is an environment variable. On a real model:
#
#     MODEL=Qwen/Qwen2.5-0.5B-Instruct DATASET=openai/gsm8k:main SFT="--learning-rate 1e-5 --warmup-steps 10" \
#         sh examples/expert_iteration.sh
#
# It stops at the first failure. Called again, it goes on from there: what is finished stays, in the folder RUNS.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
seed=${1:-1}
: "${RUNS:=runs/expert_iteration__$seed}" "${MODEL:=$root/models/tiny}" "${DATASET:=$root/data/addition}"
: "${ROUNDS:=3}" "${PROMPTS:=512}" "${SAMPLES:=4}" "${PER_PROMPT:=4}" "${EPOCHS:=1}" "${START:=last}"
: "${EVAL_PROMPTS:=256}" "${MINIBATCH:=64}" "${SFT:=--learning-rate 3e-4 --warmup-steps 4}" "${SAMPLE:=}"
mkdir -p "$RUNS"

# run FOLDER SCRIPT FLAGS...: a run that was stopped goes on from its last save, and begins anew if it has none
run() {
    folder=$RUNS/$1 script=$root/$2
    shift 2
    [ ! -e "$folder/done" ] || return 0
    echo "$folder"
    if ls "$folder"/state/[0-9]* > /dev/null 2>&1; then
        python "$script" --resume "$folder" >> "$RUNS/log.txt"
    else
        rm -rf "$folder"
        python "$script" "$@" --run-dir "$folder" >> "$RUNS/log.txt"
    fi
    touch "$folder/done"
}

evaluate() { # evaluate ROUND MODEL: greedy accuracy and pass@1
    run "eval_$1" grpo.py --model "$2" --dataset "$DATASET" --eval-prompts "$EVAL_PROMPTS" $SAMPLE \
        --num-steps 0 --kl-coef 0 --seed "$seed"
}

evaluate 0 "$MODEL"
newest=$MODEL round=0
while [ "$round" -lt "$ROUNDS" ]; do
    round=$((round + 1))
    right=$RUNS/right_$round.jsonl
    if [ ! -e "$right" ]; then
        echo "$right"
        python "$root/tools/sample.py" --model "$newest" --dataset "$DATASET" --split train --num-prompts "$PROMPTS" \
            --num-samples "$SAMPLES" --eval-prompts "$EVAL_PROMPTS" --seed "$((seed * 100 + round))" \
            --keep right --per-prompt "$PER_PROMPT" $SAMPLE --out "$right" >> "$RUNS/log.txt"
    fi
    steps=$((($(wc -l < "$right") * EPOCHS + MINIBATCH - 1) / MINIBATCH))
    from=$newest
    [ "$START" = last ] || from=$MODEL
    run "sft_$round" sft.py --model "$from" --dataset "$right" --num-steps "$steps" --minibatch-size "$MINIBATCH" \
        --eval-prompts 0 --seed "$seed" $SFT
    newest=$RUNS/sft_$round/checkpoint
    evaluate "$round" "$newest"
done

show() { # show LABEL METRICS: a row of the table
    found=$(echo "$2" | sed 's/.*"eval\/accuracy": \([^,]*\), "eval\/pass@1": \([^,]*\),.*/\1 \2/')
    LC_ALL=C printf '%5s   %.3f   %.3f\n' "$1" $found
}

echo "round  sampled  kept  greedy  pass@1"
for round in $(seq 0 "$ROUNDS"); do
    kept=$(cat "$RUNS/right_$round.jsonl" 2> /dev/null | wc -l)
    label=$(printf '%5d  %7d  %4d' "$round" "$((round * PROMPTS * SAMPLES))" "$kept")
    show "$label" "$(cat "$RUNS/eval_$round/metrics.jsonl")"
done
