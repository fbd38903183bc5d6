"""python -m pytest tests/test_pretrained.py: weights in and out, bit by bit, no rank holding all of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from replay import ListRollouts, NoSync, random_groups
from safetensors.torch import load_file, save_file
from test_attention import FAMILIES, TINY, backward, random_samples, row_logp, separate_logp, tiny_model

import attention
import pretrained
import start
import train
from options import OptionError, Options
from sync import full_tensor, sent_parameters

ROOT = Path(__file__).parent.parent
VISION = dict(depth=2, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4, spatial_merge_size=2)
TEXT = {**TINY, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
VISION_FAMILIES = {
    "Qwen3VL": lambda c: c(
        text_config=TEXT,
        vision_config=dict(
            **VISION, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0]
        ),
        image_token_id=40,
        video_token_id=41,
        vision_start_token_id=42,
        vision_end_token_id=43,
    ),
    "Qwen2_5_VL": lambda c: c(
        text_config=TEXT, vision_config=dict(**VISION, out_hidden_size=32, fullatt_block_indexes=[1])
    ),
    "Gemma3": lambda c: c(
        text_config={**TINY, **FAMILIES["Gemma3Text"]},
        vision_config=dict(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        ),
        mm_tokens_per_image=4,
    ),
}


def vision_model(family: str, implementation: str = "eager"):
    attention.register()
    config = VISION_FAMILIES[family](getattr(transformers, f"{family}Config"))
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation=implementation
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A directory with a tiny random model of every family, several files each."""
    directory = tmp_path_factory.mktemp("models") / "all"
    for family in (*FAMILIES, *VISION_FAMILIES):
        model = vision_model(family) if family in VISION_FAMILIES else tiny_model(family, torch.float32)
        model.save_pretrained(directory / family, max_shard_size="60KB")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "tiny" / file, directory / family)
    return directory


