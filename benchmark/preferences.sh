#!/bin/sh
# The default runs of dpo.py and ppo_rlhf.py over seeds 1 to 5; DPO with a small beta; PPO for longer, with and without KL.
#
#     sh benchmark/preferences.sh [FOLDER]        (default: runs/preferences; by one cycle of it about 70 minutes on two cores)
#
# dpo.py does not sample: every 4 steps it stops, grpo.py evaluates the checkpoint, and it goes on as if it had not stopped.
# Meanwhile ppo_rlhf.py runs, one thread each; then plot_preferences.py writes benchmark/results/preferences_*.csv and *.png.
set -e
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
folder=${1:-runs/preferences}
mkdir -p "$folder"

dpo() { # dpo NAME FLAGS...
    run=$folder/$1
    shift
    python dpo.py --num-steps 4 --run-dir "$run" "$@"
    python grpo.py --num-steps 0 --run-dir "$run/prompts/0"
    for step in $(seq 4 4 60); do
        python grpo.py --model "$run/checkpoint" --num-steps 0 --run-dir "$run/prompts/$step"
        python dpo.py --resume "$run" --num-steps $((step + 4))
    done
    python grpo.py --model "$run/checkpoint" --num-steps 0 --run-dir "$run/prompts/64"
}

for seed in 1 2 3 4 5; do
    dpo "dpo__$seed" --seed $seed
    [ $seed -gt 3 ] || dpo "dpo_low__$seed" --seed $seed --beta 0.1
done > "$folder/output_dpo.txt" 2>&1 &
for seed in 1 2 3 4 5; do
    python ppo_rlhf.py --seed $seed --eval-every 5 --run-dir "$folder/ppo__$seed"
    [ $seed -le 3 ] || continue
    python ppo_rlhf.py --seed $seed --eval-every 5 --kl-coef 0 --num-steps 60 --run-dir "$folder/ppo_kl0__$seed"
    python ppo_rlhf.py --seed $seed --eval-every 5 --num-steps 60 --run-dir "$folder/ppo_long__$seed"
done > "$folder/output.txt" 2>&1
wait $!
python benchmark/plot_preferences.py "$folder"
