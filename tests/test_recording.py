"""Claims about recording.py: what is written is what is read, and a replay trains on the same numbers.

Run: pytest tests/test_recording.py
"""

from pathlib import Path

import numpy as np
import pytest
from fake_server import FakeServer
from replay import random_groups
from rollout_run import options_for

import process
from conversation import RolloutError
from process import RolloutProcess
from recording import Recording, Replay
from rollout import EndMessage, GroupMessage


def write(path: Path, groups: list, go_on=False, first: int = 0) -> None:
    recording = Recording(str(path), go_on)
    for number, samples in enumerate(groups, start=first):
        counts = {"samples": len(samples), "tokens": 7}
        recording.write(GroupMessage(number, samples, None if samples else "equal rewards", 9, counts))


def replayed(path: Path, position=0, finished=()) -> list:
    """All messages of a replay."""
    replay = Replay(str(path))
    replay.start(position, set(finished), 0)
    messages = []
    while not messages or not isinstance(messages[-1], EndMessage):
        messages.append(replay.queue.get(timeout=10))
    replay.stop()
    return messages


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    groups = random_groups(3)
    full = groups[0][0]
    full.topk_ids, full.topk_logp = np.full((len(full), 2), -1, np.int32), np.full((len(full), 2), -np.inf)
    full.candidate_ids = (np.array([4, 5], np.int32), np.arange(len(full) + 1, dtype=np.int64))
    full.token_version, full.metrics, full.enqueued_at = np.arange(len(full)), {"reward_kept": 0.1}, 12.5
    write(tmp_path / "r.jsonl", [*groups, []])
    messages = replayed(tmp_path / "r.jsonl")
    assert [m.group_id for m in messages[:-1]] == [0, 1, 2, 3] and messages[3].dropped == "equal rewards"
    assert messages[-1].dataset_size == messages[0].dataset_size == 4, "one pass over the file is one epoch"
    for samples, message in zip(groups, messages, strict=False):
        for one, two in zip(samples, message.samples, strict=True):
            for name, value in vars(one).items():
                for a, b in zip(leaves(value), leaves(getattr(two, name)), strict=True):
                    assert np.array_equal(a, b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)


def test_a_full_disk_does_not_end_a_run(tmp_path, capsys):
    (tmp_path / "full").symlink_to("/dev/full")
    recording = Recording(str(tmp_path / "full"), go_on=False)
    for _ in range(2):
        recording.write(GroupMessage(0, [], "equal rewards", 9, {}))
    assert capsys.readouterr().out.count("No space left on device; nothing more is written") == 1


def leaves(value):
    return list(value) if isinstance(value, tuple) else [value]


def test_resumed_run_appends_and_a_replay_leaves_out_what_is_done(tmp_path):
    write(tmp_path / "r.jsonl", random_groups(2))
    write(tmp_path / "r.jsonl", random_groups(2), go_on=True, first=2)
    assert [m.group_id for m in replayed(tmp_path / "r.jsonl", position=1, finished={2})[:-1]] == [1, 3]
    write(tmp_path / "r.jsonl", [[]], go_on=True, first=1)
    messages = replayed(tmp_path / "r.jsonl")
    assert [m.group_id for m in messages[:-1]] == [0, 2, 3, 1] and messages[3].dropped == "equal rewards"
    write(tmp_path / "r.jsonl", random_groups(1))
    assert len(replayed(tmp_path / "r.jsonl")) == 2, "a fresh run writes a fresh file"


def test_a_run_resumed_before_its_first_update_appends(monkeypatch, model):
    class Told(Exception):
        pass

    def recording(path, go_on):
        raise Told(go_on)

    monkeypatch.setattr(process, "Recording", recording)
    for finished, go_on in ((set(), False), ({3}, True)):
        with pytest.raises(Told, match=str(go_on)):
            RolloutProcess(options_for(model, record="r.jsonl")).start(0, finished, 0)


def test_line_that_a_kill_has_cut_off_is_refused_at_start_and_dropped_by_a_resume(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, random_groups(2))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="line 2 is no whole group.*then delete it"):
        Replay(str(path))
    write(path, random_groups(1), go_on=True, first=1)
    assert [m.group_id for m in replayed(path)[:-1]] == [0, 1]
    path.write_bytes(b"")
    write(path, random_groups(1), go_on=True)
    assert len(replayed(path)) == 2


def test_file_that_is_no_recording_is_refused(tmp_path):
    for text in (b"", b"{}\n", b'{"group_id": 0, "samples": []}\nprint(1)\n', b"\xff\xfe\n"):
        (tmp_path / "r.jsonl").write_bytes(text)
        with pytest.raises(ValueError, match="is no recording: line"):
            Replay(str(tmp_path / "r.jsonl"))
    for samples in ('[{"input_ids": 1}]', "[5]", "null"):
        (tmp_path / "r.jsonl").write_text(f'{{"group_id": 0, "samples": {samples}}}\n')
        with pytest.raises(RolloutError, match="line 1 of .* is no recorded group"):
            check_until_error(Replay(str(tmp_path / "r.jsonl")))


def check_until_error(replay: Replay) -> None:
    replay.start(0, set(), 0)
    replay._thread.join(10)
    replay.check()


def test_used_up_recording_says_so_instead_of_waiting(tmp_path):
    write(tmp_path / "r.jsonl", random_groups(1))
    replay = Replay(str(tmp_path / "r.jsonl"))
    replay.start(0, set(), 0)
    replay._thread.join(10)
    replay.check()
    while not replay.queue.empty():
        replay.queue.get()
    with pytest.raises(RolloutError, match="is used up after 1 groups"):
        replay.check()


def test_process_records_what_it_sends(model, tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    with FakeServer() as fake:
        rollouts = RolloutProcess(options_for(model, fake, record=str(path)))
        rollouts.start(0, set(), 0)
        rollouts.publish(1, 10**6)
        sent = []
        while len(sent) < 4:
            message = rollouts.queue.get(timeout=30)
            sent += [message] if isinstance(message, GroupMessage) else []
        rollouts.stop()
    for one, two in zip(sent, replayed(path), strict=False):
        assert one.group_id == two.group_id and one.generated == two.generated
        np.testing.assert_array_equal(one.samples[1].topk_logp, two.samples[1].topk_logp)
