#!/bin/sh
# The default runs of the scripts, seeds 1 to 5, with more evaluations than by default: the pictures of docs/SCRIPT.md.
#
#     sh benchmark/default_runs.sh [SCRIPT ...]        (default: all; more than an hour on two cores, most of it sft.py)
#
# Two runs at a time with one thread each, in runs/defaults; then tools/plot.py writes docs/pictures/SCRIPT.png and a table.
# A run that is there already is not made again, so that a stopped one can be gone on with after deleting its folder.
set -e
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
scripts=${*:-grpo reinforce dr_grpo dapo gspo ppo_rlhf dpo reward_model sft cispo grpo_process grpo_tools}
folder=runs/defaults
mkdir -p "$folder"
for seed in 1 2 3 4 5; do
    for script in $scripts; do
        case $script in
            dapo) every=2 ;;
            ppo_rlhf) every=5 ;;
            reward_model) every=16 ;;
            sft) every=100 ;;
            *) every=4 ;;
        esac
        run=$folder/${script}__$seed
        [ -d "$run" ] || echo "$script.py --seed $seed --eval-every $every --run-dir $run"
    done
done | xargs -r -P 2 -L 1 python > "$folder/output.txt" 2>&1
for script in $scripts; do
    python tools/plot.py "$folder/${script}__"* --out "docs/pictures/$script.png"
done
