"""python -m pytest tests/test_checkpoint.py: what is written can be resumed, served and trusted."""

import dataclasses
import json
import resource
import shutil
import threading

import datasets
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
from checkpoint import Progress, SaveError, Saver, newest, read_state
from options import OptionError, Options


@pytest.fixture(scope="module", autouse=True)
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiny():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained("tiny", dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, AutoTokenizer.from_pretrained("tiny")


def train_a_step(model, optimizer, seed):
    ids = torch.randint(0, 200, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def saver_of(path, model, optimizer, tokenizer, only_model=False, limit=None, bf16=False):
    options = Options(
        model="tiny", bf16=bf16, output_dir=str(path), save_only_model=only_model, save_total_limit=limit
    )
    return Saver(options, model, optimizer, tokenizer, None)


def save(path, step, *arguments, **kwargs):
    saver = saver_of(path, *arguments, **kwargs)
    saver.save(step, state_at(step))
    saver.wait()
    return saver.saved


def state_at(step):
    return {"version": step, "position": 3, "beyond": [5], "num_tokens": 7}


def test_a_resumed_model_goes_on_exactly_as_the_uninterrupted_one(tmp_path):
    model, optimizer, tokenizer = tiny()
    for seed in range(3):
        train_a_step(model, optimizer, seed)
    path = save(tmp_path, 3, model, optimizer, tokenizer)
    drawn = torch.rand(4)  # the random state is part of the checkpoint
    train_a_step(model, optimizer, 9)
    other, other_optimizer, _ = tiny()
    checkpoint.load(path, other, other_optimizer)
    assert torch.equal(torch.rand(4), drawn)
    train_a_step(other, other_optimizer, 9)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_every_checkpoint_loads_with_from_pretrained_and_generates(tmp_path):
    model, optimizer, tokenizer = tiny()
    path = save(tmp_path, 1, model, optimizer, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = AutoTokenizer.from_pretrained(path)("sort: cab", return_tensors="pt")
    assert loaded.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]


def test_the_exported_model_is_in_the_compute_dtype_and_the_resumable_one_in_float32(tmp_path):
    model, optimizer, tokenizer = tiny()
    path = save(tmp_path, 1, model, optimizer, tokenizer, bf16=True)
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    other, other_optimizer, _ = tiny()
    for parameter in other.parameters():
        parameter.data.zero_()
    checkpoint.load(path, other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path, monkeypatch):
    model, optimizer, tokenizer = tiny()
    whole = save(tmp_path, 1, model, optimizer, tokenizer)
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(SaveError, match="disk full"):
        save(tmp_path, 2, model, optimizer, tokenizer)
    assert newest(tmp_path) == whole
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    (tmp_path / "checkpoint-9").mkdir()  # a directory that something else left
    assert newest(tmp_path) == whole
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        read_state(tmp_path / "checkpoint-9")


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    model, optimizer, tokenizer = tiny()
    for step in (5, 10, 20):
        save(tmp_path, step, model, optimizer, tokenizer, only_model=True, limit=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20"]
    assert newest(tmp_path).name == "checkpoint-20"


def test_a_checkpoint_with_only_the_model_says_how_to_use_it(tmp_path):
    model, optimizer, tokenizer = tiny()
    path = save(tmp_path, 1, model, optimizer, tokenizer, only_model=True)
    assert not (path / "state").exists()
    with pytest.raises(ValueError, match="--model"):
        read_state(path)


def test_saving_a_step_again_replaces_it(tmp_path):
    model, optimizer, tokenizer = tiny()
    save(tmp_path, 1, model, optimizer, tokenizer)
    shutil.copy(tmp_path / "checkpoint-1/config.json", tmp_path / "checkpoint-1/stray.json")
    assert not (save(tmp_path, 1, model, optimizer, tokenizer) / "stray.json").exists()


def test_progress_moves_over_prompts_in_any_order():
    progress = Progress()
    for prompt in (2, 0, 5, 1):
        progress.done(prompt)
    assert (progress.position, progress.beyond, progress.count) == (3, {5}, 4)
    progress.done(1)  # again: nothing changes
    assert (progress.position, progress.beyond) == (3, {5})


@pytest.mark.parametrize("limit", [1, 100_000])
def test_a_full_disk_is_one_error_and_leaves_nothing_behind(tmp_path, limit):
    """A limit on the size of files stands for the full disk; the second fails amid the weights."""
    model, optimizer, tokenizer = tiny()
    whole = save(tmp_path, 1, model, optimizer, tokenizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(SaveError, match="checkpoint-2"):
            save(tmp_path, 2, model, optimizer, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert newest(tmp_path) == whole


# ---- beside the training


@pytest.fixture
def held(monkeypatch):
    """Writing waits until this event is set."""
    event, inner = threading.Event(), checkpoint.dcp.save

    def save(*arguments, **kwargs):
        assert event.wait(30)
        return inner(*arguments, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", save)
    yield event
    event.set()


def test_a_save_holds_what_the_weights_were_when_it_was_asked_for(tmp_path, held):
    model, optimizer, tokenizer = tiny()
    train_a_step(model, optimizer, 1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    saver = saver_of(tmp_path, model, optimizer, tokenizer)
    saver.save(1, state_at(1))  # returns while nothing can be written
    assert saver.saved is None and newest(tmp_path) is None
    train_a_step(model, optimizer, 2)
    held.set()
    saver.wait()
    assert newest(tmp_path) == saver.saved == tmp_path / "checkpoint-1"
    exported = AutoModelForCausalLM.from_pretrained(saver.saved, dtype="float32")
    other, other_optimizer, _ = tiny()
    checkpoint.load(saver.saved, other, other_optimizer)
    for loaded in (exported, other):
        assert all(torch.equal(before[name], p) for name, p in loaded.named_parameters())
    assert {int(s["step"]) for s in other_optimizer.state.values()} == {1}


def test_the_thread_that_writes_asks_the_model_for_no_tensor(tmp_path, monkeypatch):
    """FSDP exchanges them while the model runs."""
    model, optimizer, tokenizer = tiny()
    write = checkpoint.write

    def forbidding(path, model, *arguments):
        with monkeypatch.context() as patch:
            for name in ("state_dict", "named_parameters", "named_buffers", "parameters"):
                patch.setattr(model, name, None)
            write(path, model, *arguments)

    monkeypatch.setattr(checkpoint, "write", forbidding)
    assert save(tmp_path, 1, model, optimizer, tokenizer).name == "checkpoint-1"


def test_the_next_save_waits_for_the_one_before(tmp_path, held):
    model, optimizer, tokenizer = tiny()
    saver = saver_of(tmp_path, model, optimizer, tokenizer)
    saver.save(1, state_at(1))
    threading.Timer(0.5, held.set).start()
    saver.save(2, state_at(2))
    assert saver.saved.name == "checkpoint-1"
    saver.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_a_wait_for_a_save_says_so_and_has_an_end(tmp_path, held, monkeypatch, capsys):
    monkeypatch.setattr("client.FIRST_NOTICE_S", 0.2)
    model, optimizer, tokenizer = tiny()
    saver = saver_of(tmp_path, model, optimizer, tokenizer)
    saver.save(1, state_at(1))
    with pytest.raises(RuntimeError, match="not written within 1 s"):
        saver.wait(1.0)
    assert "for the checkpoint to be written" in capsys.readouterr().out
    monkeypatch.setattr(checkpoint, "LAST_SAVE_S", 0.5)
    saver.close()  # a run that ends does not wait for ever, and raises nothing over its own error


def test_a_save_that_fails_beside_the_training_is_said_and_the_next_one_works(tmp_path, monkeypatch, capsys):
    model, optimizer, tokenizer = tiny()
    saver = saver_of(tmp_path, model, optimizer, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr("pretrained.write_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        saver.save(1, state_at(1))
        saver.thread.join()
    assert "OSError: disk full; training goes on from memory, free some space" in capsys.readouterr().out
    saver.save(2, state_at(2))
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_large_models_are_written_as_several_files_with_an_index(tmp_path, monkeypatch):
    model, optimizer, tokenizer = tiny()
    monkeypatch.setattr("pretrained.FILE_BYTES", 200_000)
    path = save(tmp_path, 1, model, optimizer, tokenizer, only_model=True)
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 3 and files[0].name.endswith(f"of-{len(files):05d}.safetensors")
    assert all(file.stat().st_size < 210_000 for file in files)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_resume_with_other_adapters_is_refused(tmp_path):
    """Their weights would be read as if they had been made with the new options."""
    made = Options(model="tiny", lora_r=4, lora_alpha=8.0)
    state = {"step": 1, "only_model": False, "options": checkpoint.kept(made)}
    (tmp_path / "rollout_state.json").write_text(json.dumps(state))
    checkpoint.check_resume(tmp_path, made, None)
    for other in (
        {"lora_alpha": 16.0},
        {"lora_r": 0},
        {"model": "other"},
        {"lora_target_modules": ["q_proj"]},
    ):
        with pytest.raises(OptionError, match="was made with .*'lora_alpha': 8.0"):
            checkpoint.check_resume(tmp_path, dataclasses.replace(made, **other), None)


def test_a_resume_with_other_prompts_is_refused(tmp_path):
    """Also where there are as many; other columns, and a dataset of another type, are no other prompts."""
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "answer": i} for i in range(100)]
    same = datasets.Dataset.from_list([row | {"answer": 0} for row in rows])
    options = Options(model="tiny")
    state = {"step": 1, "only_model": False, "options": checkpoint.kept(options)}
    state["prompts"] = checkpoint.fingerprint(rows)
    (tmp_path / "rollout_state.json").write_text(json.dumps(state))
    for unchanged in (same, iter(rows), None):
        checkpoint.check_resume(tmp_path, options, checkpoint.fingerprint(unchanged))
    for other in (rows[:-1], rows[::-1]):
        with pytest.raises(OptionError, match=r"rows \(.*, that of .* had 100 rows \(.*other ones"):
            checkpoint.check_resume(tmp_path, options, checkpoint.fingerprint(other))
    checkpoint.fingerprint([*rows, None])  # what is wrong with a row is said where it is sampled


@pytest.mark.parametrize("text", ["[]", "{", "{}", "null"])
def test_a_damaged_state_is_named(tmp_path, text):
    (tmp_path / "rollout_state.json").write_text(text)
    with pytest.raises(OptionError, match="rollout_state.json is damaged"):
        read_state(tmp_path)


def test_weights_that_cannot_be_read_into_the_model_are_named(tmp_path):
    model, optimizer, tokenizer = tiny()
    saved = save(tmp_path, 1, model, optimizer, tokenizer)
    for file in (saved / "state").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(OptionError, match="cannot be read into this model"):
        checkpoint.load(saved, model, optimizer)
