"""Tensors into networks: names, prefixes, families left out, tied heads; no parameter keeps an initial value."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hf_directory import random_network, stored_tensors, target_json, target_tensors, write_drafter, write_json
from safetensors.numpy import save_file
from tiny import DENSE, DRAFTER, HYBRID

from convert.checkpoint import Checkpoint
from convert.weights import load_network, skipped
from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.network import Network, NetworkSpec

SMALL = dataclasses.replace(HYBRID, layer_types=HYBRID.layer_types[2:])  # one layer of each kind
TIED = dataclasses.replace(SMALL, tie_word_embeddings=True)
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

Load = Callable[..., Network]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes tensors with a config and loads them."""

    def run(tensors: dict[str, np.ndarray], config: TargetConfig = SMALL, dtype: str = "float32") -> Network:
        write_json(tmp_path / "config.json", target_json(config))
        save_file(tensors, tmp_path / "model.safetensors")
        return load_network(Checkpoint(tmp_path), NetworkSpec(Target, config, jnp.dtype(dtype)))

    return run


@pytest.fixture(scope="module")
def network() -> Network:
    return random_network(SMALL, 3)


@pytest.fixture(scope="module")
def tensors(network: Network) -> dict[str, np.ndarray]:
    return target_tensors(network)


def assert_same(ours: Network, theirs: Network) -> None:
    assert ours.spec == theirs.spec
    assert len(ours.leaves) == len(theirs.leaves)
    for a, b in zip(ours.leaves, theirs.leaves, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@jax.jit
def logits(network: Network) -> jax.Array:
    module = network.module()
    return module.logits(module(jnp.arange(10)[None])[0])


# ---- names and values ------------------------------------------------------------------------------------------------


def test_names_and_shapes_on_disk_are_those_of_hugging_face(tensors: dict[str, np.ndarray]):
    layer = "model.layers.0.linear_attn."
    assert {name: x.shape for name, x in tensors.items() if name.startswith(layer)} == {
        layer + "A_log": (4,),
        layer + "dt_bias": (4,),
        layer + "conv1d.weight": (160, 1, 4),
        layer + "norm.weight": (24,),
        layer + "in_proj_qkv.weight": (160, 48),
        layer + "in_proj_z.weight": (96, 48),
        layer + "in_proj_a.weight": (4, 48),
        layer + "in_proj_b.weight": (4, 48),
        layer + "out_proj.weight": (48, 96),
    }
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (256, 48)  # query and gate
    assert tensors[HEAD].shape == tensors[EMBEDDING].shape == (13, 48)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_every_prefix_gives_the_same_logits(load: Load, network: Network, prefix: str):  # cases.md A5
    loaded = load(target_tensors(network, prefix))
    assert_same(loaded, network)
    np.testing.assert_array_equal(logits(loaded), logits(network))


def test_old_exports_prefix_the_head_too(load: Load, network: Network, tensors: dict[str, np.ndarray]):
    assert_same(load({"language_model." + name: x for name, x in tensors.items()}), network)


def test_no_parameter_keeps_an_initial_value(load: Load, tensors: dict[str, np.ndarray]):
    distinct = {name: np.full(x.shape, i + 2.5, np.float32) for i, (name, x) in enumerate(sorted(tensors.items()))}
    loaded = stored_tensors(load(distinct))
    assert len(loaded) == len(distinct)
    for name, value in distinct.items():
        np.testing.assert_array_equal(loaded[name.removeprefix("model.")], value)


@pytest.mark.parametrize(
    ("config", "layers"), [(HYBRID, 12), (DENSE, 11)], ids=["hybrid", "dense"]
)  # from 11 on, "10" sorts before "2" as text
def test_leaves_are_in_the_order_of_jax(load: Load, config: TargetConfig, layers: int):
    config = dataclasses.replace(config, layer_types=(config.layer_types * 4)[:layers], hidden_size=8)
    network = random_network(config, 4)
    loaded = load(target_tensors(network), config)
    assert_same(loaded, network)
    live = nnx.state(loaded.module(), nnx.Param)
    for leaf, placed in zip(jax.tree.leaves(live), loaded.leaves, strict=True):
        np.testing.assert_array_equal(leaf, placed)
    tenth = loaded.module().layers[10].mlp.down_proj.weight[...]
    np.testing.assert_array_equal(tenth, target_tensors(network)["model.layers.10.mlp.down_proj.weight"])


def test_drafters_load_too(tmp_path: Path):
    network = random_network(DRAFTER, 5)
    write_drafter(tmp_path, network)
    checkpoint = Checkpoint(tmp_path)
    config = DrafterConfig.from_hf(checkpoint.config)
    assert config == DRAFTER
    assert_same(load_network(checkpoint, NetworkSpec(Drafter, config, jnp.dtype("float32"))), network)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_any_floating_dtype_is_cast_to_the_modules_own(load: Load, tensors: dict[str, np.ndarray], stored: type):
    narrow = {name: x.astype(stored) for name, x in tensors.items()}
    for name, x in stored_tensors(load(narrow)).items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, narrow.get(name, narrow.get("model." + name)).astype(np.float32))


def test_a_bfloat16_model_keeps_float32_where_hugging_face_computes_in_it(
    load: Load, tensors: dict[str, np.ndarray]
):  # cases.md B10
    loaded = stored_tensors(load(tensors, dtype="bfloat16"))
    float32 = {name for name, x in loaded.items() if x.dtype == np.float32}
    assert float32 == {f"layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias", "norm.weight")}
    for name, x in loaded.items():
        stored = tensors.get("model." + name, tensors.get(name))
        assert x.tobytes() == stored.astype(x.dtype).tobytes()


