"""What a row costs, read off a model's configuration: python -m pytest tests/test_flops.py"""

from types import SimpleNamespace

import numpy as np
import pytest

from flops import RowCost, row_cost_from_config
from packing import Sample, pack


def test_row_cost_of_a_dense_model_counts_its_matrices():
    config = SimpleNamespace(
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=5,
        intermediate_size=16,
        vocab_size=100,
    )
    cost = row_cost_from_config(config)
    attention = 8 * 20 + 2 * 8 * 10 + 20 * 8  # q, k and v, o
    assert cost.token == 6 * 3 * (attention + 3 * 8 * 16)
    assert cost.pair == 12 * 4 * 5 * 3
    assert cost.term == 6 * 100 * 8
    assert cost.window_pair == 0


def test_an_mlp_without_a_gate_has_two_matrices():
    sizes = dict(
        hidden_size=8, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    phi, llama = (
        row_cost_from_config(SimpleNamespace(model_type=kind, **sizes)) for kind in ("phi", "llama")
    )
    assert llama.token - phi.token == 3 * 2 * 8 * 32 and phi.known


def test_row_cost_reads_windows_experts_and_delta_layers():
    config = SimpleNamespace(
        hidden_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=4,
        vocab_size=10,
        layer_types=["full_attention", "sliding_attention", "linear_attention", "linear_attention"],
        sliding_window=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=3,
        linear_value_head_dim=3,
        linear_conv_kernel_dim=4,
    )
    cost = row_cost_from_config(config)
    assert (cost.pair, cost.window_pair, cost.window) == (12 * 2 * 4, 12 * 2 * 4, 3)
    attention = 2 * 8 * 4 * (2 * 2 + 2 * 2)
    mixed = 2 * 3 + 2 * 3
    delta = 2 * 8 * (mixed + 6 + 4) + 2 * 6 * 8 + 2 * 4 * mixed + 7 * 2 * 3 * 3
    moe = 2 * 6 * 8 * 6 + 2 * 8 * 4
    assert cost.token == 3 * (2 * attention + 2 * delta + 4 * moe)
    assert row_cost_from_config(SimpleNamespace()).token > 0, "a config of nothing still makes a cost"


def test_flops_of_what_is_no_such_model_are_not_known():
    """MFU then is null; rows are balanced all the same."""
    known = dict(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=9
    )
    assert row_cost_from_config(SimpleNamespace(**known)).known
    changes = [{"hidden_size": None}, {"layer_types": ["mamba"] * 2}, {"kv_lora_rank": 4}]
    for change in [*changes, {"num_attention_heads": [2, 4]}, {"intermediate_size": None}]:
        cost = row_cost_from_config(SimpleNamespace(**{**known, **change}))
        assert not cost.known and cost.token > 0


def test_row_cost_of_a_row_is_what_the_planner_counts():
    cost = RowCost(token=2.0, pair=0.5, term=3.0, window_pair=0.25, window=4)
    lines = [np.array(ids, np.int32) for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 9])]
    row = pack(
        [Sample(x, np.arange(len(x)) > 0, np.zeros(len(x), np.float32), 0.0, 0, 0, 0, 0) for x in lines]
    )
    lines = cost.path(6) + cost.path(3) - cost.path(2)
    assert cost.row(row) == pytest.approx(lines + 3.0 * len(set(row.position.tolist())))
    assert cost.row(row.to("cpu")) == pytest.approx(cost.row(row))
