#!/bin/sh
# One GPU: the model that ships with the project learns to sort letters. The embedded server samples and one
# trainer trains, both on the same device, in bf16 (layers this small are not worth compiling). `make quick` makes
# the environment first. Expected: reward from about 0.4 to above 0.9, in 73 s on an H200. Options after the
# command are added to train.py's, OUT names another directory.
set -e
cd "$(dirname "$0")/.."
out=${OUT:-runs/quick}
if [ "$out" = runs/quick ]; then rm -rf runs/quick; fi
torchrun --nproc-per-node 1 train.py \
    --model tiny --task tasks/sort.py --vllm_server_base_url embedded --compile false \
    --max_completion_length 16 --token_budget 512 --max_staleness 2 \
    --learning_rate 5e-4 --lr_scheduler_type linear --max_steps 40 \
    --output_dir "$out" "$@"
python report.py "$out"
