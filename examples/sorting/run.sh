#!/bin/sh
# Train a model to sort under three rewards. The script makes the data, trains a base model with sft.py, trains it with
# grpo.py under each reward, and draws a picture. Results go to runs/sorting. To read completions, use tools/look.py.
#
#     sh examples/sorting/run.sh                                   (SEEDS=1 for one seed instead of three)
#
# If it was stopped, call it again: it skips finished runs and resumes a run that has a saved state.
set -eu
cd "$(dirname "$0")/../.."
folder=${FOLDER:-runs/sorting} seeds=${SEEDS:-1 2 3} rewards=${REWARDS:-exact inclusion repaired}
base_steps=${BASE_STEPS:-300} steps=${STEPS:-24} flags=${FLAGS:---eval-every 8 --eval-prompts 256}
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1

train() { # train RUN STEPS COMMAND SETTINGS: skip a finished run, resume a stopped one
    if [ -d "$1/checkpoint-$(printf %06d "$2")" ]; then return; fi
    if ls -d "$1"/checkpoint-* > /dev/null 2>&1; then
        $3 --resume "$1" --num-steps "$2"
    else
        rm -rf "$1"
        $3 --run-dir "$1" --num-steps "$2" $4
    fi
}

python examples/sorting/make.py "$folder/data"
train "$folder/base" "$base_steps" "python sft.py" \
    "--model models/tiny --tiny --dataset $folder/data/sft.jsonl --warmup-steps 30"
for seed in $seeds; do
    for reward in $rewards; do
        train "$folder/${reward}__$seed" "$steps" "python examples/sorting/rewards.py $reward" \
            "--model $folder/base/checkpoint-$(printf %06d "$base_steps") --dataset $folder/data --seed $seed $flags"
    done
done
python tools/plot.py "$folder"/*__* --metrics reward/mean eval/accuracy rollout/length_mean --out "$folder/sorting.png"
