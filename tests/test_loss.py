"""Run: pytest tests/test_loss.py. The oracle is plain autograd on full logits, term by term, in float64."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loss
from head import Head, fused_head
from loss import Objective, clipped_surrogate, row_loss
from packing import Row

DATA = Path(__file__).parent / "data"
TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 2e-7}}
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
GRPO = Objective(clipped_surrogate)


def load(name):
    return json.loads((DATA / name).read_text())


def close(actual, expected, dtype=torch.float64, **tolerance):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, **(tolerance or TOLERANCE[dtype]))


def make_row(position, target, sampler_logp, advantage, topk=None, candidates=None, teacher=None):
    """topk, teacher: (ids [M, K], logp [M, K]); candidates: one list of ids per term, empty = all of them."""
    arrays = {"position": np.asarray(position, dtype=np.int64), "target": np.asarray(target, dtype=np.int64)}
    arrays |= {"sampler_logp": np.asarray(sampler_logp, dtype=np.float64)}
    arrays |= {"advantage": np.asarray(advantage, dtype=np.float64)}
    for name, table in (("topk", topk), ("teacher", teacher)):
        if table is not None:
            arrays[f"{name}_ids"] = np.asarray(table[0], dtype=np.int32)
            arrays[f"{name}_logp"] = np.asarray(table[1], dtype=np.float64)
    if candidates is not None:
        arrays["candidate_ids"] = np.array([*itertools.chain(*candidates)], dtype=np.int32)
        arrays["candidate_offsets"] = np.array([0, *itertools.accumulate(map(len, candidates))])
    return Row(*[None] * 5, **arrays, sample=None).to("cpu")


def from_logits(logits, dtype=torch.float64):
    """hidden and head whose logits are the given ones [N, V]: the identity times the logits as a weight.

    d loss / d logits is weight.grad.T, since hidden is the identity."""
    logits = torch.as_tensor(logits, dtype=dtype)
    weight = logits.T.contiguous().requires_grad_()  # [V, N]
    return torch.eye(len(logits), dtype=dtype), Head(weight)


def logit_gradient(logits, row, objective, temperature=1.0, dtype=torch.float64):
    """Loss, statistics and d loss / d raw logits [N, V]."""
    hidden, head = from_logits(logits, dtype)
    total, stats = row_loss(hidden, head, row, objective, temperature)
    total.backward()
    return total, stats, head.weight.grad.T


# The oracle -------------------------------------------------------------------------------------------------


def oracle(hidden, head, row, objective, temperature):
    """The objectives written term by term from their definitions, on full logits, for autograd: a sum over
    terms, whatever else stands at their positions."""
    low, high = objective.clip_min or 0.0, math.inf if objective.clip_max is None else objective.clip_max
    up = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    total, logps, entropies = hidden.sum() * 0, [], []
    for m in range(len(row.target)):
        y = hidden[row.position[m]] @ head.weight.T
        y = (y if head.bias is None else y + head.bias) * head.logit_scale
        if head.softcap is not None:
            y = head.softcap * torch.tanh(y / head.softcap)
        z, target, advantage = y / temperature, int(row.target[m]), row.advantage[m]
        full = z.log_softmax(-1)
        entropies.append(-(full.exp() * full).sum())
        support = set(range(len(z)))
        if row.candidate_ids is not None:
            listed = row.candidate_ids[row.candidate_offsets[m] : row.candidate_offsets[m + 1]].tolist()
            support = set(listed) if target in listed else support
        inside = torch.tensor([v in support for v in range(len(z))])
        logp = z.masked_fill(~inside, -math.inf).log_softmax(-1)
        logps.append(logp[target])
        ratio = (logp[target] - row.sampler_logp[m]).exp()
        kept = low <= ratio <= high
        if objective.policy is clipped_surrogate:
            clipped = ratio.clamp(1 - objective.epsilon, 1 + up)
            total = total - kept * torch.minimum(ratio * advantage, clipped * advantage)
            continue
        update = kept * ratio.detach() * logp[target]
        ids = [] if row.topk_ids is None else row.topk_ids[m].tolist()
        slots = [k for k, v in enumerate(ids) if v >= 0 and v in support]
        mu = {ids[k]: row.topk_logp[m, k].exp() for k in slots}
        p = {v: logp[v].exp().detach() for v in mu}
        rho = max(1 - sum(mu.values()), 1e-6) / max(1 - sum(p.values()), 1e-6)
        tail_weight = rho * (1 / rho) * (low <= 1 / rho <= high)
        if objective.score_centering_tail == "drop":
            tail_weight = 0.0
        for v in mu:
            r = p[v] / mu[v]
            update = update - (mu[v] * r * (low <= r <= high) - tail_weight * p[v]) * logp[v]
        total = total - advantage * update
    return total, torch.stack(logps), torch.stack(entropies)


def random_problem(seed, dtype=torch.float64, bias=True, softcap=None, scale=1.0, sets="mixed"):
    """10 positions, 14 terms (several on one position), vocabulary 23, K = 4 with padding."""
    make = torch.Generator().manual_seed(seed)
    positions, terms, vocabulary, width, k = 10, 14, 23, 6, 4
    hidden = torch.randn(positions, width, generator=make, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=make, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=make, dtype=torch.float64) if bias else None
    position = torch.randint(positions - 2, (terms,), generator=make).sort().values
    target = torch.randint(vocabulary, (terms,), generator=make)
    sampler = (hidden[position] @ weight.T * scale).div(0.9)
    sampler = (sampler + 0.8 * torch.randn(sampler.shape, generator=make, dtype=torch.float64)).log_softmax(
        -1
    )
    topk = sampler.topk(k, dim=1)
    topk_ids, topk_logp = topk.indices.clone(), topk.values.clone()
    topk_ids[3, 2:], topk_logp[3, 2:] = -1, -math.inf
    topk_ids[5], topk_logp[5] = -1, -math.inf  # the server sent no head for this one
    candidates = None
    if sets == "mixed":
        candidates = [sampler[m].topk(3 + m % 5).indices.tolist() for m in range(terms)]
        candidates = [c if m % 3 else [] for m, c in enumerate(candidates)]
        target[::2] = topk_ids[::2, 0].clamp(min=0)  # half of the targets surely in their set, the rest not
    advantage = torch.randn(terms, generator=make, dtype=torch.float64)
    sampled_logp = sampler.gather(1, target[:, None])[:, 0]
    row = make_row(position, target, sampled_logp, advantage, (topk_ids, topk_logp), candidates)
    parameters = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias) if x is not None]
    hidden, weight, bias = (*parameters, None)[:3]
    return hidden, Head(weight, bias, scale, softcap), row


def gradients(total, hidden, head):
    inputs = [x for x in (hidden, head.weight, head.bias) if x is not None]
    return torch.autograd.grad(total, inputs)


OBJECTIVES = {
    "surrogate": Objective(clipped_surrogate, epsilon_high=0.28),
    "unbounded surrogate": Objective(clipped_surrogate, clip_min=None, clip_max=None),
    "centred": Objective(clip_max=2.0),
    "centred, tail dropped": Objective(score_centering_tail="drop", clip_max=2.0),
    "centred, no mask": Objective(clip_min=0.0, clip_max=None),
}
HEADS = {
    "plain": {"bias": False},
    "bias": {"bias": True},
    "softcap": {"bias": True, "softcap": 3.0, "scale": 0.7},
    "scale": {"bias": False, "scale": 1.6},
}


@pytest.mark.parametrize("sets", ["mixed", "none"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_equal_autograd_on_full_logits(objective, head, sets):
    objective = OBJECTIVES[objective]
    for seed, temperature in ((0, 1.0), (1, 0.7)):
        hidden, head_, row = random_problem(seed, sets=sets, **HEADS[head])
        total, stats = row_loss(hidden, head_, row, objective, temperature)
        expected, logp, entropy = oracle(hidden, head_, row, objective, temperature)
        close(total, expected.item())
        close(stats["logp"], logp.tolist())
        close(stats["entropy"], entropy.tolist())
        for ours, theirs in zip(
            gradients(total, hidden, head_), gradients(expected, hidden, head_), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if "centred" in name])
def test_a_row_without_sampler_heads_is_plain_masked_importance_sampling(objective):
    hidden, head, row = random_problem(2)
    row.topk_ids = row.topk_logp = None
    total, stats = row_loss(hidden, head, row, OBJECTIVES[objective], 1.0)
    expected, _, _ = oracle(hidden, head, row, OBJECTIVES[objective], 1.0)
    close(total, expected.item())
    close(gradients(total, hidden, head)[1], gradients(expected, hidden, head)[1])
    assert (stats["sampler_mass"] == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_scored_in_float32(dtype, objective):
    objective = OBJECTIVES[objective]
    hidden, head, row = random_problem(3, dtype)
    wide = hidden.detach().double().requires_grad_()
    weight, bias = (x.detach().double().requires_grad_() for x in (head.weight, head.bias))
    wide_head = Head(weight, bias)
    total, stats = row_loss(hidden, head, row, objective, 0.8)
    expected, logp, entropy = oracle(wide, wide_head, row, objective, 0.8)
    assert total.dtype == stats["logp"].dtype == stats["entropy"].dtype == torch.float32
    close(total, expected.item(), rtol=1e-5, atol=1e-5)
    close(stats["logp"], logp.tolist(), rtol=1e-5, atol=3e-6)
    close(stats["entropy"], entropy.tolist(), rtol=1e-5, atol=3e-6)
    rounding = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for ours, theirs in zip(
        gradients(total, hidden, head), gradients(expected, wide, wide_head), strict=True
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=rounding, atol=1e-5)


def surrogate_of(logp, mu, advantage, objective):
    """The clipped surrogate of terms with one id each, all [m]."""
    value, slope, stats = clipped_surrogate(logp[:, None], mu[:, None], advantage, objective)
    return value, slope[:, 0], stats


def clipped_as(given, low="epsilon", clip="clip"):
    """The surrogate with the bounds of a case"""
    bounds = {"epsilon": given[low], "epsilon_high": given["epsilon_high"]}
    return Objective(
        clipped_surrogate, **bounds, clip_min=given[f"{clip}_min"], clip_max=given[f"{clip}_max"]
    )


# Reference values -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("sign", ["pos", "neg"])
def test_clipped_surrogate_matches_the_reference(sign, dtype):
    clip = load("reference/surrogate.json")["clip"]
    case = clip["per_token"][sign]
    objective = clipped_as(clip, "epsilon_low", "c")
    logp, mu = (torch.tensor(case[name], dtype=dtype) for name in ("logp", "old_logp"))
    value, slope, stats = surrogate_of(logp, mu, torch.full_like(logp, case["advantage"]), objective)
    close(stats["log_ratio"].exp(), case["ratio"], dtype)
    close(value, case["loss"], dtype)
    close(slope, case["dloss_dlogp"], dtype)
    assert stats["kept"].tolist() == case["kept"]
    assert stats["clipped_low"].tolist() == case["low_clipped"]
    assert stats["clipped_high"].tolist() == case["high_clipped"]


def test_microbatch_normalisation_matches_the_reference():
    surrogate = load("reference/surrogate.json")
    case, clip = surrogate["normalisation"], surrogate["clip"]
    objective = clipped_as(clip, "epsilon_low", "c")
    divisor = loss.step_divisor("microbatch", 12, len(case["micro_batches"]))
    step_loss = 0.0
    for batch in case["micro_batches"]:
        weight = loss.microbatch_weight("microbatch", batch["n_global"])
        for rank in batch["ranks"]:
            tensors = [torch.tensor(rank[x], dtype=torch.float64) for x in ("logp", "old_logp", "advantage")]
            value, slope, _ = surrogate_of(*tensors, objective)
            close(value, rank["loss"])
            close(slope, rank["dloss_dlogp"])
            close(slope * weight / divisor, rank["grad_after_allreduce_mean"])
            local = (
                value.sum() * weight / divisor
            )  # summed over ranks; the reference averages, hence its factor
            close(local * case["world_size"], rank["local_scaled_loss"])
            step_loss += local.item()
    assert step_loss == pytest.approx(case["step_loss"], rel=1e-12)


CENTERING = load("reference/score_centering.json")
CENTERING_CASES = [
    pytest.param(c, id=f"{c['c_min']}-{c['c_max']}-K{c['k']}-{c['tail']}") for c in CENTERING["cases"]
]


def centred(case, tail):
    """A 'none' case is a term without a head: plain masked importance sampling."""
    tail = "rescaled" if tail == "none" else tail
    return Objective(score_centering_tail=tail, clip_min=case["c_min"], clip_max=case["c_max"])


@BOTH
@pytest.mark.parametrize("case", CENTERING_CASES)
def test_score_centering_matches_the_reference_for_every_draw(case, dtype):
    mean = torch.zeros(5, dtype=torch.float64)
    for draw in case["per_sampled_token"]:
        a = draw["sampled"]
        head_ids = [] if case["tail"] == "none" else case["head_ids"]
        head_logmu = [] if case["tail"] == "none" else case["head_logmu"]
        row = make_row(
            [0], [a], [math.log(CENTERING["mu"][a])], [case["advantage"]], ([head_ids], [head_logmu])
        )
        total, stats, grad = logit_gradient(
            [CENTERING["logits"]], row, centred(case, case["tail"]), dtype=dtype
        )
        close(total, draw["loss"], dtype)
        close(grad[0], draw["grad_logits"], dtype)
        close(stats["sampler_mass"], [sum(math.exp(x) for x in head_logmu)], dtype)
        mean += CENTERING["mu"][a] * grad[0].double()
    close(mean, case["expected_grad_under_sampler"], dtype)


@BOTH
@pytest.mark.parametrize("tail", ["rescaled", "drop"])
def test_a_batch_of_centred_terms_matches_the_reference(tail, dtype):
    batch = CENTERING["batch"]
    mu = [[float(x) for x in line] for line in batch["head_logmu"]]
    row = make_row(
        range(5), batch["sampled"], batch["sampled_logmu"], batch["advantages"], (batch["head_ids"], mu)
    )
    total, stats, grad = logit_gradient(batch["logits"], row, centred(batch, tail), dtype=dtype)
    close(total, sum(batch["losses"][tail]), dtype)
    close(grad, batch["grads"][tail], dtype)
    close(stats["logp"], batch["logp_sampled"], dtype)
    close(stats["log_ratio"].exp(), batch["ratio"], dtype)
    close(stats["sampler_mass"], batch["sampler_mass"], dtype)


@BOTH
def test_score_centering_on_a_restricted_support_matches_the_reference(dtype):
    case = CENTERING["restricted_support"]
    support, logmu = case["support"], case["logmu_support"]
    mean = torch.zeros(5, dtype=torch.float64)
    for draw in case["rows"]:
        a = support.index(draw["sampled"])
        row = make_row([0], [draw["sampled"]], [logmu[a]], [1.0], ([support], [logmu]), [support])
        objective = Objective(clip_min=0.5, clip_max=2.0)
        total, stats, grad = logit_gradient([CENTERING["logits"]], row, objective, dtype=dtype)
        close(stats["logp"], [case["logp_support"][a]], dtype)
        close(total, draw["loss"], dtype)
        close(grad[0], draw["grad_logits"], dtype)
        mean += math.exp(logmu[a]) * grad[0].double()
    assert mean.abs().max() < (1e-15 if dtype == torch.float64 else 1e-7)


# Cases from public fault reports ----------------------------------------------------------------------------


LOGPROB = load("cases/A07_logprob_definition.json")


@pytest.mark.parametrize("case", LOGPROB["given"]["cases"], ids=lambda case: case["name"])
def test_log_probability_follows_temperature_and_candidate_set(case):
    want = LOGPROB["expect"][case["name"]]
    dtype = torch.bfloat16 if case.get("dtype") == "bfloat16" else torch.float32
    logits = [case.get("logits", LOGPROB["given"]["logits"])]
    # advantage -1 and mu = pi: the gradient is that of log pi
    row = make_row([0], [case["target"]], [want["logp"]], [-1.0], candidates=[case["S"] or []])
    total, stats, grad = logit_gradient(logits, row, GRPO, case["T"], dtype)
    close(stats["logp"], [want["logp"]], atol=want.get("tolerance", 1e-6), rtol=0)
    close(stats["log_ratio"].exp(), [1.0], atol=1e-5, rtol=0)
    assert grad.isfinite().all()
    if "grad_logits" in want:
        close(grad[0], want["grad_logits"], atol=2e-6, rtol=0)


@pytest.mark.parametrize("advantage", [1, -1])
def test_a_ratio_outside_the_band_has_no_loss_but_stays_in_the_divisor(advantage):
    case = load("cases/A09_masked_importance_and_clip.json")
    given, want = case["given"], case["expect"]
    side = want["advantage_plus_1" if advantage > 0 else "advantage_minus_1"]
    objective = clipped_as(given)
    logp, mu = (torch.tensor(given[x], dtype=torch.float64) for x in ("log_probs", "old_log_probs"))
    value, slope, stats = surrogate_of(logp, mu, torch.full_like(mu, advantage), objective)
    close(value, side["per_token"], atol=1e-5, rtol=0)
    scale = loss.microbatch_weight("step", 5) / loss.step_divisor("step", 5, 1)
    close(value.sum() * scale, side["loss"], atol=1e-5, rtol=0)
    close(slope * scale, side["grad_wrt_logp"], atol=1e-5, rtol=0)
    assert (~stats["kept"]).double().mean() == want["masked_mean"]
    assert stats["log_ratio"].abs().mean().item() == pytest.approx(want["sampling_logp_difference_mean"])
    assert stats["log_ratio"].exp().mean().item() == pytest.approx(want["importance_sampling_ratio_mean"])


def summed_gradient(microbatches, normalization):
    """d step loss / d theta with gradients summed over ranks, as train.py does it."""
    gradient, tokens = 0.0, 0
    for ranks in microbatches:
        count = sum(map(len, ranks))
        gradient += sum(map(sum, ranks)) * loss.microbatch_weight(normalization, count)
        tokens += count
    return gradient / loss.step_divisor(normalization, tokens, len(microbatches))


def test_unequal_trained_token_counts_are_normalised_over_all_ranks():
    case = load("cases/A10_token_normalisation.json")
    batches = [[b["rank0"], b["rank1"]] for b in case["given"]["coefficients_per_micro_batch"]]
    expected = case["expect"]["gradient_on_every_rank"]
    assert summed_gradient(batches, "microbatch") == pytest.approx(expected, abs=1e-6)
    pooled = case["expect"]["wrong_values_seen"]["one pooled mean over the step"]  # the rule of "step"
    assert summed_gradient(batches, "step") == pytest.approx(pooled, abs=1e-6)


def test_step_normalisation_does_not_depend_on_packing():
    tokens = [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 10.0, 6.0]
    packings = [[tokens, []]], [[tokens[:1], []], [tokens[1:4], tokens[4:]]], [[[t], []] for t in tokens]
    assert [summed_gradient(packing, "step") for packing in packings] == pytest.approx([4.5, 4.5, 4.5])
    assert [summed_gradient(packing, "microbatch") for packing in packings] == pytest.approx([4.5, 3.0, 4.5])


def test_an_empty_step_divides_by_one():
    assert loss.microbatch_weight("microbatch", 0) == 1.0
    assert loss.step_divisor("step", 0, 3) == 1
    with pytest.raises(ValueError, match="loss_normalization"):
        loss.microbatch_weight("sample", 3)


def test_the_expected_score_is_subtracted_at_every_term():
    case = load("cases/A11_score_centering.json")
    given, want = case["given"]["full_coverage"], case["expect"]["full_coverage"]
    logits, logmu = [[math.log(x) for x in given["p"]]], [math.log(x) for x in given["q"]]
    mean = torch.zeros(3, dtype=torch.float64)
    for a in given["sampled"]:
        row = make_row([0], [a], [logmu[a]], [given["A"]], ([given["listed_tokens"]], [logmu]))
        _, stats, grad = logit_gradient(logits, row, Objective())
        weight = stats["log_ratio"].exp() * stats["kept"]
        close(weight, [want["weights"][a]], atol=1e-6, rtol=0)
        close(grad[0], want["grad_logits_by_sampled_token"][a], atol=1e-6, rtol=0)
        mean += given["q"][a] * grad[0]
    close(mean, want["q_weighted_mean_of_these_gradients"], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "tail"), [("all_in_band", "rescaled"), ("all_in_band", "drop"), ("partial_coverage", "drop")]
)
def test_centred_gradient_of_the_worked_cases(name, tail):
    case = load("cases/A11_score_centering.json")
    given, want = case["given"][name], case["expect"][name]
    ids, a = given["listed_tokens"], given["sampled"]
    logmu = [math.log(x) for x in given["q"]]
    row = make_row([0], [a], [logmu[a]], [given["A"]], ([ids], [[logmu[v] for v in ids]]))
    logits = [[math.log(x) for x in given["p"]]]
    _, stats, grad = logit_gradient(logits, row, Objective(score_centering_tail=tail))
    close(grad[0], want["grad_logits"], atol=1e-6, rtol=0)
    if "sampler_mass" in want:
        close(stats["sampler_mass"], [want["sampler_mass"]], atol=1e-6, rtol=0)


# Distillation -----------------------------------------------------------------------------------------------


JSD = load("reference/jsd.json")
JSD_CASES = [
    pytest.param(c, id=f"{c['beta']}-{c['support']}-{'tail' if c['add_tail_bucket'] else 'no tail'}")
    for c in JSD["cases"]
]


def distilled(logits, ids, teacher_logp, valid, options, temperature, dtype):
    """Divergence of every term and d sum / d raw logits, whatever the support."""
    hidden, head = from_logits(logits, dtype)
    row = make_row(range(len(ids)), [0] * len(ids), [0.0] * len(ids), [0.0] * len(ids))
    teacher = torch.tensor([[float(x) for x in line] for line in teacher_logp], dtype=dtype)
    teacher = torch.where(torch.tensor(valid), teacher, -math.inf)

    def score(terms, logp):
        value, slope, stats = loss.generalised_jsd(logp, teacher[terms], options)
        return value, slope, {"jsd": value, **stats}

    total, stats = fused_head(hidden, head, row, torch.tensor(ids).clamp(min=0), None, temperature, score)
    total.backward()
    return stats, head.weight.grad.T


@BOTH
@pytest.mark.parametrize("case", JSD_CASES)
def test_generalised_jsd_matches_the_reference(case, dtype):
    used = case["support_used"]
    options = SimpleNamespace(beta=case["beta"], add_tail_bucket=case["add_tail_bucket"])
    tables = [[line[name] for line in used] for name in ("ids", "teacher_logp", "mask")]
    stats, grad = distilled(JSD["student_logits"], *tables, options, JSD["temperature"], dtype)
    assert stats["signal"].tolist() == [value is not None for value in case["loss"]]
    scale = {} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    close(stats["jsd"], [value or 0.0 for value in case["loss"]], dtype, **scale)
    close(grad, case["grad_logits"], dtype, **scale)


@pytest.mark.parametrize("case", [c for c in JSD_CASES if "narrow" in c.id and c.id != "1.0-narrow-no tail"])
def test_above_beta_0_only_the_first_and_the_actual_token_count(case):
    teacher_logp = [[float(x) for x in line] for line in JSD["teacher_logp"]]
    args = (range(5), JSD["actual_token"], [-1.0] * 5, [0.0] * 5)
    row = make_row(*args, teacher=(JSD["teacher_ids"], teacher_logp))
    tail, temperature = case["add_tail_bucket"], JSD["temperature"]
    objective = Objective(None, distill_coef=1.0, beta=case["beta"], add_tail_bucket=tail)
    objective = dataclasses.replace(objective, teacher_temperature=temperature)
    total, stats, grad = logit_gradient(JSD["student_logits"], row, objective, 1.0)
    close(total, case["sum"])
    close(grad, case["grad_logits"])
    assert stats["signal"].tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("name", ["beta_0", "beta_0.25", "beta_0.5", "beta_1", "beta_0.25_actual_is_top1"])
def test_divergence_of_the_worked_case(name):
    case = load("cases/A12_generalised_jsd.json")
    given, actual = case["given"], 0 if name.endswith("top1") else 2
    ids, logp = zip(*((int(k), v) for k, v in given["teacher_reported"].items()), strict=True)
    if actual == 0:  # the actual token is appended only where the top 2 lack it
        ids, logp = ids[:2], logp[:2]
    row = make_row([0], [actual], [-1.0], [0.0], teacher=([ids], [logp]))
    objective = Objective(None, distill_coef=1.0, beta=float(name.split("_")[1]))
    _, stats, _ = logit_gradient([given["student_logits"]], row, objective)
    close(stats["jsd"], [case["expect"][name]], atol=1e-6, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("student", [-math.inf, 0.0])
def test_a_student_that_is_certain_has_a_finite_divergence(student, beta):
    """Of a token it never says, or of one it always says: the tail has nothing left then."""
    logp = torch.tensor([[student, -30.0]], dtype=torch.float64)
    options = Objective(None, distill_coef=1.0, beta=beta)
    value, slope, _ = loss.generalised_jsd(logp, torch.tensor([[-0.1, -3.0]]).double(), options)
    assert value.isfinite().all() and slope.isfinite().all() and value > 0


@pytest.mark.parametrize("beta", load("cases/A12_generalised_jsd.json")["given"]["rejected_betas"])
def test_beta_outside_its_range_is_refused(beta):
    with pytest.raises(ValueError, match="beta"):
        Objective(None, distill_coef=1.0, beta=beta)


def test_objectives_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="tail bucket"):
        Objective(None, distill_coef=1.0, beta=1.0, add_tail_bucket=False)
    with pytest.raises(ValueError, match="distill_coef"):
        Objective(None)


def with_teacher(row, vocabulary=23):
    """The row with a teacher's lists: 3 tokens and the target, none at the second term."""
    make = torch.Generator().manual_seed(1)
    logp = torch.randn(row.terms, vocabulary, generator=make, dtype=torch.float64).log_softmax(1)
    top = logp.topk(3, dim=1).indices
    actual = torch.where((top == row.target[:, None]).any(1), -1, row.target)
    ids = torch.cat([top, actual[:, None]], dim=1)
    ids[1] = -1
    teacher_logp = logp.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -math.inf)
    arrays = {"teacher_ids": ids.int().numpy(), "teacher_logp": teacher_logp.numpy()}
    return dataclasses.replace(row.host, **arrays).to("cpu")


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("teacher_temperature", [0.9, 1.2])
def test_policy_and_distillation_add_up(teacher_temperature, beta, monkeypatch):
    """In one pass over the head at one temperature, in two at two; candidate sets are the policy's only."""
    passes = []
    monkeypatch.setattr(loss, "fused_head", lambda *a: passes.append(a) or fused_head(*a))
    hidden, head, row = random_problem(12, softcap=3.0)
    row = with_teacher(row)
    settings = {"distill_coef": 0.5, "beta": beta, "teacher_temperature": teacher_temperature}
    both, policy, distill = Objective(**settings), Objective(), Objective(None, **settings)
    total, stats = row_loss(hidden, head, row, both, 0.9)
    assert len(passes) == (1 if teacher_temperature == 0.9 else 2)
    together = [total, *gradients(total, hidden, head)]
    apart, figures = [], {}
    for objective in (distill, policy):
        total, found = row_loss(hidden, head, row, objective, 0.9)
        apart.append([total, *gradients(total, hidden, head)])
        figures |= found
    for whole, *parts in zip(together, *apart, strict=True):
        torch.testing.assert_close(whole, sum(parts), rtol=1e-9, atol=1e-11)
    assert stats.keys() == figures.keys() and not stats["signal"][1] and stats["jsd"][1] == 0
    for name, values in figures.items():
        torch.testing.assert_close(stats[name], values)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradients_are_those_of_finite_differences(beta):
    """Of the losses whose value is what is differentiated: the surrogate and the divergence."""
    hidden, head, row = random_problem(13, softcap=3.0, scale=0.7)
    row = with_teacher(row)
    objective = Objective(clipped_surrogate, epsilon_high=0.28, distill_coef=0.7, beta=beta)
    total, _ = row_loss(hidden, head, row, objective, 0.8)
    slopes = gradients(total, hidden, head)
    make = torch.Generator().manual_seed(0)
    inputs = [hidden, head.weight, head.bias]
    for n, slope in enumerate(slopes):
        direction = torch.randn(slope.shape, generator=make, dtype=torch.float64)
        values = []
        for step in (1e-5, -1e-5):
            moved = [x.detach() + step * direction if i == n else x.detach() for i, x in enumerate(inputs)]
            shifted = dataclasses.replace(head, weight=moved[1], bias=moved[2])
            values.append(row_loss(moved[0], shifted, row, objective, 0.8)[0])
        assert (slope * direction).sum().item() == pytest.approx(
            (values[0] - values[1]).item() / 2e-5, rel=1e-6
        )