@pytest.fixture(scope="module", params=[1, 3])
def round_trips(request, models) -> dict:
    """Three ranks: most dimensions here are no multiple of it, and one rank gets no expert of four."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(request.param)]
    done = subprocess.run(
        [*command, str(ROOT / "tests/pretrained_ranks.py"), str(models)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_family_is_read_and_written_bit_by_bit(round_trips):
    """Against from_pretrained, and the files written hold the tensors of those read, by the same names."""
    faults = {family: found for family, found in round_trips.items() if isinstance(found, str)}
    assert not faults, "\n".join(f"{family}: {fault}" for family, fault in faults.items())


def test_every_byte_is_read_by_one_rank(round_trips, models):
    for family, read in round_trips.items():
        index = json.loads((models / family / "model.safetensors.index.json").read_text())
        assert sum(read) == index["metadata"]["total_size"], family
        if family in ("Llama", "Gemma2", "Qwen3VL"):  # four experts are not shared out evenly
            assert max(read) < 1.2 * sum(read) / len(read), family


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_vision_language_model_gives_a_row_of_text_what_it_gives_each_sample(family):
    alone = vision_model(family, "eager").double()
    model = vision_model(family, "tree").double()
    model.load_state_dict(alone.state_dict())

    def of_text(ids, positions, **tree):
        hidden = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, **tree)
        return model.get_output_embeddings()(hidden.last_hidden_state)

    def whole(ids, positions, **_):
        return alone(input_ids=ids, use_cache=False).logits

    attention.check(model.get_decoder())
    samples = random_samples(1, longest=16)
    together, apart = row_logp(of_text, samples), separate_logp(whole, samples)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    grads, expected = backward(together, model), backward(apart, alone)
    assert grads.keys() == expected.keys()
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-4)


class Sent(NoSync):
    """Notes what a server would be given."""

    def send(self, model, version):
        super().send(model, version)
        self.names = {entry[0] for entry in sent_parameters(model)}
        self.model = model


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_vision_language_model_is_trained_on_text(models, tmp_path, monkeypatch, alone, family):
    """What lies outside its language model is never sent, has no optimizer state, is exported as it was."""
    optimizers, inner = [], start.make_optimizer
    monkeypatch.setattr(start, "make_optimizer", lambda *a: optimizers.append(inner(*a)) or optimizers[-1])
    options = Options(
        model=str(models / family),
        bf16=False,
        token_budget=200,
        max_steps=2,
        learning_rate=1e-2,
        max_staleness=9,
        output_dir=str(tmp_path),
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=None,
    )
    sync = Sent()
    saved = train.train(options, rollouts=ListRollouts(random_groups(12, vocabulary=40)), sync=sync)
    before, after = (
        {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
        for path in (models / family, saved)
    )
    assert before.keys() == after.keys()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    seen = {name for name in before if any(word in name for word in ("visual", "vision", "multi_modal"))}
    assert seen and moved == sync.names == before.keys() - seen
    trained = {id(p) for p in optimizers[0][0].state}
    frozen = [p for p in sync.model.parameters() if not p.requires_grad]
    assert frozen and trained.isdisjoint(map(id, frozen))
    transformers.AutoModelForImageTextToText.from_pretrained(saved)


# ---- what is refused


@pytest.fixture
def group_of_one(alone):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def changed(models: Path, to: Path, edit) -> Options:
    """A copy of a small model whose config (a dict) and tensors went through `edit`."""
    shutil.copytree(models / "Qwen3", to, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((to / "config.json").read_text())
    files = (models / "Qwen3").glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    edit(config, tensors)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return Options(model=str(to), bf16=False)


@pytest.mark.parametrize(
    "edit, words",
    [
        (
            lambda c, t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "lack 1 tensors: model.layers.1.mlp.up_proj",
        ),
        (lambda c, t: t.update(extra=torch.zeros(1)), "does not know, 1 tensors: extra"),
        (lambda c, t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \[3\]"),
        (
            lambda c, t: c.update(tie_word_embeddings=True),
            "ties model.embed_tokens.weight to .* two different",
        ),
        (lambda c, t: c.update(quantization_config={"quant_method": "fp8"}), "is quantized"),
    ],
    ids=["missing", "unexpected", "shape", "tie", "quantized"],
)
def test_files_that_do_not_fit_the_model_are_refused_by_name(models, tmp_path, group_of_one, edit, words):
    options = changed(models, tmp_path / "model", edit)
    ranks = start.Ranks(0, 1, torch.device("cpu"), None, None)
    with pytest.raises(ValueError, match=words):
        start.load_model(options, ranks)


@pytest.mark.parametrize("family", ["Nemotron", "Mamba"])
def test_an_architecture_that_cannot_be_trained_on_trees_is_refused_by_name(tmp_path, group_of_one, family):
    tiny_model(family, torch.float32).save_pretrained(tmp_path)
    shutil.copy(ROOT / "tiny/tokenizer.json", tmp_path)
    ranks = start.Ranks(0, 1, torch.device("cpu"), None, None)
    with pytest.raises(
        OptionError, match=f"--model: model type {family.lower()!r} cannot be trained on trees"
    ):
        start.load_model(Options(model=str(tmp_path)), ranks)


def test_a_setting_that_the_config_does_not_know_is_refused(models):
    options = Options(model=str(models / "Qwen3"), model_init_kwargs={"rms_norm_eps": 0.1, "colour": 1})
    with pytest.raises(OptionError, match=": colour is no setting"):
        pretrained.read_config(options)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_model_is_found_by_its_name_on_the_hub(models, tmp_path, group_of_one, sharded):
    """In the cache a download leaves; index and files, or one file."""
    snapshot = tmp_path / "models--org--name/snapshots/0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(models / "Qwen3Moe", snapshot)
    (tmp_path / "models--org--name/refs").mkdir()
    (tmp_path / "models--org--name/refs/main").write_text(snapshot.name)
    if not sharded:
        files = list(snapshot.glob("*.safetensors"))
        save_file(
            {n: t for file in files for n, t in load_file(file).items()}, snapshot / "model.safetensors"
        )
        for file in (*files, snapshot / "model.safetensors.index.json"):
            file.unlink()
    place = {"cache_dir": str(tmp_path), "local_files_only": True}
    ranks = start.Ranks(0, 1, torch.device("cpu"), None, None)
    model, _ = start.load_model(Options(model="org/name", bf16=False, model_init_kwargs=place), ranks)
    whole = transformers.AutoModelForCausalLM.from_pretrained(models / "Qwen3Moe", dtype=torch.float32)
    for (name, a), (_, b) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(full_tensor(a), b), name
    shutil.rmtree(snapshot)
    with pytest.raises(OptionError, match="--model org/name"):
        start.load_model(Options(model="org/name", model_init_kwargs=place), ranks)


def test_weights_can_be_rounded_as_they_are_read(models, group_of_one):
    ranks = start.Ranks(0, 1, torch.device("cpu"), None, None)
    path = str(models / "Llama")
    model, _ = start.load_model(Options(model=path, dtype="bfloat16"), ranks)
    rough = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(model.named_parameters(), rough.named_parameters(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(full_tensor(a), b.float()), name
