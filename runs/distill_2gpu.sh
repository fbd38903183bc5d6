#!/bin/sh
# Two GPUs, vLLM installed: a student learns word problems from a larger teacher of its family. GPU 0 trains, GPU 1
# serves both models, side by side. NOT RUN YET with these models: no expected number. STUDENT, TEACHER, LENGTH
# (longest prompt + answer) and OUT name others; options after the command are added to train.py's.
set -e
cd "$(dirname "$0")/.."
student=${STUDENT:-Qwen/Qwen3-0.6B}
teacher=${TEACHER:-Qwen/Qwen3-8B}
length=${LENGTH:-4096}
out=${OUT:-runs/distill-2gpu}
trap 'kill $servers' EXIT
trap 'exit 1' INT TERM

# each gets its cache in bytes: the share of the memory that is free changes while the other one starts
serve() {
    CUDA_VISIBLE_DEVICES=1 VLLM_SERVER_DEV_MODE=1 vllm serve "$@" --generation-config vllm \
        --gpu-memory-utilization 0.4 --kv-cache-memory-bytes 16000000000 &
    servers="$servers $!"
}
serve "$student" --port 8000 --max-model-len "$length" --weight-transfer-config '{"backend":"nccl"}'
serve "$teacher" --port 8001 --max-model-len $((length + 1))
for port in 8000 8001; do
    until curl -sf "http://localhost:$port/health"; do kill -0 $servers; sleep 1; done
done

CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 1 train.py \
    --model "$student" --task tasks/maths.py --task_kwargs '{"path": "openai/gsm8k", "name": "main"}' \
    --objective distill --teacher_server_urls default=http://localhost:8001 \
    --num_generations 4 --max_completion_length 3072 --token_budget 16384 --learning_rate 1e-5 \
    --max_steps 200 --output_dir "$out" "$@"
python report.py "$out"
