#!/bin/sh
# Two CPU cores, a few minutes: two teachers, each trained by rewards on its own kind of prompt (letters
# forwards, letters backwards), then one student that learns both kinds from what they think of its samples,
# without a reward. Expected: each teacher above 0.9 on its kind, the student at 90 % of either or more. Options
# after the command are added to the student's, OUT names another directory.
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
out=${OUT:-runs/distill}
if [ "$out" = runs/distill ]; then rm -rf runs/distill; fi
common="--task tasks/two_orders.py --vllm_server_base_url embedded --bf16 false --gradient_checkpointing false
    --max_completion_length 16"

train() {
    torchrun --nproc-per-node 2 train.py --model tiny $common --token_budget 512 --max_staleness 2 \
        --lr_scheduler_type linear --save_steps 0 "$@"
}

# mean reward of a model on 64 held-out prompts of a kind, 8 samples each
reward() {
    python train.py --rollout_only true --model "$1" $common --num_train_epochs 1 --output_dir "$out/held_out" \
        --task_kwargs "{\"kinds\": [\"$2\"], \"size\": 64, \"seed\": 1000000}" | awk '$1 == "reward" {print $2}'
}

for kind in sort tros; do
    train --task_kwargs "{\"kinds\": [\"$kind\"]}" --max_steps 40 --learning_rate 5e-4 --output_dir "$out/$kind"
done

trap 'kill $teachers' EXIT
trap 'exit 1' INT TERM
for kind in sort tros; do
    python serve.py --model "$out/$kind/checkpoint-40" --dtype float32 --port 0 >"$out/$kind/server" &
    teachers="$teachers $!"
    until grep -qs url "$out/$kind/server"; do kill -0 $!; sleep 1; done
    urls="$urls $kind=$(sed 's/.*"url": "\([^"]*\)".*/\1/' "$out/$kind/server")"
done
train --objective distill --teacher_server_urls $urls \
    --num_generations 2 --max_staleness 1 --max_steps 80 --learning_rate 4e-3 --output_dir "$out/student" "$@"

echo "reward      before  teacher student"
for kind in sort tros; do
    echo "$kind        $(reward tiny $kind)  $(reward "$out/$kind/checkpoint-40" $kind) " \
        "$(reward "$out/student/checkpoint-80" $kind)"
done
