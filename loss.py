"""The objectives of the trainer and the fused linear head they run on.

A *term* is one (position, target) pair of a packed row: the hidden state at `position` predicts `target`.
With pi the trainer's policy, mu the one the server sampled from, A the advantage and r = pi / mu:

    clipped surrogate   loss = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
                        (PPO, arXiv 1707.06347)
    ratio mask          a term with r outside [clip_min, clip_max] has zero loss and zero gradient and still
                        counts as a trained token (IcePop, arXiv 2510.18855)
    score centering     loss = -A (w log pi(a) - sum over head v of c_v log pi(v)), w and c constant,
                        w = r inside the mask's band, else 0; the "head" is the sampler's K most likely
                        tokens, c_v = pi(v) (inside_v - alpha) (arXiv 2609.20807)

When sampler and trainer agree (r = 1 everywhere) the surrogate and score centering with its rescaled tail
both have the gradient of the plain policy gradient, -A grad log pi(a).

The fused head goes over the positions that carry a term, a chunk of them at a time with the whole vocabulary:

    hidden [R, E] -> logits z [R, V] -> lse, entropy, log pi at each term's ids -> loss, d loss / d log pi
                                     -> d loss / d z -> d hidden, d weight, d bias   (then the next chunk)

so the gradient is formed in the forward pass and the backward pass only scales it (as Liger's fused
cross-entropy does, arXiv 2410.10989). What an objective asks of the head is always the same:
log-probabilities at a few ids per term. Their derivative with respect to z is sparse at those ids minus ONE
number per position times the softmax, hence several terms on a position, several ids on a term and restricted
candidate sets add nothing to the cost of the matrix products.

This file never holds [M, V] logits, and knows nothing of files, ranks or processes. The sum over terms it
returns is plain: whoever calls it divides by the trained tokens (`microbatch_weight`, `step_divisor`).

Letters in shape comments: N tokens of a row, M terms, U positions that carry a term, R of them in a chunk, m
terms in a chunk, J ids wanted per term (1 + K for score centering, else 1), K sampler's top-k, V vocabulary,
E hidden size, C recorded candidates of all terms together.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Of one [R, V] block of logits, of which two are alive at a time. A GPU wants some 400 positions per product
# with a large vocabulary: 16384 terms, V = 151936, E = 4096 in bfloat16 on an H200 take 472, 194 and 154 ms
# at 64 MiB, 256 MiB, 1 GiB.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
LOG_RATIO_BOUND = 20.0  # |log r| is clamped to this before exp: a broken log-probability gives no inf * 0
MASS_TOLERANCE = 1e-4  # how far above 1 a sampler's probability or mass of its top K may lie
TAIL_FLOOR = 1e-6  # 1 - (a sum close to 1) is noise below this in float32


# ------------------------------------------------------------------------------------------------------------
# The head of a model


@dataclass(frozen=True)
class Head:
    """The last linear layer and what the model does to its output: z = softcap(scale * (h W^T + b)) /
    temperature, with softcap(y) = softcap * tanh(y / softcap). V may exceed the tokenizer's size (padded
    vocabularies)."""

    weight: torch.Tensor  # [V, E]
    bias: torch.Tensor | None = None  # [V]
    logit_scale: float = 1.0
    softcap: float | None = None


SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# names with "logit" or "lm_head" in them that do not touch the output of the head
HARMLESS = re.compile(
    r"attn|attention|router|keep|init|max_|lm_head_bias|chunk_size|freeze|auxiliary|temperature|lsd_"
)


def head_of(model, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> Head:
    """The Head of a transformers causal language model, read from its configuration by name.

    weight, bias: what to use instead of the model's own parameters, which are shards under FSDP. Raises
    ValueError where the head is not a plain linear layer or the configuration names a transformation of the
    logits that is not known here: an ignored one would make every ratio wrong.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, torch.nn.Linear):
        raise ValueError(
            f"the output head of {type(model).__name__} is {type(linear).__name__}; it must be a Linear"
        )
    config = model.config.get_text_config()
    scale, softcap = 1.0, None
    for name, value in config.to_dict().items():
        if value in (None, False):
            continue
        if name in SOFTCAPS:
            softcap = float(value)
        elif name in SCALES and isinstance(value, (int, float)):
            divides = name == "logits_scaling" and config.model_type != "hyperclovax"  # Granite's habit
            scale *= 1 / value if divides else value
        elif re.search(r"logit|lm_head", name) and not HARMLESS.search(name):
            raise ValueError(
                f"{type(config).__name__}.{name} = {value!r} changes the logits in an unknown way"
            )
    return Head(
        weight=linear.weight if weight is None else weight,
        bias=linear.bias if bias is None else bias,
        logit_scale=scale,
        softcap=softcap,
    )


