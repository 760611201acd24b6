#!/bin/sh
# The stages of DeepSeek-R1: cold start, RL, rejection sampling, fine-tuning of the base model, and RL again.
#
#     sh examples/r1_pipeline.sh [SEED]        (default: 1)
#
# DeepSeek-AI, "DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via Reinforcement Learning" (2025), section 2.3,
# https://arxiv.org/abs/2501.12948v1
#
#     cold    train the base model with sft.py on COLD (default: 256 rows of data/addition/sft.jsonl with a thought)
#     rl_1    train with format_reward.py for STEPS steps
#     right   sample from that model, and keep at most PER_PROMPT distinct right completions of each prompt
#     sft     train the base model again with sft.py, on the kept completions that have a thought, for EPOCHS epochs
#     rl_2    train with format_reward.py on other prompts
#
# Left out: data without reasoning, the reward for using a single language, and reward models in the last stage.
# Every setting is an environment variable (TINY=--tiny: MODEL is a checkpoint of the bundled one). On a real model,
# with COLD a file of rows {prompt, completion}:
#
#     MODEL=Qwen/Qwen2.5-0.5B DATASET=openai/gsm8k:main COLD=my_cold.jsonl STEPS=100 \
#         SYSTEM="Think between <think> and </think>, then put your final answer within \\boxed{}." \
#         SFT="--learning-rate 1e-5 --warmup-steps 10" sh examples/r1_pipeline.sh
#
# It stops at the first failure and keeps finished stages in the folder RUNS. Call it again to continue from there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
seed=${1:-1}
[ -n "${MODEL:-}" ] || : "${TINY:=--tiny}"
: "${RUNS:=runs/r1_pipeline__$seed}" "${MODEL:=$root/models/tiny}" "${DATASET:=$root/data/addition}" "${TINY:=}"
: "${STEPS:=10}" "${PROMPTS:=512}" "${SAMPLES:=4}" "${PER_PROMPT:=4}" "${EPOCHS:=4}" "${EVAL_PROMPTS:=256}"
: "${SYSTEM:=}" "${MINIBATCH:=64}" "${SFT:=--learning-rate 3e-4 --warmup-steps 4}" "${GRPO:=}" "${SAMPLE:=}"
mkdir -p "$RUNS"
[ -n "${COLD:-}" ] || grep -m 256 '<think>' "$root/data/addition/sft.jsonl" > "$RUNS/cold.jsonl"

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

sft() { # sft NAME ROWS: train the base model on the rows for EPOCHS epochs
    steps=$((($(wc -l < "$2") * EPOCHS + MINIBATCH - 1) / MINIBATCH))
    run "$1" sft.py --model "$MODEL" $TINY --dataset "$2" --num-steps "$steps" \
        --minibatch-size "$MINIBATCH" --eval-prompts 0 --seed "$seed" ${SYSTEM:+--system-prompt "$SYSTEM"} $SFT
}

rl() { # rl NAME MODEL SEED: train the model with format_reward.py
    run "$1" examples/format_reward.py --model "$2" $TINY --dataset "$DATASET" --num-steps "$STEPS" --seed "$3" \
        --eval-every "$STEPS" --eval-prompts "$EVAL_PROMPTS" ${SYSTEM:+--system-prompt "$SYSTEM"} $SAMPLE $GRPO
}

newest() { ls -d "$RUNS/$1"/checkpoint-* | tail -1; } # newest NAME: print the newest checkpoint of a stage
sft cold "${COLD:-$RUNS/cold.jsonl}"
rl rl_1 "$(newest cold)" "$((seed * 100 + 1))"
if [ ! -e "$RUNS/right.jsonl" ]; then
    echo "$RUNS/right.jsonl"
    python "$root/tools/sample.py" --model "$(newest rl_1)" $TINY --dataset "$DATASET" --split train --seed "$seed" \
        --num-prompts "$PROMPTS" --num-samples "$SAMPLES" --per-prompt "$PER_PROMPT" --keep right $SAMPLE \
        --eval-prompts "$EVAL_PROMPTS" ${SYSTEM:+--system-prompt "$SYSTEM"} --out "$RUNS/right.jsonl" >> "$RUNS/log.txt"
fi
grep '<think>' "$RUNS/right.jsonl" > "$RUNS/thoughts.jsonl"
sft sft "$RUNS/thoughts.jsonl"
rl rl_2 "$(newest sft)" "$((seed * 100 + 2))"

show() { # show LABEL METRICS: print a row of the table
    LC_ALL=C printf '%5s   %.3f\n' "$1" "$(echo "$2" | sed 's/.*"eval\/accuracy": \([^,}]*\).*/\1/')"
}

echo "after  greedy"
show cold "$(head -n 1 "$RUNS/rl_1/metrics.jsonl")"
show rl_1 "$(tail -n 1 "$RUNS/rl_1/metrics.jsonl")"
show sft "$(head -n 1 "$RUNS/rl_2/metrics.jsonl")"
show rl_2 "$(tail -n 1 "$RUNS/rl_2/metrics.jsonl")"
