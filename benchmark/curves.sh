#!/bin/sh
# Learning curves of the online scripts on the embedded task: seeds 1 to 5, an equal number of completions.
#
#     sh benchmark/curves.sh [FOLDER]        (default: runs/curves; about half an hour on two cores)
#
# Two runs at a time with one thread each; then plot.py writes benchmark/results/curves_*.csv, *.png and a table.
# DAPO samples several rounds a step: it gets more steps than it needs, and plot.py cuts it at the others' completions.
set -e
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
folder=${1:-runs/curves}
mkdir -p "$folder"
for seed in 1 2 3 4 5; do
    for script in reinforce grpo dr_grpo dapo gspo cispo; do
        steps="--num-steps 40 --eval-every 4"
        [ $script = dapo ] && steps="--num-steps 24 --eval-every 2"
        echo "$script.py --seed $seed $steps --save-every 100 --run-dir $folder/${script}__$seed"
    done
done | xargs -P 2 -L 1 python > "$folder/output.txt" 2>&1
python benchmark/plot.py "$folder"
