"""How parameters are made from tensors: literal layouts."""

import dataclasses

import numpy as np
import pytest
import tiny

from convert.recipes import Recipe, recipe, unpack
from ddtree_jax.config import DeltaConfig, TargetConfig

# one key head after the other: q, k, then the two value heads' v, then z
PACKED = np.array([[10], [11], [12], [13], [14], [20], [21], [22], [23], [24]])
SIZES = {"q": 1, "k": 1, "v": 2, "z": 1}


@pytest.fixture
def next_config() -> TargetConfig:
    delta = DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=1, value_dim=1, conv_taps=4)
    return dataclasses.replace(tiny.HYBRID, delta=delta, packed_delta=True)


def test_rows_grouped_by_head_are_sorted_by_kind():
    assert unpack(PACKED, 2, SIZES, "qkv").ravel().tolist() == [10, 20, 11, 21, 12, 13, 22, 23]
    assert unpack(PACKED, 2, SIZES, "z").ravel().tolist() == [14, 24]


def test_packed_delta_projections_name_one_tensor_each(next_config: TargetConfig):
    made = recipe("layers.0.linear_attn.in_proj_qkv.weight", (8, 3), next_config, ())
    # 2 key heads of 1, 4 value heads of 1: q 2 + k 2 + v 4 rows, and 4 rows of z
    assert made.tensors == {"layers.0.linear_attn.in_proj_qkvz.weight": (12, 3)}
    rows = np.repeat(np.arange(12), 3).reshape(12, 3)
    assert made.build(rows)[:, 0].tolist() == [0, 6, 1, 7, 2, 3, 8, 9]
    made = recipe("layers.0.linear_attn.in_proj_z.weight", (4, 3), next_config, ())
    assert made.build(rows)[:, 0].tolist() == [4, 5, 10, 11]
    made = recipe("layers.0.linear_attn.in_proj_a.weight", (4, 3), next_config, ())
    assert made.tensors == {"layers.0.linear_attn.in_proj_ba.weight": (8, 3)}
    assert made.build(rows[:8])[:, 0].tolist() == [2, 3, 6, 7]


def test_experts_are_stacked_gate_before_up(next_config: TargetConfig):
    made = recipe("layers.0.mlp.experts.gate_up_proj", (2, 4, 3), next_config, ())
    assert list(made.tensors) == [
        f"layers.0.mlp.experts.{e}.{half}.weight" for e in (0, 1) for half in ("gate_proj", "up_proj")
    ]
    parts = [np.full((2, 3), i) for i in range(4)]
    assembled = made.assemble(iter(parts), (2, 4, 3), np.dtype(np.float32))
    assert assembled.dtype == np.float32 and assembled.shape == (2, 4, 3)
    assert assembled[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_a_single_tensor_is_not_copied_unless_it_is_cast():
    stored = np.arange(6, dtype=np.float32).reshape(2, 3)
    kept = Recipe({"x": (2, 3)}).assemble([stored], (2, 3), np.dtype(np.float32))
    assert np.shares_memory(kept, stored)
    cast = Recipe({"x": (2, 3)}).assemble([stored], (2, 3), np.dtype(np.float16))
    assert cast.dtype == np.float16 and cast.tolist() == stored.tolist()


def test_fused_experts_are_taken_as_they_are(next_config: TargetConfig):
    name = "layers.0.mlp.experts.down_proj"
    assert recipe(name, (2, 3, 4), next_config, {name}).tensors == {name: (2, 3, 4)}
    per_expert = recipe(name, (2, 3, 4), next_config, ())
    assert per_expert.tensors == {f"layers.0.mlp.experts.{e}.down_proj.weight": (3, 4) for e in (0, 1)}


def test_convolution_loses_its_middle_axis(next_config: TargetConfig):
    made = recipe("layers.0.linear_attn.conv1d.weight", (4, 8), next_config, ())
    assert made.tensors == {"layers.0.linear_attn.conv1d.weight": (8, 1, 4)}
    assert made.build(np.arange(32).reshape(8, 1, 4))[:, 0].tolist() == [0, 1, 2, 3]
