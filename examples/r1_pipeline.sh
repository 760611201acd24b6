#!/bin/sh
# The stages of DeepSeek-R1: cold start, RL by accuracy and format, rejection sampling, fine-tuning of the base, RL.
#
#     sh examples/r1_pipeline.sh [SEED]        (default: 1)
#
# DeepSeek-AI, "DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via Reinforcement Learning" (2025), section 2.3,
# https://arxiv.org/abs/2501.12948v1
#
#     cold    sft.py on COLD, a few worked solutions (default: 256 of data/addition/sft.jsonl, with their thoughts)
#     rl_1    format_reward.py, STEPS steps
#     right   distinct right completions of that model, at most PER_PROMPT of a prompt; of these, those with a thought
#     sft     sft.py of the base on them, not of the model that was trained, EPOCHS passes
#     rl_2    format_reward.py again, with other prompts
#
# Not done: data that is no reasoning, a reward for one language, and in the last stage rewards by models.
# Every setting is an environment variable. On a real model, with COLD rows of prompt and completion:
#
#     MODEL=Qwen/Qwen2.5-0.5B DATASET=openai/gsm8k:main COLD=my_cold.jsonl STEPS=100 \
#         SYSTEM="Think between <think> and </think>, then put your final answer within \\boxed{}." \
#         SFT="--learning-rate 1e-5 --warmup-steps 10" sh examples/r1_pipeline.sh
#
# It stops at the first failure. Called again, it goes on from there: what is finished stays, in the folder RUNS.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
seed=${1:-1}
: "${RUNS:=runs/r1_pipeline__$seed}" "${MODEL:=$root/models/tiny}" "${DATASET:=$root/data/addition}"
: "${STEPS:=10}" "${PROMPTS:=512}" "${SAMPLES:=4}" "${PER_PROMPT:=4}" "${EPOCHS:=4}" "${EVAL_PROMPTS:=256}"
: "${SYSTEM:=}" "${MINIBATCH:=64}" "${SFT:=--learning-rate 3e-4 --warmup-steps 4}" "${GRPO:=}" "${SAMPLE:=}"
mkdir -p "$RUNS"
[ -n "${COLD:-}" ] || grep -m 256 '<think>' "$root/data/addition/sft.jsonl" > "$RUNS/cold.jsonl"

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

sft() { # sft NAME ROWS: EPOCHS passes over the rows, from the base
    steps=$((($(wc -l < "$2") * EPOCHS + MINIBATCH - 1) / MINIBATCH))
    run "$1" sft.py --model "$MODEL" --dataset "$2" --num-steps "$steps" --minibatch-size "$MINIBATCH" \
        --eval-prompts 0 --seed "$seed" ${SYSTEM:+--system-prompt "$SYSTEM"} $SFT
}

rl() { # rl NAME MODEL SEED
    run "$1" examples/format_reward.py --model "$2" --dataset "$DATASET" --num-steps "$STEPS" --eval-every "$STEPS" \
        --eval-prompts "$EVAL_PROMPTS" --seed "$3" ${SYSTEM:+--system-prompt "$SYSTEM"} $SAMPLE $GRPO
}

sft cold "${COLD:-$RUNS/cold.jsonl}"
rl rl_1 "$RUNS/cold/checkpoint" "$((seed * 100 + 1))"
if [ ! -e "$RUNS/right.jsonl" ]; then
    echo "$RUNS/right.jsonl"
    python "$root/tools/sample.py" --model "$RUNS/rl_1/checkpoint" --dataset "$DATASET" --split train --keep right \
        --num-prompts "$PROMPTS" --num-samples "$SAMPLES" --per-prompt "$PER_PROMPT" --eval-prompts "$EVAL_PROMPTS" \
        --seed "$seed" ${SYSTEM:+--system-prompt "$SYSTEM"} $SAMPLE --out "$RUNS/right.jsonl" >> "$RUNS/log.txt"
fi
grep '<think>' "$RUNS/right.jsonl" > "$RUNS/thoughts.jsonl"
sft sft "$RUNS/thoughts.jsonl"
rl rl_2 "$RUNS/sft/checkpoint" "$((seed * 100 + 2))"

show() { # show LABEL METRICS: a row of the table
    found=$(echo "$2" | sed 's/.*"eval\/accuracy": \([^,]*\), "eval\/pass@1": \([^,]*\),.*/\1 \2/')
    LC_ALL=C printf '%5s   %.3f   %.3f\n' "$1" $found
}

echo "after  greedy  pass@1"
show cold "$(head -n 1 "$RUNS/rl_1/metrics.jsonl")"
show rl_1 "$(tail -n 1 "$RUNS/rl_1/metrics.jsonl")"
show sft "$(head -n 1 "$RUNS/rl_2/metrics.jsonl")"
show rl_2 "$(tail -n 1 "$RUNS/rl_2/metrics.jsonl")"
