#!/bin/sh
# Eight GPUs, vLLM installed: the last SERVERS (2) of CUDA_VISIBLE_DEVICES sample, one server each, the others train
# under FSDP2; SERVERS=4 makes it 4 + 4. Word problems, 16 answers each, rows of 32k tokens. NOT RUN YET on eight
# GPUs: no expected number. MODEL, LENGTH (longest prompt + answer), PORT (and those after it) and OUT name others;
# options after the command are added to train.py's. In the end: the curve, who waited, and the page.
set -e
cd "$(dirname "$0")/.."
model=${MODEL:-Qwen/Qwen3-0.6B}
servers=${SERVERS:-2}
length=${LENGTH:-4096}
port=${PORT:-8000}
out=${OUT:-runs/speedrun-8gpu}
gpus=$(echo "${CUDA_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}" | tr ',' ' ')
ranks=$(($(echo "$gpus" | wc -w) - servers))
trap 'kill $started' EXIT
trap 'exit 1' INT TERM

number=0
for gpu in $gpus; do
    if [ $number -lt $ranks ]; then
        trainers="$trainers,$gpu"
    else
        CUDA_VISIBLE_DEVICES=$gpu VLLM_SERVER_DEV_MODE=1 vllm serve "$model" --port "$port" \
            --max-model-len "$length" --weight-transfer-config '{"backend":"nccl"}' \
            --logprobs-mode processed_logprobs --generation-config vllm &
        started="$started $!"
        urls="$urls http://localhost:$port"
        port=$((port + 1))
    fi
    number=$((number + 1))
done

# it loads the model and waits for the servers; one stream of weights goes to each of them
CUDA_VISIBLE_DEVICES=${trainers#,} torchrun --nproc-per-node $ranks train.py \
    --model "$model" --vllm_server_base_url $urls --vllm_server_timeout 600 \
    --task tasks/maths.py --task_kwargs '{"path": "openai/gsm8k", "name": "main"}' \
    --num_generations 16 --max_completion_length 3072 --token_budget 32768 --learning_rate 1e-6 \
    --max_steps 200 --output_dir "$out" "$@"
python report.py "$out"
