"""Claims about conversation.py: messages to tokens and back, and turns to samples.

Run: pytest tests/test_conversation.py
"""

import numpy as np
import pytest
from cases import case
from hypothesis import given, settings
from hypothesis import strategies as st

from conversation import Rollout, RolloutError, Turn, samples_of

# ---- turns -> samples


def turn(prompt, output, **more) -> Turn:
    return Turn(prompt, output, [-0.1 * (i + 1) for i in range(len(output))], **more)


def samples(*turns, version=3):
    return samples_of(Rollout([], [], list(turns), rollout_id=5), group_id=1, row_index=0, version=version)


def test_rerendered_history_starts_a_new_sample():
    given, expect = case("A04_rerendered_history")["given"], case("A04_rerendered_history")["expect"]
    turns = [Turn(t["prompt_ids"], t["output_ids"], t["output_log_probs"]) for t in given["turns"]]
    made, drift = samples(*turns)
    assert len(made) == expect["samples_per_rollout"]
    for sample, wanted in zip(made, expect["samples"], strict=True):
        assert sample.input_ids.tolist() == wanted["input_ids"]
        assert sample.trained.astype(int).tolist() == wanted["completion_mask"]
        np.testing.assert_allclose(sample.sampler_logp, wanted["old_log_probs"], atol=1e-7)
    assert drift == [expect["drift_tokens_max"]]
    assert sum(int(s.trained.sum()) for s in made) == expect["trained_tokens_total"]


def test_turn_that_repeats_all_held_tokens_continues_the_sample():
    (sample,), drift = samples(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9, 9], [5, 6]))
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 9, 9, 5, 6]
    assert sample.trained.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert drift == [0] and sample.rollout_id == 5 and sample.group_id == 1


def test_one_token_of_drift_is_enough_to_fork():
    made, drift = samples(turn([1, 2], [3, 4]), turn([1, 2, 3, 7, 9], [5]))
    assert len(made) == 2 and drift == [1]


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.lists(st.integers(0, 3), min_size=1), st.lists(st.integers(0, 3), min_size=1)
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_every_generated_token_is_trained_in_exactly_one_sample(plan):
    turns, held = [], []
    for continues, context, output in plan:
        prompt = held + context if continues else context
        turns.append(turn(prompt, output))
        held = prompt + output
    made, drift = samples(*turns)
    trained = [token for s in made for token in s.input_ids[s.trained].tolist()]
    assert trained == [token for t in turns for token in t.output_ids]
    assert len(drift) == len(turns) - 1 and len(made) == 1 + sum(d > 0 for d in drift)


def test_masked_tokens_are_context_and_a_sample_without_trained_ones_is_not_made():
    (sample,), _ = samples(turn([1], [3, 4], output_mask=[0, 1]), turn([8], [9], output_mask=[0]))
    assert sample.trained.tolist() == [False, False, True]


def test_first_token_is_never_trained():
    (sample,), _ = samples(turn([], [3, 4]))
    assert sample.trained.tolist() == [False, True]


def test_candidates_and_top_lists_stay_with_their_tokens():
    first = turn([1, 2], [3, 4], candidate_ids=[[3, 8], [4]], topk=[{3: -0.1, 8: -0.5}, {4: -0.2}])
    arrays = (np.array([[5, 7, 6]], np.int32), np.array([[-0.1, -0.2, -0.3]], np.float32))
    second = turn([1, 2, 3, 4, 9], [5], candidate_ids=(np.array([5, 6]), np.array([0, 2])), topk=arrays)
    third = turn([1, 2, 3, 4, 9, 5], [6])
    (sample,), _ = samples(first, second, third)
    values, offsets = sample.candidate_ids
    lists = [values[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    assert lists == [[], [], [3, 8], [4], [], [5, 6], []]
    assert sample.topk_ids[[2, 3, 5]].tolist() == [[3, 8, -1], [4, -1, -1], [5, 7, 6]]
    assert (sample.topk_ids[[0, 1, 4, 6]] == -1).all() and np.isneginf(sample.topk_logp[6]).all()
    assert sample.topk_logp[2, 1] == np.float32(-0.5)


def test_sample_carries_the_oldest_version_of_its_own_tokens():
    one, two = samples(
        turn([1], [3, 4], versions=np.array([6, 7], np.int32)),
        turn([9], [5, 6], versions=np.array([8, 8], np.int32)),
        version=6,
    )[0]
    assert (one.version, two.version) == (6, 8)
    assert one.token_version[one.trained].tolist() == [6, 7]
    assert samples(turn([1], [3]), version=4)[0][0].version == 4


def test_log_probabilities_that_do_not_fit_the_tokens_are_an_error():
    with pytest.raises(RolloutError, match="rollout 5: 2 tokens but 1 log-probabilities"):
        samples(Turn([1], [3, 4], [-0.1]))
