#!/bin/sh
# Two GPUs, vLLM installed: a student learns word problems from a larger teacher of its family. The first GPU of
# CUDA_VISIBLE_DEVICES trains, the second serves both models, side by side. NOT RUN YET with these models: no
# expected number. STUDENT, TEACHER, LENGTH (longest prompt + answer), PORT (and the next one) and OUT name others;
# options after the command are added to train.py's.
set -e
cd "$(dirname "$0")/.."
student=${STUDENT:-Qwen/Qwen3-0.6B}
teacher=${TEACHER:-Qwen/Qwen3-8B}
length=${LENGTH:-4096}
port=${PORT:-8000}
out=${OUT:-runs/distill-2gpu}
gpus=${CUDA_VISIBLE_DEVICES:-0,1}
trap 'kill $servers' EXIT
trap 'exit 1' INT TERM

# each gets its cache in bytes: the share of the memory that is free changes while the other one starts
serve() {
    CUDA_VISIBLE_DEVICES=${gpus#*,} VLLM_SERVER_DEV_MODE=1 vllm serve "$@" --generation-config vllm \
        --gpu-memory-utilization 0.3 --kv-cache-memory-bytes 16000000000 &
    servers="$servers $!"
}
serve "$student" --port "$port" --max-model-len "$length" --weight-transfer-config '{"backend":"nccl"}'
serve "$teacher" --port $((port + 1)) --max-model-len $((length + 1))

# it loads the student and waits for both
CUDA_VISIBLE_DEVICES=${gpus%%,*} torchrun --nproc-per-node 1 train.py \
    --model "$student" --vllm_server_base_url "http://localhost:$port" --vllm_server_timeout 600 \
    --objective distill --teacher_server_urls "default=http://localhost:$((port + 1))" \
    --task tasks/maths.py --task_kwargs '{"path": "openai/gsm8k", "name": "main"}' \
    --num_generations 4 --max_completion_length 3072 --token_budget 16384 --learning_rate 1e-5 \
    --max_steps 200 --output_dir "$out" "$@"
python report.py "$out"
