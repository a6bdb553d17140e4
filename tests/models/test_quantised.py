"""FP8 weights in the products: the same numbers as dequantised ones, and no more than one layer's of them at once."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from random_checkpoint import DENSE

from convert import fp8
from ddtree_jax.config import TargetConfig
from ddtree_jax.models import Target
from ddtree_jax.models.network import NetworkSpec
from ddtree_jax.models.quantised import Quantised, dequantise, scale_shape

BLOCK = (128, 128)
WIDE: dict[str, Any] = DENSE | {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 128}
LARGEST = 256 * 1024 * 4  # bytes of a float32 feed-forward matrix


def spec_of(layers: int) -> NetworkSpec:
    """A dense network whose projections are FP8."""
    spec = NetworkSpec(Target, TargetConfig.from_hf(WIDE | {"num_hidden_layers": layers}), jnp.dtype("float32"))
    return replace(spec, fp8=Quantised(tuple(name for name in spec.parameters() if "_proj" in name), BLOCK))


@pytest.mark.parametrize("shape", [(5, 7), (4, 6), (1, 1), (3, 5, 7)], ids=str)
def test_the_device_dequantises_as_the_converter_does(shape: tuple[int, ...]):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, scale_shape(shape, (2, 3))).astype(np.float32)
    whole = fp8.dequantise(weight, scale, (2, 3))
    for dtype in (jnp.float32, jnp.bfloat16):
        made = np.asarray(dequantise(jnp.asarray(weight), jnp.asarray(scale), (2, 3), dtype))
        np.testing.assert_array_equal(made, whole.astype(dtype))


def test_kept_parameters_have_their_type_and_scales_and_the_others_stay():
    spec = spec_of(1)
    kept, plain = spec.parameters(), replace(spec, fp8=None).parameters()
    name = "layers.0.mlp.down_proj.weight"
    assert kept.keys() - plain.keys() == {f"layers.0.{part}.weight_scale_inv" for part in PROJECTIONS}
    assert (kept[name].dtype, kept[name].shape) == (jnp.float8_e4m3fn, (256, 1024))
    assert (kept[name + "_scale_inv"].dtype, kept[name + "_scale_inv"].shape) == (jnp.float32, (2, 8))
    assert kept["embed_tokens.weight"].dtype == jnp.float32


PROJECTIONS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


def forward(spec: NetworkSpec, leaves: tuple[jax.Array, ...], ids: jax.Array) -> jax.Array:
    module = spec.bind(leaves)
    return module.logits(module(ids)[0])


def temporary(spec: NetworkSpec, rounds: int) -> int:
    """Bytes of temporary memory of some greedy passes in a loop on the device."""

    def run(leaves, ids):
        def again(_, ids):
            return jnp.argmax(forward(spec, leaves, ids), -1).astype(jnp.int32)

        return jax.lax.fori_loop(0, rounds, again, ids)

    leaves = tuple(jax.tree.leaves(spec.abstract()[1]))
    analysis = jax.jit(run).lower(leaves, jax.ShapeDtypeStruct((1, 4), jnp.int32)).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("rounds", [1, 5], ids=["pass", "loop"])
def test_one_layer_at_a_time_is_dequantised(rounds: int):
    few, many = temporary(spec_of(2), rounds), temporary(spec_of(6), rounds)
    assert LARGEST <= few < 2.2 * LARGEST  # the two matrices that take the same input
    assert many < 1.05 * few