# ------------------------------------------------------------------------------------------------------------
# Objectives: functions of log-probabilities. Each returns the loss of every term and its derivative with
# respect to the log-probabilities, so that the fused head needs no autograd.


@dataclass(frozen=True)
class Objective:
    """The options of the policy loss. epsilon only feeds the clip flags when score_centering is on."""

    score_centering: bool = True
    score_centering_tail: str = "rescaled"  # or "drop"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None = epsilon
    clip_min: float | None = 0.5  # of the ratio; None or 0 = unbounded
    clip_max: float | None = 5.0

    def __post_init__(self):
        if self.score_centering_tail not in ("rescaled", "drop"):
            raise ValueError(
                f"score_centering_tail is 'rescaled' or 'drop', not {self.score_centering_tail!r}"
            )

    def clip_range(self) -> tuple[float, float]:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, 1 + high

    def inside(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Whether the ratio lies in [clip_min, clip_max], both ends included; decided in log space."""
        low = math.log(self.clip_min) if self.clip_min else -math.inf
        high = math.inf if self.clip_max is None else math.log(self.clip_max)
        return (log_ratio >= low) & (log_ratio <= high)


def importance_ratio(logp, sampler_logp, advantage, objective: Objective) -> dict[str, torch.Tensor]:
    """log_ratio (clamped), kept (inside the mask's band) and the two clip flags, all [m].

    The flags say which tokens lie outside the trust region on the side that PPO clips. They are taken over
    every term, masked ones included, and under score centering too, where nothing is clipped.
    """
    log_ratio = (logp - sampler_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)  # [m]
    ratio = log_ratio.exp()  # [m]
    low, high = objective.clip_range()
    return {
        "log_ratio": log_ratio,
        "kept": objective.inside(log_ratio),
        "clipped_low": (ratio < low) & (advantage < 0),
        "clipped_high": (ratio > high) & (advantage > 0),
    }


def clipped_surrogate(logp, sampler_logp, advantage, objective: Objective):
    """The masked, clipped surrogate (PPO, arXiv 1707.06347; the mask is IcePop's, arXiv 2510.18855).

    logp, sampler_logp, advantage: [m]. Returns the loss [m], d loss / d logp [m] and the statistics of
    `importance_ratio`. The derivative is that of the value, so it is zero where the log-ratio is clamped.
    """
    stats = importance_ratio(logp, sampler_logp, advantage, objective)
    ratio = stats["log_ratio"].exp()  # [m]
    low, high = objective.clip_range()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)  # [m]
    loss = torch.where(stats["kept"], -surrogate, 0.0)  # [m]
    clamped = (logp - sampler_logp).abs() > LOG_RATIO_BOUND  # [m]
    active = stats["kept"] & ~stats["clipped_low"] & ~stats["clipped_high"] & ~clamped  # [m]
    return loss, torch.where(active, -ratio * advantage, 0.0), stats


def centering_coefficients(head_logp, head_sampler_logp, valid, objective: Objective) -> torch.Tensor:
    """c_v [m, K] in the estimate  sum over v of mu(v) f(r(v)) s(v) = sum over the head of c_v s(v).

    head_logp, head_sampler_logp [m, K]: log pi and log mu at the sampler's K most likely tokens; valid [m, K]
    says which slots count. With f(r) = r inside the band and 0 outside, mu f(r) is pi inside the band.
    Outside the head mu is modelled as rho * pi, rho = (1 - Q) / (1 - P) with Q and P the head's mass under mu
    and pi, so that every ratio there is 1 / rho; and the scores of pi sum to zero, so the tail's part is
    minus the head's:

        c_v = pi(v) (inside(r(v)) - alpha),    alpha = inside(1 / rho)         "rescaled"
                                               alpha = 0, the tail is left out  "drop"

    "drop" pushes probability out of the head even when sampler and trainer agree
    (tests/test_loss.py::test_a_dropped_tail_moves_an_unchanged_policy).
    """
    p = torch.where(valid, head_logp.exp(), 0.0)  # [m, K]
    log_ratio = torch.where(valid, head_logp - head_sampler_logp, 0.0)  # [m, K]
    inside = objective.inside(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))  # [m, K]
    if objective.score_centering_tail == "drop":
        return p * inside
    tail_p = 1 - p.sum(1)  # [m]
    tail_q = 1 - sampler_mass(head_sampler_logp, valid)  # [m]
    inverse_rho = tail_p.clamp(min=TAIL_FLOOR) / tail_q.clamp(min=TAIL_FLOOR)  # [m], 1 where both are empty
    alpha = objective.inside(inverse_rho.log())  # [m]
    return p * (inside.to(p.dtype) - alpha.to(p.dtype)[:, None])


def sampler_mass(head_sampler_logp, valid) -> torch.Tensor:
    """The probability that the sampler gave to its recorded head   [m]"""
    return torch.where(valid, head_sampler_logp.exp(), 0.0).sum(1)


def score_centering(logp, sampler_logp, head_sampler_logp, valid, advantage, objective: Objective):
    """Importance-weighted policy gradient minus its expectation under the sampler (arXiv 2609.20807).

    logp [m, 1 + K]: log pi of the target, then of the head's tokens. head_sampler_logp, valid: [m, K], the
    others [m]. The expectation is subtracted at every term, also where the sampled token is masked: otherwise
    it would not be zero on average (tests/test_loss.py::test_the_centred_update_is_zero_on_average). The
    target need not be in the head, and the head is a function of the prefix alone. A term without a head is
    left with the plain policy gradient.

    Returns the loss [m], d loss / d logp [m, 1 + K] and the statistics. Only the gradient means anything: the
    loss has no bound and compares with nothing.
    """
    stats = importance_ratio(logp[:, 0], sampler_logp, advantage, objective)
    weight = torch.where(stats["kept"], stats["log_ratio"].exp(), 0.0)  # [m]
    centre = centering_coefficients(logp[:, 1:], head_sampler_logp, valid, objective)  # [m, K]
    coefficient = -advantage[:, None] * torch.cat([weight[:, None], -centre], dim=1)  # [m, 1 + K]
    wanted = torch.nn.functional.pad(valid, (1, 0), value=True)  # [m, 1 + K]
    # where, not a product: 0 times the -inf of a padding slot is NaN
    loss = torch.where(wanted, coefficient * logp, 0.0).sum(1)  # [m]
    stats["sampler_mass"] = sampler_mass(head_sampler_logp, valid)
    return loss, coefficient, stats


# ------------------------------------------------------------------------------------------------------------
# Normalisation. Gradients are summed over ranks, never averaged: none of this knows the number of ranks.


def microbatch_weight(normalization: str, trained_tokens: int) -> float:
    """What the plain sum of a micro-batch is multiplied by before backward.

    trained_tokens: those of the micro-batch over all ranks, masked ones included. "step" accumulates plain
    sums, so that no micro-batch waits for the next one to be planned and the gradient does not depend on how
    samples were packed (tests/test_loss.py::test_step_normalisation_does_not_depend_on_packing); "microbatch"
    takes the token mean of each.
    """
    if normalization == "step":
        return 1.0
    if normalization == "microbatch":
        return 1.0 / max(trained_tokens, 1)
    raise ValueError(f"loss_normalization is 'step' or 'microbatch', not {normalization!r}")


def step_divisor(normalization: str, trained_tokens: int, microbatches: int) -> int:
    """What the accumulated gradient of an optimizer step is divided by, before clipping.

    trained_tokens: those of the whole step over all ranks; microbatches: how many the step really held (the
    last step of a run may hold fewer than the others).
    """
    return max(trained_tokens if normalization == "step" else microbatches, 1)


# ------------------------------------------------------------------------------------------------------------
# The fused head


@dataclass(frozen=True)
class Support:
    """Candidate sets of a row's terms, one after the other; the softmax of a term runs over its own set."""

    ids: torch.Tensor  # int64 [C]
    term: torch.Tensor  # int64 [C], ascending
    offsets: torch.Tensor  # int64 [M + 1]
    restricted: torch.Tensor  # bool [M]; False = the whole vocabulary, whatever the set


@dataclass(frozen=True)
class Chunk:
    """Positions of a row that are projected together, with their terms and the candidates of those."""

    positions: slice
    terms: slice
    candidates: slice


# (slice of the terms, log pi at their ids [m, J]) -> loss [m], d loss / d log pi [m, J], {statistic: [m]}
Score = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def statistics_dtype(hidden: torch.Tensor) -> torch.dtype:
    """float64 stays (tests); everything else has float32 log-probabilities, coefficients and sums."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def operand_dtype(hidden: torch.Tensor) -> torch.dtype:
    """What the matrix products read: bfloat16 on a GPU, which writes float32 from it. Elsewhere, and for
    float16, whose range a gradient leaves, the operands are raised to the statistics' type."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return torch.bfloat16
    return statistics_dtype(hidden)


def plan_chunks(position: torch.Tensor, offsets: torch.Tensor | None, vocabulary: int, element_bytes: int):
    """The positions that carry a term [U], for each term which of them is its own [M], and the chunks."""
    unique, slot, count = torch.unique_consecutive(position, return_inverse=True, return_counts=True)
    rows = max(1, CHUNK_BYTES[position.device.type] // (vocabulary * element_bytes))
    edges = [*range(0, len(unique), rows), len(unique)]
    if len(edges) == 1:  # no term at all: one empty chunk, so that nothing below is a special case
        edges = [0, 0]
    term_edges = torch.cat([count.new_zeros(1), count.cumsum(0)])[edges]  # int64 [chunks + 1]
    terms = term_edges.tolist()
    candidates = [0] * len(edges) if offsets is None else offsets[term_edges].tolist()
    slices = [
        [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)] for ends in (edges, terms, candidates)
    ]
    return unique, slot, [Chunk(*chunk) for chunk in zip(*slices, strict=True)]


def restricted_softmax(z, slot, ids, term, terms: int):
    """lse over each term's candidates [m], -inf without any, and the softmax there [c].

    z [R, V]; slot [m] the row of z of each term; ids, term [c] the candidates and whose they are.
    """
    chosen = z[slot[term], ids]  # [c]
    top = chosen.new_full((terms,), -math.inf).scatter_reduce(0, term, chosen, "amax")  # [m]
    exponential = (chosen - top[term]).exp()  # [c]
    total = chosen.new_zeros(terms).index_add(0, term, exponential)  # [m]
    return top + total.log(), exponential / total[term]


def matmul(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b with the result in `dtype`, not rounded to the operands' type first."""
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def scaled_logits(h, weight, head: Head, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """z [R, V]: product, bias, scale, softcap, temperature, in this order and in one block of memory."""
    z = matmul(h, weight.T, dtype)  # [R, V]
    if head.bias is not None:
        z += head.bias.detach()
    if head.softcap is None:
        return z.mul_(head.logit_scale / temperature)
    return z.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap / temperature)


def through_the_logits(dz, z, head: Head, temperature: float) -> torch.Tensor:
    """d loss / d (h W^T + b) from d loss / d z, in dz's memory. z [R, V] is used up."""
    if head.softcap is not None:
        dz.mul_(z.mul_(temperature / head.softcap).square_().neg_().add_(1))  # 1 - tanh^2
    return dz.mul_(head.logit_scale / temperature)


@dataclass
class Gradients:
    """Accumulated over chunks, in the statistics' type; None for what needs no gradient."""

    hidden: torch.Tensor | None  # [U, E]
    weight: torch.Tensor | None  # [V, E]
    bias: torch.Tensor | None  # [V]

    def add(self, chunk: Chunk, dy, h, weight):
        """dy [R, V]: d loss / d (h W^T + b); h [R, E]; weight [V, E]."""
        if self.bias is not None:
            self.bias += dy.sum(0)
        dy = dy.to(h.dtype)  # [R, V]
        if self.hidden is not None:
            self.hidden[chunk.positions] = matmul(dy, weight, self.hidden.dtype)
        if self.weight is not None and h.dtype == self.weight.dtype:
            self.weight.addmm_(dy.T, h)
        elif self.weight is not None:
            torch.addmm(self.weight, dy.T, h, out_dtype=self.weight.dtype, out=self.weight)


class ScaleOnly(torch.autograd.Function):
    """Ties a total to gradients that are already known: backward scales them by the incoming scalar.

    It does so in their own memory, so a second backward through the same total is refused by autograd's
    version check (tests/test_loss.py::test_a_second_backward_is_refused).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, total, position, gradients: Gradients):
        ctx.save_for_backward(position, gradients.hidden, gradients.weight, gradients.bias)
        ctx.shape = hidden.shape
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        position, compact, weight, bias = ctx.saved_tensors
        scaled = [
            None if x is None else x.mul_(scale).to(t)
            for x, t in zip((compact, weight, bias), ctx.dtypes, strict=True)
        ]
        if compact is not None:
            hidden = scaled[0].new_zeros(ctx.shape)  # [N, E]
            scaled[0] = hidden.index_copy_(0, position, scaled[0])
        return *scaled, None, None, None


def fused_head(hidden, head: Head, position, ids, support: Support | None, temperature: float, score: Score):
    """Scores log-probabilities at a few ids per term; differentiates the sum by hidden, weight and bias.

    hidden [N, E]; position int64 [M], ascending; ids int64 [M, J] in [0, V) (a slot without an id holds any
    valid one and gets coefficient 0 from `score`). `score` is called once per chunk without autograd. Returns
    the sum of the losses (a scalar) and the statistics of all terms [M], with `entropy` (of the whole
    temperature-scaled softmax at the term's position, whatever its support) added. Nothing of the gradient is
    computed for what does not require it.
    """
    asked = [
        torch.is_grad_enabled() and x is not None and x.requires_grad
        for x in (hidden, head.weight, head.bias)
    ]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        position, total, stats, gradients = _all_chunks(
            hidden, head, position, ids, support, temperature, score, asked
        )
    return ScaleOnly.apply(hidden, head.weight, head.bias, total, position, gradients), stats


def _all_chunks(hidden, head: Head, position, ids, support, temperature, score: Score, asked):
    dtype = statistics_dtype(hidden)
    vocabulary, width = head.weight.shape
    weight = head.weight.to(operand_dtype(hidden))  # [V, E]
    offsets = None if support is None else support.offsets
    position, slot, chunks = plan_chunks(position, offsets, vocabulary, dtype.itemsize)
    shapes = ((len(position), width), (vocabulary, width), (vocabulary,))
    zeros = [hidden.new_zeros(s, dtype=dtype) if a else None for s, a in zip(shapes, asked, strict=True)]
    gradients = Gradients(*zeros)
    total = hidden.new_zeros((), dtype=dtype)
    collected = []
    for chunk in chunks:
        h = hidden[position[chunk.positions]].to(weight.dtype)  # [R, E]
        z = scaled_logits(h, weight, head, temperature, dtype)  # [R, V]
        loss, stats, dz = _score_chunk(z, chunk, slot, ids, support, score, any(asked))
        total += loss.sum()
        collected.append(stats)
        if any(asked):
            gradients.add(chunk, through_the_logits(dz, z, head, temperature), h, weight)
        del z, dz
    stats = {name: torch.cat([chunk[name] for chunk in collected]) for name in collected[0]}  # [M] each
    return position, total, stats, gradients


def _score_chunk(z, chunk: Chunk, slot, ids, support: Support | None, score: Score, differentiate: bool):
    """Loss [m] and statistics of a chunk's terms, and d loss / d z [R, V] in the memory of the softmax.

    For the terms m at a position, with k their d loss / d log pi and g = sum of k over a term's ids:
        d loss / d z_j = sum of k where the id is j  -  (sum of g over whole-vocabulary terms) pi_j
                                                     -  sum over restricted terms of g pi_C(j)
    """
    top = z.amax(1)  # [R]
    p = (z - top[:, None]).exp_()  # [R, V]
    normaliser = p.sum(1)  # [R]
    p /= normaliser[:, None]
    lse = normaliser.log() + top  # [R]
    entropy = lse - torch.linalg.vecdot(p, z)  # [R]

    slot = slot[chunk.terms] - chunk.positions.start  # [m]
    wanted = ids[chunk.terms]  # [m, J]
    term_lse = lse[slot]  # [m]
    if support is not None:
        candidate, term = (
            support.ids[chunk.candidates],
            support.term[chunk.candidates] - chunk.terms.start,
        )  # [c]
        restricted = support.restricted[chunk.terms]  # [m]
        restricted_lse, p_candidate = restricted_softmax(z, slot, candidate, term, len(slot))  # [m], [c]
        term_lse = torch.where(restricted, restricted_lse, term_lse)
    logp = z[slot[:, None], wanted] - term_lse[:, None]  # [m, J]
    loss, coefficient, stats = score(chunk.terms, logp)
    stats["entropy"] = entropy[slot]
    if not differentiate:
        return loss, stats, None

    summed = coefficient.sum(1)  # [m]
    dense = summed if support is None else torch.where(restricted, 0.0, summed)  # [m]
    dz = p.mul_(-torch.zeros_like(lse).index_add(0, slot, dense)[:, None])  # [R, V]
    flat, vocabulary = dz.view(-1), dz.shape[1]  # [R V]
    flat.index_add_(0, (slot[:, None] * vocabulary + wanted).view(-1), coefficient.view(-1))
    if support is not None:
        sparse = -torch.where(restricted, summed, 0.0)[term] * p_candidate  # [c]
        flat.index_add_(0, slot[term] * vocabulary + candidate, sparse)
    return loss, stats, dz


# ------------------------------------------------------------------------------------------------------------
# The policy loss of a row


def check_row(row, vocabulary: int, centering: bool):
    """Raises ValueError on a row that cannot be scored: unordered terms, ids the head lacks, sampler values
    that are no log-probabilities. One device-to-host copy for all of it; nothing here needs the logits."""
    if len(row.target) == 0:
        return
    figures = {
        "steps back": (row.position.diff() < 0).sum(),
        "target below": row.target.min(),
        "target": row.target.max(),
        "probability": row.sampler_logp.exp().max(),
    }
    if row.candidate_ids is not None and len(row.candidate_ids) > 0:
        figures |= {"candidate id below": row.candidate_ids.min(), "candidate id": row.candidate_ids.max()}
    if centering and row.topk_ids is not None and row.topk_ids.shape[1] > 0:
        figures |= {
            "id of the sampler's top-k": row.topk_ids.max(),
            "mass": sampler_mass(row.topk_logp, row.topk_ids >= 0).max(),
        }
    values = torch.stack([figure.double() for figure in figures.values()]).tolist()  # the one synchronisation
    found = dict(zip(figures, values, strict=True))
    if found["steps back"]:
        raise ValueError("the terms of a row must be sorted by position")
    for name in ("target", "candidate id", "id of the sampler's top-k"):
        if found.get(name, 0) >= vocabulary or found.get(name + " below", 0) < 0:
            worst = found[name] if found[name] >= vocabulary else found[name + " below"]
            raise ValueError(
                f"a {name} is {int(worst)}, but the head has {vocabulary} rows: not the sampler's model?"
            )
    for mass in (found["probability"], found.get("mass", 0.0)):
        if not mass <= 1 + MASS_TOLERANCE:  # written so that NaN fails it
            raise ValueError(
                f"by the sampler's log-probabilities a probability is {mass:g}, above 1: not those it"
                " sampled from? Start the server with --logprobs-mode processed_logprobs."
            )


def support_of(row, ids, vocabulary: int) -> tuple[Support | None, torch.Tensor, torch.Tensor]:
    """A row's candidate sets, whether `ids` [M, J] lie in their term's support, which sets were unusable [M].

    An empty set is the whole vocabulary. So is one without the target (the first id): the target was sampled
    from the true set, so what was recorded is another one. The caller counts those.
    """
    terms = len(ids)
    if row.candidate_ids is None or len(row.candidate_ids) == 0:
        everything = torch.ones_like(ids, dtype=torch.bool)  # [M, J]
        return None, everything, torch.zeros_like(everything[:, 0])
    number = torch.arange(terms, device=ids.device)  # int64 [M]
    sizes = row.candidate_offsets.diff()  # int64 [M]
    candidates = row.candidate_ids.long()  # [C]
    term = number.repeat_interleave(sizes, output_size=len(candidates))  # [C]
    keys = (term * vocabulary + candidates).sort().values  # [C]: one number per (term, id)
    wanted = number[:, None] * vocabulary + ids  # [M, J]
    listed = keys[torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)] == wanted  # [M, J]
    restricted = (sizes > 0) & listed[:, 0]  # [M]
    support = Support(candidates, term, row.candidate_offsets, restricted)
    return support, listed | ~restricted[:, None], (sizes > 0) & ~listed[:, 0]


def policy_loss(hidden: torch.Tensor, head: Head, row, objective: Objective, temperature: float):
    """The policy loss of a row, summed over its terms, and statistics per term.

    hidden [N, E] of any floating type; row: position, target int64 [M], sampler_logp, advantage float32 [M],
    optional candidate_ids [C] with candidate_offsets [M + 1] (the set each target was sampled from, ids
    distinct) and, for score centering, optional topk_ids [M, K] (-1 = no token) with topk_logp [M, K], all
    tensors on hidden's device.

    The sum is a scalar (float32; float64 for a float64 hidden) with gradients to hidden, head.weight and
    head.bias; a row without terms gives a zero with zero gradients. statistics, detached, [M]: logp, entropy,
    log_ratio (clamped), kept, clipped_low, clipped_high, support_unusable (a recorded set without its target:
    scored over the whole vocabulary) and, under score centering, sampler_mass.

    Raises ValueError as `check_row` says. On a GPU the check and the planning wait for the stream, once per
    row.
    """
    vocabulary = head.weight.shape[0]
    check_row(row, vocabulary, objective.score_centering)
    dtype = statistics_dtype(hidden)
    sampler_logp, advantage = row.sampler_logp.to(dtype), row.advantage.to(dtype)  # [M]
    ids = row.target[:, None]  # int64 [M, J]
    if objective.score_centering and row.topk_ids is not None:
        ids = torch.cat([ids, row.topk_ids.long()], dim=1)
    named = ids >= 0  # bool [M, J]
    ids = ids.clamp(min=0)
    support, supported, unusable = support_of(row, ids, vocabulary)
    valid = (named & supported)[:, 1:]  # bool [M, K]
    head_logp = sampler_logp.new_empty(valid.shape)  # [M, K]
    if valid.shape[1] > 0:
        head_logp = row.topk_logp.to(dtype)
        valid = valid & (head_logp > -math.inf)

    def score(terms: slice, logp: torch.Tensor):
        """logp [m, J]"""
        mu, gain = sampler_logp[terms], advantage[terms]  # [m]
        if objective.score_centering:
            loss, coefficient, stats = score_centering(
                logp, mu, head_logp[terms], valid[terms], gain, objective
            )
        else:
            loss, coefficient, stats = clipped_surrogate(logp[:, 0], mu, gain, objective)
            coefficient = coefficient[:, None]
        return loss, coefficient, {"logp": logp[:, 0], **stats}

    total, stats = fused_head(hidden, head, row.position, ids, support, temperature, score)
    return total, stats | {"support_unusable": unusable}
