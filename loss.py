"""The objectives of the trainer: pure functions of log-probabilities, and the losses of a row made of them.

A *term* is one (position, target) pair of a packed row: the hidden state at `position` predicts `target`.
With pi the trainer's policy, mu the one the server sampled from, A the advantage and r = pi / mu:

    clipped surrogate   loss = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
                        (PPO, arXiv 1707.06347)
    ratio mask          a term with r outside [clip_min, clip_max] has zero loss and zero gradient and still
                        counts as a trained token (IcePop, arXiv 2510.18855)
    score centering     loss = -A (w log pi(a) - sum over head v of c_v log pi(v)), w and c constant,
                        w = r inside the mask's band, else 0; the "head" is the sampler's K most likely
                        tokens, c_v = pi(v) (inside_v - alpha) (arXiv 2609.20807)
    generalised JSD     loss = beta KL(T || M) + (1 - beta) KL(pi || M), M = (1 - beta) pi + beta T, of a
                        teacher T; KL(T || pi) at beta = 0, KL(pi || T) at beta = 1 (GKD, arXiv 2306.13649)

When sampler and trainer agree (r = 1 everywhere) the surrogate and score centering with its rescaled tail
both have the gradient of the plain policy gradient, -A grad log pi(a).

A policy objective is a function

    logp [m, 1 + K], sampler_logp [m, 1 + K], advantage [m], options -> loss [m], d loss / d logp, statistics

whose first column is the target and whose others are the sampler's K most likely tokens, -inf in sampler_logp
where there are fewer. The derivative may leave out columns at the end. A new objective is one such function,
named in `Objective(policy=...)`: it needs no autograd, and the fused head (head.py) does the rest.

This file never holds [M, V] logits, and knows nothing of files, ranks or processes. The sum over terms it
returns is plain: whoever calls it divides by the trained tokens (`microbatch_weight`, `step_divisor`).

Letters in shape comments: N tokens of a row, M terms, m those of a chunk, J ids wanted per term, K sampler's
or teacher's top-k, V vocabulary, E hidden size, C recorded candidates of all terms together, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from head import Head, Score, Support, fused_head, statistics_dtype

LOG_RATIO_BOUND = 20.0  # |log r| is clamped to this before exp: a broken log-probability gives no inf * 0
MASS_TOLERANCE = 1e-4  # how far above 1 a sampler's probability or mass of its top K may lie
TAIL_FLOOR = 1e-6  # 1 - (a sum close to 1) is noise below this in float32
TAIL_CEILING = -1e-7  # log of the largest mass of a support beside which a tail bucket is still a number
IMPOSSIBLE = -1e4  # stands for log 0 where 0 log 0 must stay a number


# ------------------------------------------------------------------------------------------------------------
# Policy objectives


def importance_ratio(logp, sampler_logp, advantage, options: Objective) -> dict[str, torch.Tensor]:
    """log_ratio (clamped), kept (inside the mask's band) and the two clip flags of the targets, all [m].

    The flags say which tokens lie outside the trust region on the side that PPO clips. They are taken over
    every term, masked ones included, and under score centering too, where nothing is clipped.
    """
    log_ratio = (logp[:, 0] - sampler_logp[:, 0]).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)  # [m]
    ratio = log_ratio.exp()  # [m]
    low, high = options.clip_range()
    return {
        "log_ratio": log_ratio,
        "kept": options.inside(log_ratio),
        "clipped_low": (ratio < low) & (advantage < 0),
        "clipped_high": (ratio > high) & (advantage > 0),
    }


def clipped_surrogate(logp, sampler_logp, advantage, options: Objective):
    """The masked, clipped surrogate (PPO, arXiv 1707.06347; the mask is IcePop's, arXiv 2510.18855).

    The derivative [m, 1] is that of the value, so it is zero where the log-ratio is clamped.
    """
    stats = importance_ratio(logp, sampler_logp, advantage, options)
    ratio = stats["log_ratio"].exp()  # [m]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(*options.clip_range()) * advantage)  # [m]
    clamped = stats["log_ratio"].abs() == LOG_RATIO_BOUND  # [m]
    active = stats["kept"] & ~(stats["clipped_low"] | stats["clipped_high"] | clamped)  # [m]
    return -surrogate * stats["kept"], (-ratio * advantage * active)[:, None], stats


def score_centering(logp, sampler_logp, advantage, options: Objective):
    """Importance-weighted policy gradient minus its expectation under the sampler (arXiv 2609.20807).

    The expectation is subtracted at every term, also where the sampled token is masked: otherwise it would
    not be zero on average (tests/test_loss.py::test_the_centred_update_is_zero_on_average). The target need
    not be in the head, and the head is a function of the prefix alone. A term without a head is left with the
    plain policy gradient. Only the gradient means anything: the loss has no bound and compares with nothing.
    """
    stats = importance_ratio(logp, sampler_logp, advantage, options)
    weight = stats["log_ratio"].exp() * stats["kept"]  # [m]
    stats["sampler_mass"] = sampler_logp[:, 1:].exp().sum(1)  # [m]
    centre = centering_coefficients(
        logp[:, 1:], sampler_logp[:, 1:], stats["sampler_mass"], options
    )  # [m, K]
    coefficient = torch.cat([-weight[:, None], centre], dim=1) * advantage[:, None]  # [m, 1 + K]
    return (coefficient * logp.clamp(min=IMPOSSIBLE)).sum(1), coefficient, stats


def centering_coefficients(logp, sampler_logp, sampler_mass, options: Objective) -> torch.Tensor:
    """c_v [m, K] in the estimate  sum over v of mu(v) f(r(v)) s(v) = sum over the head of c_v s(v).

    logp, sampler_logp [m, K]: of the sampler's K most likely tokens; sampler_mass [m]: Q, their sum under mu.
    With f(r) = r inside the band and 0 outside, mu f(r) is pi inside the band. Outside the head mu is taken
    to be rho pi, rho = (1 - Q) / (1 - P) with P the head's mass under pi, so ratios there are 1 / rho; the
    scores of pi sum to zero, so the tail's part is minus the head's:

        c_v = pi(v) (inside(r(v)) - alpha),    alpha = inside(1 / rho)         "rescaled"
                                               alpha = 0, the tail is left out  "drop"

    "drop" pushes probability out of the head even when sampler and trainer agree
    (tests/test_loss.py::test_a_dropped_tail_moves_an_unchanged_policy).
    """
    p = logp.exp() * (sampler_logp > -math.inf)  # [m, K], 0 in a slot without a token
    inside = options.inside((logp - sampler_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))  # [m, K]
    if options.score_centering_tail == "drop":
        return p * inside
    tail_p, tail_q = 1 - p.sum(1), 1 - sampler_mass  # [m] each
    inverse_rho = tail_p.clamp(min=TAIL_FLOOR) / tail_q.clamp(min=TAIL_FLOOR)  # [m], 1 where both are empty
    return p * inside - p * options.inside(inverse_rho.log())[:, None]


# ------------------------------------------------------------------------------------------------------------
# Distillation


def teacher_support(ids, target, beta: float):
    """Which of a teacher's ids [M, K] (-1 = none), the most likely first, take part in the divergence.

    All of them at beta = 0, where the teacher weighs. Else only those that are in the list whatever the
    teacher thinks of them, its first and the actual token, and at beta = 1 the actual token alone. A term
    without any has no signal: it is in no loss and no divisor. numpy or torch.
    """
    actual = ids == target[:, None]
    if beta == 1:
        return actual
    named = ids >= 0
    if beta > 0:
        named[:, 1:] &= actual[:, 1:]
    return named


def generalised_jsd(logp, teacher_logp, options: Objective):
    """The generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649) on a sparse teacher support.

    logp, teacher_logp [m, K], -inf in the latter where a slot takes no part. With the tail bucket all other
    tokens are one more outcome, on both sides; without it both sides are renormalised over the slots. The
    ends of beta are cases of their own: the mixture's divergence goes to zero there. Returns the loss [m],
    d loss / d logp [m, K] and `signal` [m]: whether any slot took part. The loss is zero where none did.
    """
    valid = teacher_logp > -math.inf  # [m, K]
    student, teacher = torch.where(valid, logp.clamp(min=IMPOSSIBLE), -math.inf), teacher_logp  # [m, K]
    if options.add_tail_bucket:
        mass = student.logsumexp(1, keepdim=True)  # [m, 1], log
        student, teacher = with_tail(student), with_tail(teacher)  # [m, K + 1]
    else:
        student, teacher = student.log_softmax(1), teacher.log_softmax(1)  # NaN without any slot
    there = teacher > -math.inf  # [m, K (+ 1)]
    s, t = torch.where(there, student, 0.0), torch.where(there, teacher, 0.0)
    p, q, beta = there * s.exp(), there * t.exp(), options.beta
    if beta == 0:
        loss, slope = q * (t - s), -q
    elif beta == 1:
        loss, slope = p * (s - t), p * (s - t + 1)
    else:
        mixture = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
        slope = (1 - beta) * p * (s - mixture)
        loss = slope + beta * q * (t - mixture)
    if options.add_tail_bucket:  # its probability is 1 - the others', a constant where it was clamped
        through = torch.where(mass < TAIL_CEILING, slope[:, -1:] / p[:, -1:], 0.0)  # [m, 1]
        slope = slope[:, :-1] - through * p[:, :-1]  # [m, K]
    else:
        slope = slope - p * slope.sum(1, keepdim=True)
    signal = valid.any(1)  # [m]
    return torch.where(signal, loss.sum(1), 0.0), torch.where(valid, slope, 0.0), {"signal": signal}


def with_tail(logp):
    """logp [m, K] and the log of what is left of 1  [m, K + 1]"""
    mass = logp.logsumexp(1, keepdim=True).clamp(max=TAIL_CEILING)  # [m, 1]
    return torch.cat([logp, torch.log(-torch.expm1(mass))], dim=1)


# ------------------------------------------------------------------------------------------------------------
# The options of a loss


@dataclass(frozen=True)
class Objective:
    """What the loss of a row is: policy + distill_coef * divergence from a teacher, either left out at will.

    epsilon feeds the clipped surrogate, and in every objective the clip flags. Raises ValueError on a
    combination that means nothing.
    """

    policy: Callable | None = score_centering  # None = distillation alone
    score_centering_tail: str = "rescaled"  # or "drop"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None = epsilon
    clip_min: float | None = 0.5  # of the ratio; None or 0 = unbounded
    clip_max: float | None = 5.0
    distill_coef: float = 0.0  # 0 = no teacher
    beta: float = 0.5
    add_tail_bucket: bool = True
    teacher_temperature: float = 1.0  # of both sides of the divergence

    def __post_init__(self):
        if self.score_centering_tail not in ("rescaled", "drop"):
            raise ValueError(
                f"score_centering_tail is 'rescaled' or 'drop', not {self.score_centering_tail!r}"
            )
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta is {self.beta}; it must lie in [0, 1]")
        if self.beta == 1 and not self.add_tail_bucket:
            raise ValueError(
                "beta 1 without the tail bucket is no loss: the one token of its support is renormalised to 1"
            )
        if self.policy is None and self.distill_coef == 0:
            raise ValueError("an objective needs a policy loss, a distill_coef or both")

    def clip_range(self) -> tuple[float, float]:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, 1 + high

    def inside(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Whether the ratio lies in [clip_min, clip_max], both ends included; decided in log space."""
        low = math.log(self.clip_min) if self.clip_min else -math.inf
        high = math.inf if self.clip_max is None else math.log(self.clip_max)
        return log_ratio.clamp(low, high) == log_ratio


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
# Mixtures of experts


def router_coefficient(asked: float | None, config) -> float:
    """What the load balancing weighs: as asked, else the model's own. ValueError where nothing is routed."""
    own = getattr(config.get_text_config(), "router_aux_loss_coef", None)
    if own is None and asked is not None:
        raise ValueError(
            "this model routes nothing to experts, or balances them by other means; leave it out"
        )
    return own or 0.0 if asked is None else asked


def router_loss(router_logits, top_k: int) -> torch.Tensor:
    """Load balancing of experts (Switch, arXiv 2101.03961, eq. 4 to 6), the routers of all layers pooled.

    router_logits: L tensors [N, experts]. With f_e the share of tokens whose top_k experts hold e and p_e its
    mean probability: experts * sum of f_e p_e, which is top_k where the load is even. A token that samples
    share counts once.
    """
    p = torch.cat(list(router_logits)).float().softmax(1)  # [L N, experts]
    chosen = torch.zeros_like(p).scatter_(1, p.topk(top_k, dim=1).indices, 1.0)  # [L N, experts]
    return p.shape[1] * (chosen.mean(0) * p.mean(0)).sum()


# ------------------------------------------------------------------------------------------------------------
# The loss of a row


@dataclass(frozen=True)
class Part:
    """A loss as the fused head takes it: ids [M, J] at each term, at a temperature, and what scores them."""

    ids: torch.Tensor
    support: Support | None
    temperature: float
    score: Score


def row_loss(hidden: torch.Tensor, head: Head, row, objective: Objective, temperature: float):
    """The loss of a row, summed over its terms, and statistics per term.

    hidden [N, E] of any floating type; row: a packing.Row on hidden's device, of which the objective reads
    position, target, sampler_logp, advantage, candidate_ids with candidate_offsets (the set each target was
    sampled from), topk_ids with topk_logp, teacher_ids with teacher_logp.

    The sum is a scalar (float32; float64 for a float64 hidden) with gradients to hidden, head.weight and
    head.bias; a row without terms gives a zero with zero gradients. statistics, detached, [M]: entropy; of a
    policy objective logp, log_ratio (clamped), kept, clipped_low, clipped_high, support_unusable (a recorded
    set without its target: scored over the whole vocabulary) and, under score centering, sampler_mass; of
    distillation jsd and signal.

    Policy and distillation share one pass over the head where teacher_temperature is `temperature`, else each
    has its own, at twice the cost. The divergence is always over the whole vocabulary. Nothing here waits for
    the device, and nothing looks at the row's values: `check_row` does.
    """
    dtype = statistics_dtype(hidden)
    parts = []
    if objective.policy is not None:
        parts.append(policy_part(row, objective, temperature, len(head.weight), dtype))
    if objective.distill_coef != 0:
        parts.append(distill_part(row, objective, dtype))
    if len({part.temperature for part in parts}) < len(parts):
        parts = [joined(*parts)]
    passes = [fused_head(hidden, head, row, p.ids, p.support, p.temperature, p.score) for p in parts]
    stats = {}
    for _, found in reversed(passes):  # the entropy that stays is the policy's
        stats |= found
    return sum(total for total, _ in passes), stats


def policy_part(row, objective: Objective, temperature: float, vocabulary: int, dtype) -> Part:
    sampler_logp, advantage = row.sampler_logp.to(dtype)[:, None], row.advantage.to(dtype)  # [M, 1], [M]
    ids = row.target[:, None]  # int64 [M, J]
    if row.topk_ids is not None:
        ids = torch.cat([ids, row.topk_ids.long()], dim=1)
        sampler_logp = torch.cat([sampler_logp, row.topk_logp.to(dtype)], dim=1)  # [M, J]
    named, ids = ids >= 0, ids.clamp(min=0)  # [M, J]
    support, supported, unusable = support_of(row, ids, vocabulary)
    usable = named & supported  # bool [M, J]
    usable[:, 0] = True
    sampler_logp = torch.where(usable, sampler_logp, -math.inf)

    def score(terms: slice, logp: torch.Tensor):
        """logp [m, J]"""
        loss, k, stats = objective.policy(logp, sampler_logp[terms], advantage[terms], objective)
        if missing := logp.shape[1] - k.shape[1]:
            k = torch.nn.functional.pad(k, (0, missing))  # [m, J]
        return loss, k, {"logp": logp[:, 0], "support_unusable": unusable[terms], **stats}

    return Part(ids, support, temperature, score)


def distill_part(row, objective: Objective, dtype) -> Part:
    there = teacher_support(row.teacher_ids, row.target, objective.beta)  # bool [M, K]
    teacher_logp = torch.where(there, row.teacher_logp.to(dtype), -math.inf)  # [M, K]

    def score(terms: slice, logp: torch.Tensor):
        """logp [m, K]"""
        loss, k, stats = generalised_jsd(logp, teacher_logp[terms], objective)
        return objective.distill_coef * loss, objective.distill_coef * k, {"jsd": loss, **stats}

    return Part(row.teacher_ids.long().clamp(min=0), None, objective.teacher_temperature, score)


def joined(policy: Part, distill: Part) -> Part:
    """Both in one pass over the head; candidate sets hold for the policy's ids only."""
    width, more = policy.ids.shape[1], distill.ids.shape[1]
    support = policy.support
    if support is not None:
        support = replace(support, restricted=torch.nn.functional.pad(support.restricted, (0, more)))

    def score(terms: slice, logp: torch.Tensor):
        """logp [m, J + K]"""
        loss, k, stats = policy.score(terms, logp[:, :width])
        divergence, slope, more_stats = distill.score(terms, logp[:, width:])
        return loss + divergence, torch.cat([k, slope], dim=1), stats | more_stats

    return Part(torch.cat([policy.ids, distill.ids], dim=1), support, policy.temperature, score)


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
    support = Support(candidates, term, row.candidate_offsets, restricted[:, None].expand_as(ids))
    return support, listed | ~restricted[:, None], (sizes > 0) & ~listed[:, 0]


def check_row(row, vocabulary: int, objective: Objective) -> None:
    """To be called before a row is forwarded. Raises ValueError on a numpy row that cannot be scored:
    unordered terms, ids the head lacks, values of a sampler or teacher that are no log-probabilities, a
    distillation without a teacher."""
    if (np.diff(row.position) < 0).any():
        raise ValueError("the terms of a row must be sorted by position")
    named = {
        "token id": (row.input_ids, 0),
        "target": (row.target, 0),
        "candidate id": (row.candidate_ids, 0),
    }
    masses = {}
    if objective.policy is not None:
        named["id of the sampler's top-k"] = (row.topk_ids, -1)
        masses["sampler"] = [row.sampler_logp[:, None], row.topk_logp]
    if objective.distill_coef != 0:
        if row.teacher_ids is None:
            raise ValueError("distillation of a row that no teacher has scored: its samples lack teacher_ids")
        named["id of the teacher"] = (row.teacher_ids, -1)
        masses["teacher"] = [row.teacher_logp]
    for name, (ids, least) in named.items():
        for worst in () if ids is None or ids.size == 0 else (ids.min(), ids.max()):
            if not least <= worst < vocabulary:
                raise ValueError(
                    f"a {name} is {worst}, but the head has {vocabulary} rows: not the model that is trained?"
                )
    for name, tables in masses.items():
        for logp in tables:
            if logp is None or logp.size == 0:
                continue
            with np.errstate(over="ignore"):
                mass = np.exp(logp).sum(1).max()
            if not mass <= 1 + MASS_TOLERANCE:  # written so that NaN fails it
                raise ValueError(
                    f"by the {name}'s log-probabilities a probability is {mass:g}, above 1: not those it"
                    " sampled from? Start the server with --logprobs-mode processed_logprobs."
                )
