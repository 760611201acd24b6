#!/bin/sh
# The default runs of dpo.py and ppo_rlhf.py over seeds 1 to 5; DPO with a small beta; PPO for longer, with and without KL.
#
#     sh benchmark/preferences.sh [FOLDER]        (default: runs/preferences; about 40 minutes on two cores)
#
# Two runs at a time with one thread each; then plot_preferences.py writes benchmark/results/preferences_*.csv and *.png.
set -e
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
folder=${1:-runs/preferences}
mkdir -p "$folder"
for seed in 1 2 3 4 5; do
    echo "dpo.py --seed $seed --eval-every 4 --run-dir $folder/dpo__$seed"
    echo "ppo_rlhf.py --seed $seed --eval-every 5 --run-dir $folder/ppo__$seed"
    [ $seed -le 3 ] && echo "dpo.py --seed $seed --eval-every 4 --beta 0.1 --run-dir $folder/dpo_low__$seed"
    [ $seed -le 3 ] && echo "ppo_rlhf.py --seed $seed --eval-every 5 --kl-coef 0 --num-steps 60 --run-dir $folder/ppo_kl0__$seed"
    [ $seed -le 3 ] && echo "ppo_rlhf.py --seed $seed --eval-every 5 --num-steps 60 --run-dir $folder/ppo_long__$seed"
done | xargs -P 2 -L 1 python > "$folder/output.txt" 2>&1
python benchmark/plot_preferences.py "$folder"
