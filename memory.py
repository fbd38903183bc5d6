"""Will it fit? The bytes that a rank needs at the peak of a step: python memory.py prints README's table.

    weights     12 P / R    float32 weights and AdamW's two moments, sharded over R ranks (2 P / R of what is
                            frozen beside adapters, and no gradient)
    gathered    2 V E + 12 P_layer    bf16: the embedding, two layers, the gradient of one in the making
                | 2 P (+ 8 P_layer)   where all of them stay gathered until their backward, as on one rank
    gradients   4 P / R     float32. They come as activations go
    kept        2 (2 E + 3 H D + 3 G D + 2 W) a token and layer, where a layer keeps its activations; 2 E,
                its input, where it recomputes them
    layer       2 (2 W + E) a token for the gradients inside the layer that the backward has reached, and
                what such a layer keeps where it has just been recomputed
    head        its gradient, 4 V E (twice where R does not divide V), and a block of logits

The peak is the highest of three moments, weights and what is gathered in all of them:

    in the head                  18 E N + kept in all layers + head
    in the last layer's backward 18 E N + kept in all layers + layer + the head's gradient, 4 V E
    in the first layer's         gradients + kept in one layer + layer (the others' weights are let go)

and gradients of an earlier micro-batch are there from the start (accumulation).

P parameters, N unique tokens of the row (at most the token budget), E hidden size, H query heads, G K/V
heads, D head size, W width of the MLP (of all the experts a token goes to), V vocabulary. What a compiled
layer keeps: its input and the residual after attention, q and k before and after norm and rotation, v, what
attention gives, and both halves of the gated MLP; the rest is worked out again in fused kernels. An
uncompiled one keeps norms in float32 and every product: about 2.5 times that. Layers that recompute are the
first: those after them have been freed when their turn comes. `python bench/train.py` prints the formula over
what it measures.

It must never be taken for exact: `MARGIN` of the device stays free.
"""

from __future__ import annotations

import argparse
from bisect import bisect

from head import CHUNK_BYTES

MARGIN = 0.06  # of the device: fragmentation, libraries, what this leaves out
EAGER = 2.5  # times the activations of a compiled layer


class Memory:
    """Bytes at the peak of a step on one rank, for a transformers configuration trained in bf16."""

    def __init__(
        self, config, parameters: int, ranks: int, compiled: bool, accumulates: bool, frozen=0, gathered=False
    ):
        """`gathered`: layers keep their gathered weights from forward to backward, as they do on one rank."""
        config = config.get_text_config() if hasattr(config, "get_text_config") else config

        def read(*names, default=0):
            values = (getattr(config, name, None) for name in names)
            return next((value for value in values if value is not None), default)

        hidden = read("hidden_size", default=1)
        heads = read("num_attention_heads", default=1)
        kv_heads = read("num_key_value_heads", default=heads)
        size = read("head_dim", default=hidden // heads)
        width = read("intermediate_size", default=4 * hidden)
        if experts := read("num_experts_per_tok"):  # their inputs are sorted by expert
            width = experts * (read("moe_intermediate_size", default=width) + hidden)
            width += read("shared_expert_intermediate_size")
        embedding = read("vocab_size") * hidden
        untied = 0 if read("tie_word_embeddings") else embedding
        trained = parameters - frozen
        self.layers = read("num_hidden_layers", default=1)
        layer = (parameters - embedding - untied) / self.layers
        self.weights = (12 * trained + 2 * frozen) / ranks
        self.working = 2 * (embedding + untied) + 12 * layer  # gathered when the backward ends
        whole = 2 * parameters + 8 * layer * (ranks > 1)
        self.gathered = whole if gathered or ranks == 1 else self.working  # when it begins
        self.gradients, self.accumulates = 4 * trained / ranks, accumulates
        self.head = (8 if read("vocab_size") % ranks else 4) * embedding + CHUNK_BYTES["cuda"]
        self.head_gradient = 4 * embedding
        # per token of the row: outside the layers; in one that keeps its activations; in one that does not
        self.token = 18 * hidden
        self.kept = 2 * (2 * hidden + 3 * (heads + kv_heads) * size + 2 * width) * (1 if compiled else EAGER)
        self.recomputed = 2 * hidden
        self.inside = 2 * (2 * width + hidden)  # the gradients inside a layer

    def peak(self, tokens: int, recomputing: int = 0) -> float:
        """With the first `recomputing` layers under gradient checkpointing."""
        kept = (self.layers - recomputing) * self.kept + recomputing * self.recomputed
        layer = tokens * (self.inside + (self.kept if recomputing else 0))
        start = tokens * (self.token + kept) + max(self.head, layer + self.head_gradient)
        start += self.gathered + self.gradients * self.accumulates
        end = tokens * (self.kept + self.inside) + self.working + self.gradients
        return self.weights + max(start, end)

    def recomputing(self, tokens: float, room: float) -> int:
        """The fewest layers that must recompute for a row to fit into `room` bytes; all if it never does."""
        return next((n for n in range(self.layers) if self.fits(tokens, n, room)), self.layers)

    def fits(self, tokens: float, recomputing: int, room: float) -> bool:
        return self.peak(tokens, recomputing) <= room * (1 - MARGIN)

    def most_tokens(self, room: float, recomputing: int) -> int:
        """The longest row that fits into `room` bytes."""
        return bisect(range(1, 1 << 30), False, key=lambda tokens: not self.fits(tokens, recomputing, room))


QWEN3 = {  # hidden, intermediate, layers, query heads, embeddings tied; head size 128, 8 K/V heads
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}


def qwen3(size: str):
    """The configuration of a Qwen3 by its size."""
    from transformers import Qwen3Config

    hidden, intermediate, layers, heads, tied = QWEN3[size]
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, head_dim=128,
        num_attention_heads=heads, num_key_value_heads=8, vocab_size=151936, tie_word_embeddings=tied,
    )  # fmt: skip


def main() -> None:
    """The longest row in thousands of tokens: all activations kept / all recomputed."""
    import torch
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("gib", nargs="?", type=float, default=139.0, help="memory of a GPU")
    gib = parser.parse_args().gib
    print(f"| Qwen3, {gib:g} GiB a GPU | 1 GPU | 2 | 4 | 8 |\n|---|---|---|---|---|")
    for size in QWEN3:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(qwen3(size))
        cells, parameters = [], sum(p.numel() for p in model.parameters())
        for ranks in (1, 2, 4, 8):
            needs = Memory(model.config, parameters, ranks, compiled=True, accumulates=False)
            most = [needs.most_tokens(gib * 2**30, n) // 1000 for n in (0, needs.layers)]
            cells.append(" / ".join(f"{tokens}k" for tokens in most) if most[1] else "-")
        print("|", " | ".join([size, *cells]), "|")


if __name__ == "__main__":
    main()