def test_packed_weights_are_refused(load: Load, tensors: dict[str, np.ndarray]):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(InputError, match="not floating point: layers.1.mlp.up_proj.weight is int8$"):
        load(tensors | {name: tensors[name].astype(np.int8)})


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_at_once(load: Load, tensors: dict[str, np.ndarray]):
    wrong = dict(tensors)
    del wrong["model.norm.weight"], wrong["model.layers.0.linear_attn.A_log"]
    wrong["model.layers.1.self_attn.q_proj.lora_a"] = np.ones((2, 1), np.float32)
    wrong["model.layers.2.input_layernorm.weight"] = np.ones(48, np.float32)
    wrong["model.layers.1.mlp.up_proj.weight"] = np.ones((48, 64), np.float32)
    wrong["model.layers.0.linear_attn.conv1d.weight"] = np.ones((160, 4), np.float32)
    wrong[HEAD] = wrong[HEAD][:-1]
    with pytest.raises(InputError) as caught:
        load(wrong)
    assert str(caught.value).endswith(
        "does not fit Target: missing: layers.0.linear_attn.A_log, norm.weight; "
        "unknown: layers.1.self_attn.q_proj.lora_a, layers.2.input_layernorm.weight; "
        "shape: layers.0.linear_attn.conv1d.weight is [160, 4], should be [160, 1, 4], "
        "layers.1.mlp.up_proj.weight is [48, 64], should be [64, 48], "
        "lm_head.weight is [12, 48], should be [13, 48]"
    )


def test_two_spellings_of_one_parameter_are_refused(load: Load, tensors: dict[str, np.ndarray]):
    twice = tensors | {"model.language_model.norm.weight": tensors["model.norm.weight"]}
    with pytest.raises(InputError, match="are the same parameter"):
        load(twice)


def test_vision_and_mtp_are_skipped_and_counted(
    load: Load, network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
):  # cases.md A6
    one = np.ones(1, np.float32)
    extra = {f"model.visual.blocks.{i}.norm1.weight": one for i in range(3)}
    extra |= {"mtp.fc.weight": one, "mtp.norm.weight": one, "visual.merger.norm.weight": one}
    with caplog.at_level(logging.INFO):
        assert_same(load(target_tensors(network, "model.language_model.") | extra), network)
    assert skipped(Checkpoint(tmp_path), SMALL) == {"model.visual.": 3, "mtp.": 2, "visual.": 1}
    assert "{'model.visual.': 3, 'mtp.': 2, 'visual.': 1}" in caplog.text


@pytest.mark.parametrize(
    "name", ["model.mtp.fc.weight", "mtpx.weight", "model.vision.x", "model.layers.0.visual.x", "t2d"]
)
def test_nothing_else_is_skipped(load: Load, tensors: dict[str, np.ndarray], name: str):
    with pytest.raises(InputError, match=f"unknown: {name.removeprefix('model.')}$"):
        load(tensors | {name: np.ones(1, np.float32)})


# ---- tied embeddings (cases.md A8) -----------------------------------------------------------------------------------


def test_untied_with_a_head_uses_the_head(load: Load, tensors: dict[str, np.ndarray]):
    head = stored_tensors(load(tensors))[HEAD]
    np.testing.assert_array_equal(head, tensors[HEAD])
    assert not np.array_equal(head, tensors[EMBEDDING])


def test_untied_without_a_head_is_refused(load: Load, tensors: dict[str, np.ndarray]):
    with pytest.raises(InputError, match="missing: lm_head.weight$"):
        load({name: x for name, x in tensors.items() if name != HEAD})


def test_tied_without_a_head_uses_the_embedding(load: Load, tensors: dict[str, np.ndarray]):
    loaded = load({name: x for name, x in tensors.items() if name != HEAD}, TIED)
    assert HEAD not in stored_tensors(loaded)
    hidden = np.eye(48, dtype=np.float32)[None, :5]
    np.testing.assert_array_equal(loaded.module().logits(jnp.asarray(hidden))[0], tensors[EMBEDDING].T[:5])


def test_tied_with_a_head_needs_the_same_values(load: Load, tensors: dict[str, np.ndarray]):
    same = load(tensors | {HEAD: tensors[EMBEDDING]}, TIED)
    np.testing.assert_array_equal(stored_tensors(same)["embed_tokens.weight"], tensors[EMBEDDING])
    with pytest.raises(InputError, match="tie_word_embeddings is true, but lm_head.weight differs from model.embed"):
        load(tensors, TIED)
    with pytest.raises(InputError, match="tie_word_embeddings is true"):
        load(tensors | {HEAD: tensors[EMBEDDING][:-1]}, TIED)


# ---- recorded checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied", "qwen3_5", "qwen3_5_tied", "qwen3_5_dv24"])
def test_recorded_targets_are_read_whole(golden: Callable[[str], Path], name: str):
    checkpoint = Checkpoint(golden(name))
    network = load_network(
        checkpoint, NetworkSpec(Target, TargetConfig.from_hf(checkpoint.config), jnp.dtype("float32"))
    )
    loaded = target_tensors(network)
    assert loaded.keys() == set(checkpoint.names())
    for tensor, value in loaded.items():
        np.testing.assert_array_equal(value, checkpoint.read(tensor))


def test_recorded_tensor_lists_agree(shared: Path):
    listed = json.loads((shared / "golden" / "hf" / "qwen3_5.tensors.json").read_text())
    checkpoint = Checkpoint(shared / "golden" / "hf" / "qwen3_5")
    assert len(listed) == 109
    assert {name: ["F32", list(checkpoint.shape(name))] for name in checkpoint.names()} == listed
