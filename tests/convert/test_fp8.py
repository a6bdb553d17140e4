"""FP8 checkpoints with blocks of 16: the same parameters as a twin that is stored whole (cases.md A1, A4)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from random_checkpoint import DENSE, HYBRID, MOE, NEXT, Tensors, quantised, random_tensors, write
from recorded import named_parameters
from tiny import DRAFTER, tiny_drafter

import ddtree_jax
from convert.checkpoint import Checkpoint
from convert.fp8 import dequantise
from convert.weights import keep_fp8, load_network, plan
from ddtree_jax.config import TargetConfig, quantised_block
from ddtree_jax.errors import InputError
from ddtree_jax.models import Target
from ddtree_jax.models.network import Network, NetworkSpec
from ddtree_jax.models.quantised import scale_shape

FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}}
FLOAT8 = ml_dtypes.float8_e4m3fn
LAYER = "model.layers.0.linear_attn."
# what the released checkpoints leave in bfloat16
KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b", "conv1d")


def published(name: str) -> bool:
    """Whether the released FP8 checkpoints quantise a tensor."""
    return name.endswith(".weight") and not any(part in name for part in KEPT)


def load(directory: Path, dtype: str = "float32") -> Network:
    checkpoint = Checkpoint(directory)
    spec = NetworkSpec(Target, TargetConfig.from_hf(checkpoint.config), jnp.dtype(dtype))
    return load_network(checkpoint, spec)


def assert_same(ours: Network, theirs: Network) -> None:
    expected = named_parameters(theirs)
    assert ours.spec == theirs.spec and len(ours.leaves) == len(expected)
    for name, value in named_parameters(ours).items():
        assert value.dtype == expected[name].dtype
        assert np.asarray(value).tobytes() == np.asarray(expected[name]).tobytes(), name


# ---- values ----------------------------------------------------------------------------------------------------------


def test_each_block_has_its_scale():
    weight = np.array([[1, 2, 4], [8, 16, 32], [1, 1, 1]], FLOAT8)
    scale = np.array([[0.5, 2], [10, 100]], np.float32)
    assert dequantise(weight, scale, (2, 2)).tolist() == [[0.5, 1, 8], [4, 8, 64], [10, 10, 100]]
    assert dequantise(weight, scale[:, :1], (2, 4)).tolist() == [[0.5, 1, 2], [4, 8, 16], [10, 10, 10]]


def test_every_expert_of_a_fused_tensor_has_its_scales():
    weight = np.array([[[1, 2]], [[4, 8]]], FLOAT8)
    scale = np.array([[[1, 3]], [[5, 7]]], np.float32)
    assert scale_shape((2, 1, 2), (128, 1)) == (2, 1, 2)
    assert dequantise(weight, scale, (128, 1)).tolist() == [[[1, 6]], [[20, 56]]]


@pytest.mark.parametrize(("shape", "expected"), [((128, 256), (1, 2)), ((129, 255), (2, 2)), ((1, 1), (1, 1))])
def test_partial_blocks_have_scales_too(shape: tuple[int, int], expected: tuple[int, int]):
    assert scale_shape(shape, (128, 128)) == expected


@pytest.mark.parametrize("scale_dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("config", [DENSE, MOE, HYBRID, NEXT], ids=["dense", "moe", "hybrid", "next"])
def test_a_quantised_checkpoint_equals_its_twin(tmp_path: Path, config: dict[str, Any], scale_dtype: Any):
    stored, twin = quantised(random_tensors(config), published, scale_dtype=scale_dtype)
    assert any(name.endswith(f"_proj{part}.weight_scale_inv") for name in stored for part in ("", "_qkvz", "_qkv"))
    ours, theirs = write(tmp_path / "fp8", config | FP8, stored), write(tmp_path / "twin", config, twin)
    for dtype in ("float32", "bfloat16"):
        assert_same(load(ours, dtype), load(theirs, dtype))


@pytest.mark.parametrize(
    "names",
    [("in_proj_qkv", "in_proj_z"), ("in_proj_qkv",), ("in_proj_a", "out_proj"), ("q_proj", "down_proj", "lm_head")],
)
def test_half_of_a_layer_may_be_quantised(tmp_path: Path, names: tuple[str, ...]):
    stored, twin = quantised(random_tensors(HYBRID), lambda name: any(f"{part}.weight" in name for part in names))
    whole = {name: x.astype(ml_dtypes.bfloat16) if x.dtype == np.float32 else x for name, x in stored.items()}
    rounded = {
        name: x.astype(ml_dtypes.bfloat16) if whole.get(name, x).dtype != FLOAT8 else x for name, x in twin.items()
    }
    informational = {"modules_to_not_convert": ["lm_head", "model.layers.0.linear_attn.in_proj_a"]}
    config = HYBRID | {"quantization_config": FP8["quantization_config"] | informational}
    assert_same(load(write(tmp_path / "fp8", config, whole)), load(write(tmp_path / "twin", HYBRID, rounded)))


def test_a_packed_projection_is_dequantised_before_it_is_unpacked(tmp_path: Path):
    """Rows of one key head (8 + 8 + 24 + 24) do not align with blocks of 16 once they are sorted by kind."""
    stored, _ = quantised(random_tensors(NEXT), lambda name: "in_proj_qkvz" in name)
    name = LAYER + "in_proj_qkvz.weight"
    whole = dequantise(stored[name], stored[name + "_scale_inv"], (16, 16))
    loaded = named_parameters(load(write(tmp_path, NEXT | FP8, stored)))
    z = np.concatenate([whole[40:64], whole[104:128]])
    np.testing.assert_array_equal(loaded["layers.0.linear_attn.in_proj_z.weight"], z)


def test_scales_are_no_tensors_of_their_own(tmp_path: Path):
    stored, _ = quantised(random_tensors(DENSE), published)
    checkpoint = Checkpoint(write(tmp_path, DENSE | FP8, stored))
    name = "model.layers.1.mlp.up_proj.weight"
    assert set(checkpoint.names()) == set(random_tensors(DENSE))
    assert name in checkpoint.quantised() and "lm_head.weight" not in checkpoint.quantised()
    assert checkpoint.dtype(name) == checkpoint.read(name).dtype == np.float32
    assert checkpoint.shape(name) == checkpoint.read(name).shape == (56, 40)


# ---- kept as FP8 -----------------------------------------------------------------------------------------------------


def as_fp8(directory: Path, dtype: str = "float32") -> Network:
    """Loaded with everything FP8 that can stay so."""
    checkpoint = Checkpoint(directory)
    spec = NetworkSpec(Target, TargetConfig.from_hf(checkpoint.config), jnp.dtype(dtype))
    return load_network(checkpoint, keep_fp8(checkpoint, spec))


def kept(network: Network) -> set[str]:
    return set(network.spec.fp8.names) if network.spec.fp8 else set()


@jax.jit
def logits(network: Network) -> jax.Array:
    module = network.module()
    return module.logits(module(jnp.arange(12)[None])[0])


@pytest.mark.parametrize("config", [DENSE, MOE, HYBRID, NEXT], ids=["dense", "moe", "hybrid", "next"])
def test_kept_weights_give_the_logits_of_dequantised_ones(tmp_path: Path, config: dict[str, Any]):
    directory = write(tmp_path, config | FP8, quantised(random_tensors(config), published)[0])
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2e-2)):
        ours, theirs = as_fp8(directory, dtype), load(directory, dtype)
        np.testing.assert_allclose(logits(ours), logits(theirs), rtol=0, atol=tolerance)
        assert sum(x.nbytes for x in ours.leaves) < sum(x.nbytes for x in theirs.leaves)


def test_kept_weights_are_the_bytes_of_the_file(tmp_path: Path):
    stored = quantised(random_tensors(HYBRID), published)[0]
    made = named_parameters(as_fp8(write(tmp_path, HYBRID | FP8, stored)))
    for name in ("layers.0.linear_attn.in_proj_qkv.weight", "layers.1.self_attn.o_proj.weight"):
        assert made[name].dtype == FLOAT8 and np.asarray(made[name]).tobytes() == stored["model." + name].tobytes()
        scale = np.asarray(made[name + "_scale_inv"])
        np.testing.assert_array_equal(scale, stored[f"model.{name}_scale_inv"].astype(np.float32))


def test_experts_are_stacked_with_their_scales_where_no_block_spans_two(tmp_path: Path):
    """Gate and up projections of 32 rows fill blocks of 16; those of 24 rows do not, and are dequantised."""
    names = {f"layers.{layer}.mlp.experts." + part for layer in (0, 1) for part in ("gate_up_proj", "down_proj")}
    fits, not_so = MOE | {"moe_intermediate_size": 32}, MOE
    for directory, config, expected in ((tmp_path / "a", fits, names), (tmp_path / "b", not_so, {*_downs(names)})):
        write(directory, config | FP8, quantised(random_tensors(config), published)[0])
        ours = as_fp8(directory)
        assert {name for name in kept(ours) if "experts" in name} == expected
        np.testing.assert_allclose(logits(ours), logits(load(directory)), rtol=0, atol=1e-6)
    scale = named_parameters(as_fp8(tmp_path / "a"))["layers.1.mlp.experts.gate_up_proj_scale_inv"]
    stored = quantised(random_tensors(fits), published)[0]
    np.testing.assert_array_equal(
        scale[2, 2:], stored["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"].astype(np.float32)
    )


def _downs(names: set[str]) -> set[str]:
    return {name for name in names if "down" in name}


def test_half_of_a_layer_may_be_kept(tmp_path: Path):
    """cases.md A4; an embedding is looked up, not multiplied, and a head is like any other projection."""
    chosen = ("in_proj_qkv", "in_proj_a", "embed_tokens", "lm_head")
    stored, _ = quantised(random_tensors(HYBRID), lambda name: any(f"{part}.weight" in name for part in chosen))
    ours = as_fp8(write(tmp_path, HYBRID | FP8, stored))
    mixer = "layers.0.linear_attn."
    assert kept(ours) == {mixer + "in_proj_qkv.weight", mixer + "in_proj_a.weight", "lm_head.weight"}
    np.testing.assert_allclose(logits(ours), logits(load(tmp_path)), rtol=0, atol=1e-6)


def test_packed_projections_are_dequantised_all_the_same(tmp_path: Path):
    write(tmp_path, NEXT | FP8, quantised(random_tensors(NEXT), published)[0])
    checkpoint = Checkpoint(tmp_path)
    spec = keep_fp8(checkpoint, NetworkSpec(Target, TargetConfig.from_hf(NEXT), jnp.dtype("float32")))
    mixer = "layers.0.linear_attn."
    assert spec.fp8 and mixer + "out_proj.weight" in spec.fp8.names
    assert {name for name in plan(checkpoint, spec).dequantised() if "linear_attn" in name} == {
        mixer + "in_proj_qkv.weight",
        mixer + "in_proj_z.weight",
    }


@pytest.mark.slow
def test_the_same_tokens_whatever_is_kept(tmp_path: Path):
    """Plain and tree decoding, in the device loop with its donated caches."""
    directory = write(tmp_path, HYBRID | FP8, quantised(random_tensors(HYBRID), published)[0])
    options: dict[str, Any] = dict(prompt_ids=[[1, 2, 3], [7, 5]], max_new_tokens=12, stop_ids=[])
    drafter = tiny_drafter(config=replace(DRAFTER, hidden_size=40, vocab_size=40, mask_token_id=39))
    outputs = []
    for keep, methods in ((True, ("ar", "ddtree")), (False, ("ar",))):
        model = replace(ddtree_jax.load(directory, dtype="float32", keep_fp8=keep), drafter=drafter)
        assert bool(model.target.spec.fp8) == keep
        for method in methods:
            results = ddtree_jax.generate(model, method=method, tree_budget=6, **options)
            outputs.append([result.output_ids for result in results])
    assert [len(ids) for ids in outputs[0]] == [15, 14]
    assert all(other == outputs[0] for other in outputs)


def test_keeping_needs_something_to_keep(tmp_path: Path):
    write(tmp_path, DENSE, random_tensors(DENSE))
    with pytest.raises(InputError, match="has no FP8 weights that could be kept; load without keep_fp8"):
        ddtree_jax.load(tmp_path, keep_fp8=True)


# ---- what cannot be read ---------------------------------------------------------------------------------------------

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def spoilt(tmp_path: Path, config: dict[str, Any] = DENSE | FP8, **changes: np.ndarray | None) -> dict[str, list[str]]:
    """What plan() says of a quantised checkpoint in which UP, DOWN or their scales are changed; None removes one."""
    tensors: Tensors = quantised(random_tensors(DENSE), published)[0]
    names = {"up": UP, "up_scale": UP + "_scale_inv", "down": DOWN, "down_scale": DOWN + "_scale_inv"}
    changed = tensors | {names[key]: value for key, value in changes.items()}
    kept = {name: value for name, value in changed.items() if value is not None}
    checkpoint = Checkpoint(write(tmp_path, config, kept))
    return plan(checkpoint, NetworkSpec(Target, TargetConfig.from_hf(DENSE), jnp.dtype("float32"))).problems


def test_missing_scales_and_lone_scales_are_listed_with_all_else(tmp_path: Path):
    assert spoilt(tmp_path, up_scale=None, down=None) == {
        "missing": ["layers.0.mlp.down_proj.weight"],
        "fp8 without a scale": [UP],
        "scale without a tensor": [DOWN + "_scale_inv"],
    }
    with pytest.raises(InputError, match=f"fp8 without a scale: {UP}; scale without a tensor: {DOWN}_scale_inv$"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up_scale": np.ones((4, 2), np.float32)}, "is [4, 2] for a tensor of [56, 40] in blocks of [16, 16]"),
        ({"up_scale": np.ones((3, 3), np.float32)}, "is [3, 3] for a tensor of [56, 40]"),
        ({"up_scale": np.ones(12, np.float32)}, "is [12] for"),
        ({"up_scale": np.ones((4, 3), np.int32)}, "is int32"),
        ({"up_scale": np.ones((4, 3), FLOAT8)}, "is float8_e4m3fn"),
        ({"up": np.ones((56, 40), np.float32)}, "belongs to a tensor of float32, not float8_e4m3fn"),
        ({"up": np.ones((56, 40), ml_dtypes.float8_e5m2)}, "belongs to a tensor of float8_e5m2"),
    ],
)
def test_scales_that_do_not_fit(tmp_path: Path, changes: dict[str, np.ndarray], message: str):
    problems = spoilt(tmp_path, **changes)
    assert list(problems) == ["scale"] and len(problems["scale"]) == 1
    assert problems["scale"][0].startswith(f"{UP}_scale_inv {message}")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.5])
def test_scales_are_finite_and_not_negative(tmp_path: Path, value: float):
    scale = np.ones((4, 3), ml_dtypes.bfloat16)
    scale[3, 1] = value
    first = f"has 1 values that are negative or not finite, the first is {value}"
    assert spoilt(tmp_path, up_scale=scale) == {"scale": [f"{UP}_scale_inv {first}"]}


def test_scales_need_a_block_size(tmp_path: Path):
    problems = spoilt(tmp_path, DENSE)
    assert f"{UP}_scale_inv is there, but config.json has no quantization_config" in problems["scale"]


def test_families_that_are_left_out_may_be_broken(tmp_path: Path):
    tensors, twin = quantised(random_tensors(DENSE), published)
    extra = {"mtp.fc.weight": np.ones((2, 2), FLOAT8), "mtp.x.weight_scale_inv": np.ones((1, 1), np.float32)}
    ours, theirs = write(tmp_path / "a", DENSE | FP8, tensors | extra), write(tmp_path / "b", DENSE, twin)
    assert_same(load(ours), load(theirs))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quant_method": "awq"}, "weights quantised by 'awq' are not implemented"),
        ("int8", "weights quantised by 'int8' are not implemented"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not implemented"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme = 'static' is not implemented"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size should be two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size should be two sizes"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size should be list"),
    ],
)
def test_other_quantisations_are_refused(found: Any, message: str):
    for config in (DENSE | {"quantization_config": found}, {"text_config": {"quantization_config": found}}):
        with pytest.raises(InputError, match=message):
            quantised_block(config)
    with pytest.raises(InputError, match=f"target config.json: .*{message}"):
        TargetConfig.from_hf(DENSE | {"quantization_config": found})


def test_block_sizes():
    assert quantised_block({}) is None
    assert quantised_block(DENSE | {"quantization_config": None, "text_config": None}) is None
    assert quantised_block({"quantization_config": {"quant_method": "fp8"}}) == (128, 128)
    assert quantised_block(FP8) == (16, 16)
