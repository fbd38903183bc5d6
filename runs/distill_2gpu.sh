#!/bin/sh
# Two GPUs, vLLM installed: a student learns word problems from a larger teacher of its family. GPU 0 trains, GPU 1
# serves both models. NOT RUN YET: no expected number. STUDENT, TEACHER and OUT name others; options after the
# command are added to train.py's.
set -e
cd "$(dirname "$0")/.."
student=${STUDENT:-Qwen/Qwen3-0.6B}
out=${OUT:-runs/distill-2gpu}
trap 'kill $servers' EXIT
trap 'exit 1' INT TERM

# one after the other: each measures the memory that the one before has left
serve() {
    CUDA_VISIBLE_DEVICES=1 vllm serve "$@" --generation-config vllm & servers="$servers $!"
    until curl -sf "http://localhost:$port/health"; do kill -0 $!; sleep 2; done
}
port=8000
export VLLM_SERVER_DEV_MODE=1
serve "$student" --port $port --max-model-len 4096 --gpu-memory-utilization 0.3 \
    --weight-transfer-config '{"backend":"nccl"}'
port=8001
serve "${TEACHER:-Qwen/Qwen3-8B}" --port $port --max-model-len 4097 --gpu-memory-utilization 0.5

CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 1 train.py \
    --model "$student" --task tasks/maths.py --task_kwargs '{"path": "openai/gsm8k", "name": "main"}' \
    --objective distill --teacher_server_urls default=http://localhost:8001 \
    --num_generations 4 --max_completion_length 3072 --token_budget 16384 --learning_rate 1e-5 \
    --max_steps 200 --output_dir "$out" "$@"
python report.py "$out"
