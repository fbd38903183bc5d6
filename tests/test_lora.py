"""lora.py: adapters against dense layers with merged weights, their files against PEFT's own reading."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import lora
from sync import sent_parameters


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def options(**changed):
    values = {
        "model": "base",
        "lora_r": 4,
        "lora_alpha": 8.0,
        "lora_dropout": 0.0,
        "lora_rslora": False,
        "lora_target_modules": ["all-linear"],
        "lora_modules_to_save": [],
        "compute_dtype": "float32",
    }
    return SimpleNamespace(**{**values, **changed})


def trained(model):
    """The model as after some training: no adapter is zero any more."""
    torch.manual_seed(1)
    lora.reset_adapters(model, seed=1)
    for layer in lora.adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    return model


IDS = torch.arange(12)[None]  # [1, N]


def test_a_fresh_adapter_leaves_the_policy_as_it_is():
    model = tiny_llama()
    before = model(IDS).logits
    lora.add_adapters(model, options())
    lora.reset_adapters(model, seed=1)
    assert torch.equal(model(IDS).logits, before)


def test_only_adapters_and_modules_to_save_are_trained():
    model = tiny_llama()
    names = {name for name, _ in model.named_parameters()}
    lora.add_adapters(model, options(lora_modules_to_save=["embed_tokens"]))
    lora.reset_adapters(model, seed=1)
    model(IDS).logits.sum().backward()
    got = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    layers = lora.adapted_layers(model)
    assert len(layers) == 14 and "lm_head" not in layers
    assert got == {f"{n}.lora_{m}" for n in layers for m in "AB"} | {"model.embed_tokens.weight"}
    assert names <= {name for name, _ in model.named_parameters()}  # weights keep their names


@pytest.mark.parametrize("stabilised", [False, True])
def test_forward_and_gradients_are_those_of_a_dense_layer_with_merged_weights(stabilised):
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 5).double()
    layer = lora.LoraLinear(linear, 4, 8.0, 0.0, stabilised).double()
    torch.nn.init.normal_(layer.lora_A)
    torch.nn.init.normal_(layer.lora_B)
    assert layer.scaling == (4.0 if stabilised else 2.0)
    down, up = layer.lora_A.detach(), layer.lora_B.detach()
    merged = (linear.weight + layer.scaling * up @ down).detach().requires_grad_()  # [out, in]
    x, weights = torch.randn(3, 6).double(), torch.randn(3, 5).double()
    y = torch.nn.functional.linear(x, merged, linear.bias)
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)
    (dense,) = torch.autograd.grad((y * weights).sum(), merged)
    a, b = torch.autograd.grad((layer(x) * weights).sum(), [layer.lora_A, layer.lora_B])
    torch.testing.assert_close(a, layer.scaling * up.T @ dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(b, layer.scaling * dense @ down.T, rtol=0, atol=1e-12)


def test_a_hundred_merges_leave_the_weights_alone():
    model = tiny_llama()
    lora.add_adapters(model, options())
    trained(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(100):
        for layer in lora.adapted_layers(model).values():
            layer.merged_weight()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_servers_get_the_whole_language_model_with_adapters_merged_in():
    model, plain = tiny_llama(), tiny_llama()
    lora.add_adapters(model, options(lora_target_modules=["q_proj"]))
    trained(model)
    sent, merged = sent_parameters(model), lora.merging(model)
    assert [name for name, _ in sent] == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict({name: merged(parameter) for name, parameter in sent})
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "targets, count",
    [(["q_proj", "v_proj"], 4), (["mlp.up_proj"], 2), ([r"model\.layers\.1\..*_proj"], 7)],
)
def test_targets_are_ends_of_names_or_a_regular_expression(targets, count):
    model = tiny_llama()
    lora.add_adapters(model, options(lora_target_modules=targets))
    assert len(lora.adapted_layers(model)) == count


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"lora_target_modules": ["lm_head"]}, "output head"),
        ({"lora_target_modules": ["q_projection"]}, "there are down_proj, gate_proj"),
        ({"lora_target_modules": ["input_layernorm"]}, "no linear layer"),
        ({"lora_modules_to_save": ["embedding"]}, "no module of the model is called embedding"),
        ({"lora_modules_to_save": ["q_proj"]}, "has an adapter already"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused_by_name(changed, words):
    with pytest.raises(ValueError, match=words):
        lora.add_adapters(tiny_llama(), options(**changed))


def test_experts_stored_as_one_tensor_are_refused():
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with pytest.raises(ValueError, match="experts of a mixture"):
        lora.add_adapters(Qwen3MoeForCausalLM(config), options(lora_target_modules=["experts"]))


@pytest.mark.parametrize("whole", [[], ["embed_tokens"]])
@pytest.mark.parametrize("stabilised", [False, True])
def test_peft_reads_the_adapter(tmp_path, whole, stabilised):
    peft = pytest.importorskip("peft")
    chosen = options(model=str(tmp_path / "base"), lora_modules_to_save=whole, lora_rslora=stabilised)
    model = tiny_llama()
    model.save_pretrained(chosen.model)
    lora.add_adapters(model, chosen)
    trained(model)
    if whole:
        model.model.embed_tokens.weight.data += 0.1
    wanted = model(IDS).logits
    lora.save_adapter(tmp_path / "adapter", lora.adapter_state(model), chosen)
    read = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")
    torch.testing.assert_close(read(IDS).logits, wanted, rtol=1e-5, atol=1e-6)
