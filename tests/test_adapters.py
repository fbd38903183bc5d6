"""python -m pytest tests/test_adapters.py: adapters on servers, in place of merged weights.

The embedded server's against merged models; the order of calls against scripted servers; whole runs.
"""

import threading
from types import SimpleNamespace

import pytest
import requests
import torch
from fake_server import FakeServer
from rollout_run import Run, options_for
from test_loop import records, run
from test_serve import FAMILIES, assert_logp, build, complete, in_background, post, wait_for
from transformers import AutoModelForCausalLM

import lora
import serve
from adapters import AdapterSync, choose
from client import Server
from conversation import Rollout, RolloutError
from link import SyncError
from options import OptionError, Options
from rollout import TOO_OLD, RolloutLoop
from tools import check_vllm

LORA = dict(lora_r=4, lora_alpha=8.0, lora_dropout=0.0, lora_rslora=False, compute_dtype="float32")
LORA |= dict(lora_target_modules=["all-linear"], lora_modules_to_save=[])


def adapter_of(directory, path, seed: int, **changed):
    """A folder with an adapter of the model that does something; returns the model with it merged in."""
    options = SimpleNamespace(model=str(directory), **LORA | changed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    lora.add_adapters(model, options)
    lora.reset_adapters(model, seed)
    torch.manual_seed(seed)
    for layer in lora.adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.2)
    lora.save_adapter(path, lora.adapter_state(model), options)
    for layer in lora.adapted_layers(model).values():
        layer.weight.data = layer.merged_weight()
        layer.lora_B.data.zero_()
    return model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build(FAMILIES["qwen3"], tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def policies(base, tmp_path_factory):
    """Names of adapters, and for each one its folder and the merged model; the base model as None."""
    root = tmp_path_factory.mktemp("adapters")
    some = {"lora_target_modules": ["q_proj", "down_proj"], "lora_rslora": True}
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return {
        None: (None, plain.eval()),
        "one": (root / "one", adapter_of(base, root / "one", 1)),
        "two": (root / "two", adapter_of(base, root / "two", 2, **some)),
    }


@pytest.fixture
def server(base):
    server = serve.start(base, max_num_seqs=8, enable_lora=True)
    yield server
    server.close()


def load(server, name, path):
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def unload(server, name):
    return post(server, "/v1/unload_lora_adapter", {"lora_name": name})


# ---- the embedded server


def test_adapters_in_one_batch_are_as_many_merged_models(server, policies):
    for name, (path, _) in policies.items():
        assert name is None or load(server, name, path).status_code == 200
    post(server, "/pause?mode=keep")  # so that all of them share their first forwards
    prompts = {name: [5 + number, 9, 30] for number, name in enumerate([None, "one", "two"])}
    asked = {
        (name, seed): in_background(complete, server, prompt, model=name, seed=seed)
        for name, prompt in prompts.items()
        for seed in (1, 2)
    }
    wait_for(lambda: len(server.engine.waiting) == 6, "six requests")
    post(server, "/resume")
    for (name, _), answer in asked.items():
        assert_logp(policies[name][1], prompts[name], answer())
    apart = complete(server, [5, 9, 30], model="one")["logprobs"]["token_logprobs"]
    assert apart != complete(server, [5, 9, 30], model="two")["logprobs"]["token_logprobs"]


def test_models_lists_adapters_as_vllm_does(server, base, policies):
    load(server, "one", policies["one"][0])
    first, second = requests.get(server.url + "/v1/models", timeout=30).json()["data"]
    assert (first["id"], first["parent"]) == (str(base), None)
    assert second["root"] == str(policies["one"][0]) and second["max_model_len"] is None
    assert (second["id"], second["parent"]) == ("one", str(base))


def test_a_request_keeps_an_adapter_that_is_unloaded(server, policies):
    load(server, "one", policies["one"][0])
    post(server, "/pause?mode=keep")
    asked = in_background(complete, server, [5, 6, 7], model="one")
    wait_for(lambda: server.engine.waiting, "the request")
    assert unload(server, "one").status_code == 200
    post(server, "/resume")
    assert_logp(policies["one"][1], [5, 6, 7], asked())
    gone = post(server, "/v1/completions", {"model": "one", "prompt": [5]})
    assert (gone.status_code, "does not exist" in gone.text) == (404, True)


def test_what_cannot_be_loaded_is_refused_with_vllms_codes(server, base, policies, tmp_path):
    path = policies["one"][0]
    assert load(server, "one", tmp_path / "nowhere").status_code == 404
    assert post(server, "/v1/load_lora_adapter", {}).status_code == 400
    assert unload(server, "one").status_code == 404
    adapter_of(base, tmp_path / "more", 3, lora_modules_to_save=["embed_tokens"])
    answer = load(server, "more", tmp_path / "more")
    assert (answer.status_code, "modules_to_save" in answer.text) == (500, True)
    assert load(server, "one", path).status_code == 200
    assert load(server, "one", path).status_code == 400, "a name is taken once"


def test_a_server_without_lora_takes_no_adapter(base, policies):
    server = serve.start(base)
    answer = load(server, "one", policies["one"][0])
    server.close()
    assert (answer.status_code, "--enable_lora" in answer.text) == (500, True)


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_what_is_sampled_is_the_trainers_after_every_update_and_over_it(base, way):
    """tools/check_vllm.py, which says so of a real vLLM, against the embedded server."""
    server = serve.start(base, dtype="float32", enable_lora=True)
    asked = ["--lora_r", "4", "--lora_sync", way, "--tokens", "200", "--lead", "0.02"]
    check = check_vllm.Check(check_vllm.arguments([server.url, str(base), *asked]), torch.device("cpu"))
    check_vllm.add_noise(check.model, 0.1)
    before = check.compare()
    first, second = check.over_an_update(), check.over_an_update()
    check.sync.close()
    server.close()
    assert before["max"] > 0.05
    for line in (first["after"]["max"], second["after"]["max"], second["in_flight"]):
        assert line < 1e-4


# ---- the trainer's end


@pytest.fixture(scope="module")
def trained():
    """A model with adapters of rank 4, as the trainer holds it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"], dtype=torch.float32)
    lora.add_adapters(model, SimpleNamespace(model="m", **LORA))
    lora.reset_adapters(model, 1)
    return model


def options_of(place, **changed):
    values = dict(model="m", lora_r=4, lora_sync="adapter", max_staleness=1, vllm_server_timeout=20.0)
    return Options(output_dir=str(place), **{**values, **changed})


def update(sync, model, version: int) -> list[str]:
    sync.prepare(model)
    sync.pause()
    sync.send(model, version)
    return sync.resume()


@pytest.fixture
def fake():
    with FakeServer() as server:
        server.adapters = {}
        server.replies["/weight_info"] = (200, {"weight_version": "default"})
        yield server


def told(lora_config) -> tuple[int, dict]:
    """What /server_info answers."""
    return 200, {"vllm_config": {"model_config": {}, "lora_config": lora_config}}


def lora_server(fake, **limits):
    fake.replies["/server_info"] = told({"max_lora_rank": 16, "max_loras": 3} | limits)
    return Server(fake.url)


def test_an_update_loads_the_next_version_publishes_it_and_then_unloads_the_oldest(fake, trained, tmp_path):
    options, most = options_of(tmp_path), 0
    sync = AdapterSync([Server(fake.url)], options)
    sync.init()
    for version in range(5, 9):
        assert update(sync, trained, version) == [fake.url]
        fake.calls.append(("publish", {"lora_name": options.adapter(version)}))
        most = max(most, len(fake.adapters))
    sync.close()
    happened = [
        f"{path.split('/')[-1]} {body['lora_name'][-2:]}" for path, body in fake.calls if "lora_name" in body
    ]
    assert happened == [
        *("load_lora_adapter v5", "publish v5", "load_lora_adapter v6", "publish v6"),
        *("load_lora_adapter v7", "publish v7", "unload_lora_adapter v5"),
        *("load_lora_adapter v8", "publish v8"),
    ]
    assert most == options.max_staleness + 2
    assert sorted(p.name for p in (tmp_path / ".vllm_lora").iterdir()) == ["v6", "v7", "v8"]
    assert not {"/pause", "/start_weight_update"} & {path for path, _ in fake.calls}, "nothing waits"


def test_every_version_has_a_name_and_a_folder_of_its_own(fake, trained, tmp_path):
    sync = AdapterSync([Server(fake.url)], options_of(tmp_path, max_staleness=4))
    sync.init()
    for version in range(3):
        update(sync, trained, version)
    assert len(set(fake.adapters.values())) == len(fake.adapters) == 3
    assert options_of(tmp_path / "other").adapter(1) not in fake.adapters, "two runs may share a server"


def test_what_an_earlier_start_has_left_is_taken_away(fake, trained, tmp_path):
    options = options_of(tmp_path)
    fake.adapters = {options.adapter(9): "old", "of somebody else": "kept"}
    (tmp_path / ".vllm_lora" / "v9").mkdir(parents=True)
    sync = AdapterSync([Server(fake.url)], options)
    sync.init()
    assert list(fake.adapters) == ["of somebody else"] and not (tmp_path / ".vllm_lora").exists()
    update(sync, trained, 9)
    assert options.adapter(9) in fake.adapters


def test_a_server_that_does_not_see_the_folder_ends_the_run_with_what_to_do(fake, trained, tmp_path):
    fake.adapt = lambda path, **_: (404, {"error": {"message": "No adapter found for /somewhere"}})
    sync = AdapterSync([Server(fake.url)], options_of(tmp_path))
    sync.init()
    with pytest.raises(SyncError, match="sees no .*v0.*very path.*--lora_sync merged"):
        update(sync, trained, 0)


def test_a_server_that_is_back_gets_every_version_that_is_kept(fake, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("sync.RETRY_S", 0.05)
    options = options_of(tmp_path)
    with FakeServer() as other:
        other.adapters = {}
        sync = AdapterSync([Server(fake.url), Server(other.url)], options)
        sync.init()
        assert update(sync, trained, 0) == [fake.url, other.url]
        other.die()
        assert update(sync, trained, 1) == [fake.url], "it goes on without it"
        with FakeServer(port=int(other.url.rsplit(":", 1)[1])) as back:
            back.adapters = {}
            wait_for(lambda: not sync.returned.empty(), "the server to be taken back")
            assert update(sync, trained, 2) == [fake.url, back.url]
            assert set(back.adapters) == {options.adapter(v) for v in (0, 1, 2)}
            back.adapters.clear()  # restarted between two updates
            assert update(sync, trained, 3) == [fake.url, back.url]
            assert set(back.adapters) == {options.adapter(v) for v in (1, 2, 3)}
        sync.close()


# ---- what a server is asked at the start

START = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve m --enable-lora --max-loras 3 "
START += "--max-lora-rank 32"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"/server_info": told({"max_lora_rank": 8, "max_loras": 3})}, "up to rank 8, --lora_r is 20"),
        (
            {"/server_info": told({"max_lora_rank": 32, "max_loras": 2})},
            r"holds 2 .* --max_staleness \+ 2 is 3",
        ),
        ({"/server_info": told(None)}, "runs without LoRA"),
        ({"adapters": None}, "loads no adapters while it runs"),
        ({"/v1/models": (200, {"data": [{"root": "other", "max_model_len": 9}]})}, "serves other; .* of m"),
        ({"/weight_info": (200, {"weight_version": "12"})}, "has to be restarted"),
        ({"paused": True}, "has to be restarted"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_flags_to_start_it_with(fake, change, words, tmp_path):
    server = lora_server(fake, max_lora_rank=32)
    for name, value in change.items():
        if name.startswith("/"):
            fake.replies[name] = value
        else:
            setattr(fake, name, value)
    with pytest.raises(OptionError, match=words) as caught:
        choose([server], options_of(tmp_path, lora_r=20))
    assert START in str(caught.value) and "--lora_sync merged" in str(caught.value)


def test_a_server_that_fits_is_told_what_it_must_hold(fake, capsys, tmp_path):
    assert choose([lora_server(fake)], options_of(tmp_path)) == "adapter"
    assert "must hold the weights of --model m" in capsys.readouterr().out


def test_auto_means_adapters_where_every_server_takes_them(fake, capsys, tmp_path):
    auto = options_of(tmp_path, lora_sync="auto")
    assert choose([lora_server(fake)], auto) == "adapter"
    assert choose([lora_server(fake)], options_of(tmp_path, lora_sync="merged")) == "merged"
    capsys.readouterr()
    whole = options_of(tmp_path, lora_sync="auto", lora_modules_to_save=["embed_tokens"])
    assert choose([lora_server(fake)], whole) == "merged"
    assert "--lora_modules_to_save trains more" in capsys.readouterr().out
    with FakeServer() as plain:
        plain.replies["/server_info"] = told(None)
        assert choose([lora_server(fake), Server(plain.url)], auto) == "merged"
        assert f"{plain.url} runs without LoRA" in capsys.readouterr().out


# ---- rollouts


class TwoTurns(RolloutLoop):
    async def generate_one(self, prompt, tools, group_id):
        rollout, held = Rollout([], [], []), self.render(prompt)
        for _ in range(2):
            turn = await self.generate_one_turn(held)
            rollout.turns.append(turn)
            rollout.completion_ids += turn.output_ids
            held = held + turn.output_ids + [7]
        return rollout


def two_turns(model, fake, tmp_path, **changed):
    changed = dict(score_centering=False, rollout_loop=TwoTurns, output_dir=str(tmp_path)) | changed
    fake.gate = threading.Event()
    return options_for(model, fake, lora_r=4, lora_sync="adapter", **changed)


def test_a_rollout_over_an_update_keeps_its_adapter(model, fake, tmp_path):
    options = two_turns(model, fake, tmp_path)
    fake.weight_versions = [{"version": "default", "start": 0, "end": 1}]  # of the base weights: no news
    old, new = options.adapter(4), options.adapter(5)
    fake.adapters = {old: "", new: ""}
    with Run(options, version=4) as run:
        run.until(lambda: len(fake.requests) == 4)
        run.link.version.value = 5
        fake.gate.set()
        groups = sorted(run.groups(4), key=lambda group: group.group_id)
    assert [body["model"] for body in fake.requests] == [old] * 8 + [new] * 24
    assert len({body["cache_salt"] for body in fake.requests}) == 2, "keys and values belong to an adapter"
    for group, version in zip(groups, (4, 5, 5, 5), strict=True):
        assert {s.version for s in group.samples} == {version}
        assert all((s.token_version[s.trained] == version).all() for s in group.samples)


def test_a_rollout_whose_adapter_has_left_is_too_old_and_its_prompt_is_sampled_again(model, fake, tmp_path):
    options = two_turns(model, fake, tmp_path)
    fake.adapters = {options.adapter(4): ""}
    with Run(options, version=4) as run:
        run.until(lambda: len(fake.requests) == 4)
        run.link.version.value = 4 + options.max_staleness + 1
        fake.adapters = {options.adapter(9): ""}
        fake.gate.set()
        groups = {group.group_id: group for group in run.groups(4)}
        assert groups[0].dropped == TOO_OLD and groups[0].samples == []
        assert all(groups[number].dropped is None for number in (1, 2, 3))
        assert run.metrics()["rollout/unloaded_count"] == 4
        run.link.again_in.send([0])
        again = run.groups(5)[-1]
    assert (again.group_id, again.dropped, {s.version for s in again.samples}) == (0, None, {9})


def test_a_server_that_lost_a_version_in_use_is_down(model, fake, tmp_path):
    options = two_turns(model, fake, tmp_path)
    fake.gate = None
    with (
        Run(options, version=4) as run,
        pytest.raises(RolloutError, match="lacks the adapter .*v4.*restarted"),
    ):
        run.groups(1)
    with FakeServer() as other:
        other.adapters = {options.adapter(4): ""}
        options.vllm_server_base_url.append(other.url)
        with Run(options, version=4) as run:
            assert all(group.dropped is None for group in run.groups(4))
            assert run.loop.routing.down() == [fake.url]


# ---- whole runs


def test_a_run_with_adapters_and_its_resume(tmp_path):
    """Policies are equal on both ends at every version, from the first prompt on and after a resume."""
    out = tmp_path / "out"
    flags = ["--lora_r", "3", "--lora_sync", "adapter", "--max_staleness", "0", "--learning_rate", "1e-2"]
    first = run(out, *flags, "--max_steps", "3", ranks=1)
    assert first.returncode == 0, first.stdout + first.stderr
    (out / ".vllm_lora" / "v99").mkdir()
    second = run(out, *flags, "--max_steps", "4", "--resume_from_checkpoint", "true", ranks=1)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "must hold the weights of --model tiny" in first.stdout
    assert len(records(out)) == 4
    for record in records(out):
        assert record["sampling/sampling_logp_difference/max"] < 1e-4
        assert record["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)
        assert record["sample/staleness_max"] == 0
    assert sorted(path.name for path in (out / ".vllm_lora").iterdir()) == ["v3", "v4"]
