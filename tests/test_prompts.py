"""Claims about prompts.py: which prompt is next.

Run: pytest tests/test_prompts.py
"""

import math

import pytest

import prompts
from conversation import RolloutError
from prompts import Prompts

ROWS = [{"number": n} for n in range(3)]


class Stream:
    """A dataset without a length."""

    def __iter__(self):
        return iter(ROWS)


def drawn(prompts: Prompts, most: int = 100) -> list[tuple]:
    found = []
    while len(found) < most and (prompt := prompts.next()) is not None:
        assert prompt.row == ROWS[prompt.row_index]
        found.append((prompt.group_id, prompt.epoch, prompt.row_index))
    return found


@pytest.mark.parametrize("dataset", [ROWS, Stream()])
def test_epochs_follow_each_other_and_may_end_within_one(dataset):
    wanted = [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1)]
    assert drawn(Prompts(dataset, 1.5, 0, set())) == wanted, "4.5 prompts are 5"
    assert len(drawn(Prompts(dataset, math.inf, 0, set()))) == 100


def test_resume_leaves_out_what_is_finished(capsys):
    assert drawn(Prompts(ROWS, 2.0, 2, {3, 5})) == [(2, 0, 2), (4, 1, 1)]
    assert not capsys.readouterr().out
    assert drawn(Prompts(Stream(), 2.0, 2, {3})) == [(2, 0, 0), (4, 0, 1), (5, 0, 2)], (
        "numbered on from the first"
    )
    assert "restarts from its first prompt" in capsys.readouterr().out


def test_prompt_comes_again_before_new_ones_and_knows_how_often():
    for dataset in (ROWS, Stream()):
        source = Prompts(dataset, 2.0, 0, set())
        drawn(source, 3)
        source.again.extend([1, 1])
        again = [source.next() for _ in range(3)]
        assert [(p.group_id, p.row_index, p.attempt) for p in again] == [(1, 1, 1), (1, 1, 2), (3, 0, 0)]
    source = Prompts(None, math.inf, 5, {6})
    source.again.append(5)
    assert [source.next().group_id for _ in range(3)] == [5, 5, 7]


def test_stream_remembers_its_newest_rows_only(monkeypatch):
    monkeypatch.setattr(prompts, "STREAMED_ROWS", 2)
    source = Prompts(Stream(), 2.0, 0, set())
    assert source.size is None
    drawn(source, 3)
    assert source.size == 3, "told with the last prompt"
    source.again.extend([2, 0])
    assert source.next().group_id == 2
    with pytest.raises(RolloutError, match="prompt 0 of a stream is too far back"):
        source.next()


def test_a_stream_that_is_used_up_after_one_epoch_is_an_error():
    class Once:
        rows = iter(ROWS)

        def __iter__(self):
            return self.rows

    with pytest.raises(RolloutError, match="no row in epoch 1"):
        drawn(Prompts(Once(), 2.0, 0, set()))
