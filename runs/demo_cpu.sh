#!/bin/sh
# Two CPU cores, no GPU, under a minute: the model that ships with the project learns to sort letters.
# The embedded server samples, two trainer ranks train, and every step's weights go to the server.
# Expected: reward from about 0.35 to above 0.9. Options after the command are added to train.py's,
# OUT names another directory:  OUT=runs/seed-1 runs/demo_cpu.sh --seed 1
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
out=${OUT:-runs/demo}
if [ "$out" = runs/demo ]; then rm -rf runs/demo; fi
torchrun --nproc-per-node 2 train.py \
    --model tiny --task tasks/sort.py --vllm_server_base_url embedded \
    --bf16 false \
    --max_completion_length 16 --token_budget 512 --max_staleness 2 \
    --learning_rate 5e-4 --lr_scheduler_type linear --max_steps 40 \
    --output_dir "$out" "$@"
python report.py "$out"
