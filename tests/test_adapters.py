"""python -m pytest tests/test_adapters.py: adapters on servers, in place of merged weights.

The embedded server's against merged models; the order of calls against scripted servers; whole runs.
"""

from types import SimpleNamespace

import pytest
import requests
import torch
from test_serve import FAMILIES, assert_logp, build, complete, in_background, post, wait_for
from transformers import AutoModelForCausalLM

import lora
import serve

LORA = {
    "lora_r": 4,
    "lora_alpha": 8.0,
    "lora_dropout": 0.0,
    "lora_rslora": False,
    "lora_target_modules": ["all-linear"],
    "lora_modules_to_save": [],
    "compute_dtype": "float32",
}


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
    server = serve.start(base, max_num_seqs=8, enable_lora=True, max_loras=2, max_lora_rank=8)
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
    adapter_of(base, tmp_path / "large", 3, lora_r=9)
    answer = load(server, "large", tmp_path / "large")
    assert (answer.status_code, "max_lora_rank 8" in answer.text) == (500, True)
    adapter_of(base, tmp_path / "more", 3, lora_modules_to_save=["embed_tokens"])
    answer = load(server, "more", tmp_path / "more")
    assert (answer.status_code, "modules_to_save" in answer.text) == (500, True)
    assert load(server, "one", path).status_code == 200
    assert load(server, "one", path).status_code == 400, "a name is taken once"
    assert load(server, "two", policies["two"][0]).status_code == 200
    answer = load(server, "three", path)
    assert (answer.status_code, "unload one" in answer.text) == (500, True)
    config = requests.get(server.url + "/server_info", timeout=30).json()["vllm_config"]["lora_config"]
    assert config == {"max_loras": 2, "max_lora_rank": 8}


def test_a_server_without_lora_takes_no_adapter(base, policies):
    server = serve.start(base)
    answer = load(server, "one", policies["one"][0])
    server.close()
    assert (answer.status_code, "--enable-lora" in answer.text) == (500, True)
