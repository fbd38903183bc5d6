"""FLOPs of a packed row on a model: what rows are balanced by, and what model FLOPs utilisation counts.

    token * N + pair * P + window_pair * P_window + term * U

N unique tokens, P attention pairs of full layers, P_window those within `window` tokens of sliding layers, U
positions that score a term; a multiply-add is 2 FLOPs, the backward is twice the forward.

It must never count what a run does again, such as layers that recompute: utilisation is of the model's FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def pairs(tokens):
    """Attention pairs of so many tokens in a line: 1 + 2 + ... + tokens."""
    return tokens * (tokens + 1) // 2


@dataclass(frozen=True)
class RowCost:
    """The coefficients. The planner takes the number of terms for U, an upper bound."""

    token: float
    pair: float
    term: float = 0.0
    window_pair: float = 0.0
    window: int = 0
    known: bool = True  # else only good to balance rows by: no FLOPs, so no MFU

    def path(self, tokens):
        """Cost of so many tokens in a line from a root (a number or an array), terms left out."""
        inside = np.minimum(tokens, self.window)
        in_window = pairs(inside) + (tokens - inside) * self.window
        return self.token * tokens + self.pair * pairs(tokens) + self.window_pair * in_window

    def row(self, row) -> float:
        """FLOPs of a packing.Row: what model FLOPs utilisation counts, and what rows are balanced by."""
        windowed = (row.position_ids + 1).clip(max=self.window).sum()
        scored = int((row.position[1:] != row.position[:-1]).sum()) + min(row.terms, 1)
        full = self.token * row.unique_tokens + self.pair * row.attention_pairs
        return float(full + self.window_pair * windowed + self.term * scored)


KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")  # of layers
# model types whose MLP is two matrices, which no field of a config says
UNGATED = set(
    "apertus arcee biogpt gpt2 gpt_neox jais2 nanochat nemotron opt persimmon phi starcoder2".split()
)


def row_cost_from_config(config) -> RowCost:
    """RowCost of a transformers configuration.

    Forward, per unique token and layer: projections 2 E D (2 H + 2 G), H more heads where the output is
    gated; MLP 6 E I (4 E I without a gate), or the active experts' and their router; Gated DeltaNet layers
    have their projections, convolution and recurrence instead. Attention is 4 H D a pair, the head 2 V E a
    term. A missing field counts as its usual default; what is no such model has an estimate that is not
    `known`.
    """
    try:
        return _row_cost(config)
    except (TypeError, ValueError, ZeroDivisionError):  # a list of sizes, say, one for each layer
        return RowCost(token=1.0, pair=1 / 4000, known=False)


def _row_cost(config) -> RowCost:
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def read(*names, default=0):
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if value is not None), default)

    layers = read("num_hidden_layers", default=1)
    hidden = read("hidden_size", default=1)
    heads = read("num_attention_heads", default=1)
    kv_heads = read("num_key_value_heads", default=heads)
    head_dim = read("head_dim", default=hidden // heads)
    window = read("sliding_window", "attention_chunk_size")
    kinds = read("layer_types", default=["sliding_attention" if window else "full_attention"] * layers)
    linear = sum("linear" in kind for kind in kinds)
    windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds) if window else 0
    family = str(read("model_type", default=""))  # these gate their output whether or not the file says so
    gated = bool(read("attn_output_gate", default=family.startswith(("qwen3_next", "qwen3_5"))))
    attention = 2 * hidden * head_dim * (2 * heads + 2 * kv_heads + gated * heads)

    dense = (4 if family in UNGATED else 6) * hidden * read("intermediate_size", default=4 * hidden)
    experts = read("num_experts", "num_local_experts", "n_routed_experts")
    width = read("moe_intermediate_size", "intermediate_size", default=4 * hidden)
    shared = read("shared_expert_intermediate_size", default=read("n_shared_experts") * width)
    gate = bool(read("shared_expert_intermediate_size"))  # of the shared expert
    sparse = 6 * hidden * (read("num_experts_per_tok", default=1) * width + shared)
    sparse += 2 * hidden * (experts + gate)
    step, first = read("decoder_sparse_step", default=1), read("first_k_dense_replace")
    skipped = read("mlp_only_layers", default=[])
    sparse_layers = [n for n in range(first, layers) if n not in skipped and (n + 1) % step == 0]
    moe = len(sparse_layers) if experts else 0

    key, value = read("linear_key_head_dim"), read("linear_value_head_dim")
    key_heads, value_heads = read("linear_num_key_heads"), read("linear_num_value_heads")
    mixed = 2 * key_heads * key + value_heads * value  # width of q, k and v together
    delta = 2 * hidden * (mixed + value_heads * value + 2 * value_heads) + 2 * value_heads * value * hidden
    delta += 2 * read("linear_conv_kernel_dim") * mixed + 7 * value_heads * key * value

    named = all(map(read, ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")))
    other = [kind for kind in kinds if kind not in KINDS] or read("kv_lora_rank")  # latent attention
    token = (layers - linear) * attention + linear * delta + moe * sparse + (layers - moe) * dense
    pair = 3 * 4 * heads * head_dim
    return RowCost(
        token=3.0 * token,
        pair=float(pair * (layers - linear - windowed)),
        term=6.0 * read("vocab_size") * hidden,
        window_pair=float(pair * windowed),
        window=window if windowed else 0,
        known=named and not other and bool(read("intermediate_size", "moe_intermediate_size")),
    )