# Properties -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_an_unchanged_policy_has_the_plain_policy_gradient(k):
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp = logits.log_softmax(-1)
    target, advantage = torch.tensor([0, 3, 6, 2, 2, 5]), torch.linspace(-1, 2, 6, dtype=torch.float64)
    mu = logp.gather(1, target[:, None])[:, 0]
    row = make_row(range(6), target, mu, advantage, _topk(logp, k))
    plain = advantage[:, None] * (logp.exp() - torch.nn.functional.one_hot(target, 7))
    for objective in (Objective(), GRPO):
        _, stats, grad = logit_gradient(logits, row, objective)
        assert stats["kept"].all() and not stats["clipped_low"].any() and not stats["clipped_high"].any()
        close(grad, plain)


SAMPLINGS = {
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_k": 20, "top_p": 0.8},
    "min-p": {"top_k": 20, "min_p": 0.1},
    "soft-cap": {"softcap": 3.0, "temperature": 1.3},
    "everything": {"softcap": 4.0, "temperature": 0.7, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
}


@BOTH
@pytest.mark.parametrize("objective", [GRPO, Objective()])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_unchanged_policy_has_ratio_one(sampling, objective, dtype):
    """The sampler's order: soft-cap, temperature, top-k, top-p, min-p, then renormalised."""
    asked = SAMPLINGS[sampling]
    hidden, head, row = random_problem(14, dtype, sets="none", softcap=asked.get("softcap"))
    temperature = asked.get("temperature", 1.0)
    y = (hidden.detach() @ head.weight.detach().T + head.bias.detach()).double()
    y = y if head.softcap is None else head.softcap * torch.tanh(y / head.softcap)
    p, order = (y[row.position] / temperature).softmax(1).sort(dim=1, descending=True)
    kept = torch.arange(23).expand_as(p) < asked.get("top_k", 23)
    kept = kept & ((p * kept).cumsum(1) - p < asked.get("top_p", 1.0) * (p * kept).sum(1, keepdim=True))
    kept = kept & (p >= asked.get("min_p", 0.0) * p[:, :1])
    sets = [order[m][kept[m]].tolist() for m in range(len(p))]
    mu = torch.where(kept, p, 0.0)
    mu = (mu / mu.sum(1, keepdim=True)).log()
    drawn = torch.tensor([m % len(s) for m, s in enumerate(sets)])[:, None]
    target, sampled = (x.gather(1, drawn)[:, 0] for x in (order, mu))
    restricted = "top_k" in asked
    args = (row.position, target, sampled, row.advantage, (order[:, :4], mu[:, :4]))
    row = make_row(*args, candidates=sets if restricted else None)
    _, stats = row_loss(hidden, head, row, objective, temperature)
    close(stats["log_ratio"], torch.zeros(len(p)), atol=1e-12 if dtype == torch.float64 else 2e-6, rtol=0)
    assert stats["kept"].all() and not stats["support_unusable"].any()


def test_the_objective_of_the_readme_runs():
    """Its gradient is A times the ratio, bounded, times that of log pi, whatever the ratio."""
    snippet = re.search(r"```python\n(def cispo.*?)```", (DATA.parent.parent / "README.md").read_text(), re.S)
    space = dict(vars(loss))
    exec(snippet[1], space)
    row = make_row([0, 1], [1, 2], [-9.0, -1.2], [2.0, -1.0])
    logits = [[0.0, 1.0, 2.0], [0.5, 0.2, 0.1]]
    _, stats, grad = logit_gradient(logits, row, Objective(space["cispo"], epsilon_high=0.28))
    logp = torch.tensor(logits, dtype=torch.float64).log_softmax(1)
    ratio = (logp[[0, 1], [1, 2]] - row.sampler_logp).exp().clamp(max=1.28)
    slope = -ratio * torch.tensor([2.0, -1.0])
    close(grad, slope[:, None] * (torch.nn.functional.one_hot(torch.tensor([1, 2]), 3) - logp.exp()))
    assert stats["clipped_high"].tolist() == [True, False]


def _topk(logp, k):
    top = logp.topk(k, dim=1)
    return top.indices, top.values


@pytest.mark.parametrize("band", [(0.5, 2.0), (0.8, 1.25), (None, None)])
@pytest.mark.parametrize("candidates", [None, [0, 2, 3, 5]])
def test_the_centred_update_is_zero_on_average(band, candidates):
    """Every draw of the sampler enumerated, its head covering its whole support; masked draws included."""
    make = torch.Generator().manual_seed(1)
    logits, sampler = torch.randn(2, 7, generator=make, dtype=torch.float64)
    support = list(range(7)) if candidates is None else candidates
    logmu = sampler[support].log_softmax(-1)
    mean, masked = torch.zeros(7, dtype=torch.float64), 0
    for a, v in enumerate(support):
        sets = None if candidates is None else [candidates]
        row = make_row([0], [v], logmu[a : a + 1], [1.3], (torch.tensor([support]), logmu[None]), sets)
        objective = Objective(clip_min=band[0], clip_max=band[1])
        _, stats, grad = logit_gradient(logits[None], row, objective)
        mean += logmu[a].exp() * grad[0]
        masked += int(~stats["kept"])
    assert mean.abs().max() < 1e-15
    assert masked == 0 if band[0] is None else masked > 0


def test_a_dropped_tail_moves_an_unchanged_policy():
    logits = torch.tensor([[1.2, 0.4, -0.3, 0.1, -1.5]], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    norms = {}
    for tail in ("rescaled", "drop"):
        mean = torch.zeros(5, dtype=torch.float64)
        for a in range(5):
            row = make_row([0], [a], logp[0, a : a + 1], [1.0], _topk(logp, 2))
            mean += logp[0, a].exp() * logit_gradient(logits, row, Objective(score_centering_tail=tail))[2][0]
        norms[tail] = mean.norm().item()
    assert norms["rescaled"] < 1e-15
    assert norms["drop"] > 0.1


def test_a_set_without_its_target_means_the_whole_vocabulary_and_is_counted():
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    args = ([0, 1], [4, 5], [-1.0, -1.0], [1.0, -1.0])
    _, stats, grad = logit_gradient(logits, make_row(*args, candidates=[[1, 2], [5, 6]]), GRPO)
    _, expected, expected_grad = logit_gradient(logits, make_row(*args, candidates=[[], [5, 6]]), GRPO)
    assert stats["support_unusable"].tolist() == [True, False]
    assert not expected["support_unusable"].any()
    close(stats["logp"], expected["logp"])
    close(grad, expected_grad)


def test_every_objective_reports_clip_flags_of_all_terms():
    hidden, head, row = random_problem(5)
    by_objective = [row_loss(hidden, head, row, o, 1.0)[1] for o in (GRPO, Objective())]
    for name in ("kept", "log_ratio", "clipped_low", "clipped_high"):
        assert torch.equal(by_objective[0][name], by_objective[1][name])
    assert by_objective[0]["clipped_low"].any() and by_objective[0]["clipped_high"].any()
    assert "sampler_mass" in by_objective[1] and "sampler_mass" not in by_objective[0]
    outside = ~by_objective[0]["kept"]
    assert (outside & (by_objective[0]["clipped_low"] | by_objective[0]["clipped_high"])).any()


@pytest.mark.parametrize("objective", [GRPO, Objective(), Objective(clip_min=None, clip_max=None)])
@pytest.mark.parametrize("broken", [-math.inf, -1e30, -60.0])
def test_a_broken_sampler_log_probability_stays_finite(broken, objective):
    row = make_row([0, 1], [1, 2], [broken, -1.0], [1.0, 1.0])
    total, stats, grad = logit_gradient(torch.zeros(2, 4).tolist(), row, objective)
    assert total.isfinite() and grad.isfinite().all()
    assert stats["log_ratio"][0] == 20.0
    assert stats["kept"].tolist() == [objective.clip_max is None, True]


def test_a_clamped_ratio_pushes_nothing():
    """Without a mask, A < 0 and a ratio past e^20 would otherwise have a gradient of e^20."""
    row = make_row([0], [1], [-60.0], [-1.0])
    total, _, grad = logit_gradient(
        [[0.0, 1.0]], row, Objective(clipped_surrogate, clip_min=None, clip_max=None)
    )
    assert total.item() == pytest.approx(math.exp(20)) and (grad == 0).all()


def test_a_head_token_of_probability_zero_is_padding():
    args = ([0], [1], [-1.0], [1.0])
    logits = [[0.0, 1.0, 2.0, -1.0]]
    zero = logit_gradient(logits, make_row(*args, ([[1, 3]], [[-0.1, -math.inf]])), OBJECTIVES["centred"])[2]
    padding = logit_gradient(
        logits, make_row(*args, ([[1, -1]], [[-0.1, -math.inf]])), OBJECTIVES["centred"]
    )[2]
    assert torch.equal(zero, padding)


def test_a_masked_term_has_no_gradient_at_all():
    row = make_row([0], [1], [-9.0], [2.0])
    for objective in (GRPO, Objective()):
        total, stats, grad = logit_gradient([[0.0, 1.0, 2.0]], row, objective)
        assert total == 0 and (grad == 0).all() and not stats["kept"].any() and len(stats["kept"]) == 1


# Refusals ---------------------------------------------------------------------------------------------------


def score(row, objective=None):
    objective = objective or Objective()
    loss.check_row(row.host, 5, objective)
    return logit_gradient(torch.zeros(2, 5).tolist(), row, objective)


def test_ids_beyond_the_head_are_refused_with_both_numbers():
    good = {"position": [0, 1], "target": [1, 2], "sampler_logp": [-1.0, -1.0], "advantage": [1.0, 1.0]}
    with pytest.raises(ValueError, match="target is 5, .*5 rows"):
        score(make_row(**(good | {"target": [1, 5]})))
    with pytest.raises(ValueError, match="target is -1, "):
        score(make_row(**(good | {"target": [-1, 2]})))
    with pytest.raises(ValueError, match="token id is 9, .*5 rows"):
        loss.check_row(dataclasses.replace(make_row(**good).host, input_ids=np.array([9, 1])), 5, Objective())
    with pytest.raises(ValueError, match="candidate id is 7, .*5 rows"):
        score(make_row(**good, candidates=[[1, 7], []]))
    teacher = ([[0], [6]], [[-1.0], [-1.0]])
    with pytest.raises(ValueError, match="teacher is 6, .*5 rows"):
        score(make_row(**good, teacher=teacher), Objective(distill_coef=1.0))
    with pytest.raises(ValueError, match="no teacher has scored"):
        score(make_row(**good), Objective(distill_coef=1.0))
    with pytest.raises(ValueError, match="top-k is 9, .*5 rows"):
        score(make_row(**good, topk=([[0], [9]], [[-1.0], [-1.0]])))


@pytest.mark.parametrize("broken", [0.01, 300.0, 1000.0, math.nan])
def test_sampler_values_that_are_no_log_probabilities_are_refused(broken):
    args = ([0, 1], [1, 2])
    with pytest.raises(ValueError, match="processed_logprobs"):
        score(make_row(*args, [broken, -1.0], [1.0, 1.0]))
    with pytest.raises(ValueError, match="processed_logprobs"):
        score(make_row(*args, [-1.0, -1.0], [1.0, 1.0], ([[0, 1]] * 2, [[-0.5, -9.0], [-0.5, broken]])))
    rounding = [[math.log(0.5) + 1e-5, math.log(0.5)]] * 2
    score(make_row(*args, [1e-5, -1.0], [1.0, 1.0], ([[0, 1]] * 2, rounding)))


def test_unordered_terms_are_refused():
    with pytest.raises(ValueError, match="sorted"):
        score(make_row([1, 0], [1, 2], [-1.0, -1.0], [1.0, 1.0]))


def test_an_unknown_tail_is_refused():
    with pytest.raises(ValueError, match="score_centering_tail"):
        Objective(score_centering_tail="truncate")
