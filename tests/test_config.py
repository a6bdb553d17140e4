"""config.json into configurations: literal values of recorded checkpoints, both schemas, and everything refused; what
the figures mean to the networks (rotary, taps, the shared head).
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_directory import drafter_json, random_network, target_json
from tiny import DENSE, DFLASH2, DRAFTER, HYBRID

from ddtree_jax.config import (
    FULL,
    LINEAR,
    AttentionConfig,
    BlockConvConfig,
    BlockRule,
    DeltaConfig,
    DrafterConfig,
    RopeConfig,
    SelectorConfig,
    TargetConfig,
    YarnScaling,
)
from ddtree_jax.errors import InputError
from ddtree_jax.models.layers import rope_angles, rotate
from ddtree_jax.models.network import Network

HYBRID_JSON, DENSE_JSON, DRAFTER_JSON = target_json(HYBRID), target_json(DENSE), drafter_json(DRAFTER)
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL_2, GATED = RopeConfig(1e6, 32), RopeConfig(1e7, 8)

RECORDED = {
    "qwen3": TargetConfig(
        model_type="qwen3",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        layer_types=(FULL,) * 4,
        attention=AttentionConfig(4, 2, 32, RopeConfig(1e6, 32), gated=False),
        delta=None,
        norm_eps=1e-6,
        zero_centred_norm=False,
        tie_word_embeddings=False,
        max_positions=4096,
    ),
    "qwen3_5": TargetConfig(
        model_type="qwen3_5_text",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 2,
        attention=AttentionConfig(4, 2, 32, RopeConfig(1e7, 8), gated=True),
        delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_taps=4),
        norm_eps=1e-6,
        zero_centred_norm=True,
        tie_word_embeddings=False,
        max_positions=4096,
    ),
    "dflash_qwen3": DrafterConfig(
        hidden_size=64,
        intermediate_size=96,
        attention=AttentionConfig(4, 2, 32, RopeConfig(1e6, 32), gated=False),
        rules=(BlockRule.BIDIRECTIONAL, BlockRule.BIDIRECTIONAL),
        windows=(None, None),
        norm_eps=1e-6,
        block_size=8,
        mask_token_id=511,
        target_layer_ids=(0, 1, 2),
        num_target_layers=4,
        vocab_size=512,
    ),
    "dflash_qwen3_5_swa": DrafterConfig(
        hidden_size=64,
        intermediate_size=96,
        attention=AttentionConfig(4, 2, 32, RopeConfig(1e7, 32), gated=False),
        rules=(BlockRule.CAUSAL, BlockRule.CAUSAL, BlockRule.BIDIRECTIONAL),
        windows=(16, 16, None),
        norm_eps=1e-6,
        block_size=8,
        mask_token_id=511,
        target_layer_ids=(0, 2, 4, 6),
        num_target_layers=8,
        vocab_size=512,
    ),
}
RECORDED["dflash2_qwen3"] = dataclasses.replace(
    RECORDED["dflash_qwen3"],
    windows=(16, 16),
    conv=BlockConvConfig(taps=2, group_size=16),
    selector=SelectorConfig(rank=16, top_k=16),
)
RECORDED["qwen3_tied"] = dataclasses.replace(RECORDED["qwen3"], tie_word_embeddings=True)
RECORDED["qwen3_5_tied"] = dataclasses.replace(
    RECORDED["qwen3_5"], tie_word_embeddings=True, intermediate_size=96, layer_types=(LINEAR, LINEAR, LINEAR, FULL)
)
RECORDED["qwen3_5_dv24"] = dataclasses.replace(
    RECORDED["qwen3_5_tied"], tie_word_embeddings=False, delta=DeltaConfig(2, 6, 16, 24, 4)
)

# As published: the configuration of Qwen3.5-4B (reference_models.md 1.9).
QWEN3_5_4B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24},
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}


def target(**changes: Any) -> TargetConfig:
    """The hybrid's config.json with changes; ... removes a key."""
    return TargetConfig.from_hf(changed(HYBRID_JSON, changes))


def drafter(**changes: Any) -> DrafterConfig:
    return DrafterConfig.from_hf(changed(DRAFTER_JSON, changes))


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | changes).items() if value is not ...}


def flat_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The same in the schema of transformers 4."""
    rope = {key: value for key, value in config["rope_parameters"].items() if key != "rope_type"}
    return changed(config, {"rope_parameters": ..., "rope_scaling": None, **rope})


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_configurations(golden: Callable[[str], Path], name: str):
    read = type(RECORDED[name]).from_hf(json.loads((golden(name) / "config.json").read_text()))
    assert read == RECORDED[name]


def test_a_published_configuration_of_a_vision_language_model():
    read = TargetConfig.from_hf(QWEN3_5_4B)
    assert read == TargetConfig(
        model_type="qwen3_5_text",
        vocab_size=248320,
        hidden_size=2560,
        intermediate_size=9216,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 8,
        attention=AttentionConfig(16, 4, 256, RopeConfig(1e7, 64), gated=True),
        delta=DeltaConfig(16, 32, 128, 128, 4),
        norm_eps=1e-6,
        zero_centred_norm=True,
        tie_word_embeddings=True,
        max_positions=262144,
    )
    assert (read.num_layers, read.delta.channels, read.delta.value_width) == (32, 8192, 4096)


def test_what_is_written_is_read_back():
    assert TargetConfig.from_hf(HYBRID_JSON) == HYBRID
    assert TargetConfig.from_hf(DENSE_JSON) == DENSE
    assert DrafterConfig.from_hf(DRAFTER_JSON) == DRAFTER


def test_layer_pattern_without_a_list():
    read = target(layer_types=..., num_hidden_layers=9, full_attention_interval=3)
    assert read.layer_types == (LINEAR, LINEAR, FULL) * 3
    assert target(layer_types=None, num_hidden_layers=5).layer_types == (LINEAR, LINEAR, LINEAR, FULL, LINEAR)
    assert TargetConfig.from_hf(changed(DENSE_JSON, {"layer_types": ...})).layer_types == (FULL,) * 3


def test_defaults_of_absent_keys():
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"), ...)
    read = target(hidden_size=64, **absent)
    assert (read.attention.num_kv_heads, read.attention.head_dim, read.attention.rope.rotary_dim) == (4, 16, 4)
    assert read.norm_eps == 1e-6 and read.tie_word_embeddings is False
    without_factor = {"rope_theta": 1e4}
    assert target(rope_parameters=without_factor).attention.rope == RopeConfig(1e4, 8)
    assert TargetConfig.from_hf(DENSE_JSON | {"rope_parameters": without_factor}).attention.rope == RopeConfig(1e4, 16)


def test_the_inner_tie_flag_wins_over_the_outer():
    inner = QWEN3_5_4B["text_config"] | {"tie_word_embeddings": False}
    assert TargetConfig.from_hf(QWEN3_5_4B | {"text_config": inner}).tie_word_embeddings is False
    assert TargetConfig.from_hf(QWEN3_5_4B | {"tie_word_embeddings": None}).tie_word_embeddings is False


# ---- rotary embeddings -----------------------------------------------------------------------------------------------


def test_flat_and_nested_rope_are_the_same():  # cases.md A11
    for config, read in ((HYBRID_JSON, TargetConfig), (DENSE_JSON, TargetConfig), (DRAFTER_JSON, DrafterConfig)):
        assert "rope_parameters" in config and "rope_theta" in flat_rope(config)
        assert read.from_hf(flat_rope(config)) == read.from_hf(config)


@pytest.mark.parametrize("config", [HYBRID_JSON, flat_rope(HYBRID_JSON)], ids=["nested", "flat"])
def test_a_missing_theta_is_an_error(config: dict[str, Any]):
    without = changed(config, {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}})
    with pytest.raises(InputError, match="^target config.json: rope_theta is missing$"):
        TargetConfig.from_hf(without)
    with pytest.raises(InputError, match="^drafter config.json: rope_theta is missing$"):
        drafter(rope_parameters=...)


def test_rope_types_that_are_not_implemented(golden: Callable[[str], Path]):
    for scaling in ({"rope_type": "dynamic", "factor": 4.0}, {"type": "linear", "factor": 2.0}):
        with pytest.raises(InputError, match="rope type '(dynamic|linear)' is not implemented"):
            TargetConfig.from_hf(flat_rope(HYBRID_JSON) | {"rope_scaling": scaling})
    plain = flat_rope(HYBRID_JSON) | {"rope_scaling": {"type": "default"}}
    assert TargetConfig.from_hf(plain) == HYBRID


def test_rope_scalings_are_read_whole_or_not_at_all(golden: Callable[[str], Path]):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = TargetConfig.from_hf(flat_rope(HYBRID_JSON) | {"rope_scaling": yarn})
    # 0.1 ln 4 + 1
    assert scaled.attention.rope.scaling == YarnScaling(4.0, 32768, 32.0, 1.0, pytest.approx(1.138629436, abs=1e-9))
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    problems = "low_freq_factor is missing; high_freq_factor is missing; original_max_position_embeddings is missing"
    with pytest.raises(InputError, match=problems):
        target(rope_parameters=llama3)
    both = {"rope_parameters": HYBRID_JSON["rope_parameters"], "rope_scaling": yarn}
    with pytest.raises(InputError, match="rope type is given as 'default' and 'yarn'"):
        target(**both)


def test_partial_rotary_at_high_positions():  # cases.md A12
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 32)).astype(np.float32)  # B N heads D, of which 8 are rotated
    position = np.array([[0, 1, 501], [700, 4095, 8191]])
    rotated = np.asarray(rotate(jnp.asarray(x), rope_angles(jnp.asarray(position), GATED, jnp.float32)))
    np.testing.assert_array_equal(rotated[..., 8:], x[..., 8:])
    angle = position[..., None] * 1e7 ** (-np.arange(0, 8, 2) / 8)  # float64
    cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    a, b = x[..., :4].astype(np.float64), x[..., 4:8].astype(np.float64)
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    # the error of an angle in float32 grows with the position: about 6e-8 of it
    np.testing.assert_allclose(rotated[..., :8], expected, atol=3e-3)
    np.testing.assert_allclose(rotated[0, ..., :8], expected[0], atol=2e-4)
    assert np.abs(rotated[0, 2, :, :8] - x[0, 2, :, :8]).max() > 0.5


def test_every_dimension_is_rotated_where_the_factor_is_one():
    x = jnp.ones((1, 1, 1, 32))
    rotated = rotate(x, rope_angles(jnp.array([[600]]), FULL_2, jnp.float32))
    assert int(jnp.sum(jnp.abs(rotated - x) > 1e-6)) == 32


# ---- layers with experts ---------------------------------------------------------------------------------------------


def moe(**changes: Any) -> TargetConfig:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_hidden_layers=6)
    return TargetConfig.from_hf(
        changed(DENSE_JSON, {"layer_types": ..., "model_type": "qwen3_moe", **experts, **changes})
    )


def test_which_layers_have_experts():
    """Layer i does where i + 1 is a multiple of decoder_sparse_step, unless mlp_only_layers names it."""

    def layers(**changes: Any) -> list[int]:
        config = moe(**changes)
        return [i for i in range(config.num_layers) if config.has_experts(i)]

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(decoder_sparse_step=3) == [2, 5]
    assert layers(mlp_only_layers=[0, 4]) == [1, 2, 3, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]


@pytest.mark.parametrize("found", [[6], [-1], [1.0], [True], ["0"], [[0]]])
def test_layers_without_experts_have_to_be_there(found: list[Any]):
    with pytest.raises(InputError, match="mlp_only_layers should be layer numbers from 0 to 5, found"):
        moe(mlp_only_layers=found)


def test_experts_are_countable():
    with pytest.raises(InputError, match="num_experts should be at most 65536, found 65537"):
        moe(num_experts=65537)


# ---- targets that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "unknown target architecture 'gpt2'; this version reads llama, qwen3, qwen3_moe, qwen3_next, qwen3_5, ",
        ),
        ({"model_type": "qwen3_5_moe_text"}, "num_experts is missing; num_experts_per_tok is missing; moe_inter"),
        ({"model_type": ...}, "unknown target architecture None"),
        ({"model_type": ["qwen3"]}, "unknown target architecture"),
        ({"architectures": ["DFlashDraftModel"]}, "this is a DFlash drafter, not a target"),
        ({"text_config": [1]}, "text_config should be an object"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented \\(only 'silu'\\)"),
        ({"attention_bias": True}, "attention_bias = True is not implemented"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not implemented"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not implemented"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not implemented"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq' are not implemented"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"vocab_size": "13"}, "vocab_size should be int, found '13'"),
        ({"vocab_size": True}, "vocab_size should be int, found True"),
        ({"hidden_size": 48.0}, "hidden_size should be int, found 48.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers should be at least 1, found 0"),
        ({"num_hidden_layers": 5}, "layer_types has 4 entries for num_hidden_layers = 5"),
        ({"layer_types": [LINEAR] * 3}, "layer_types has 3 entries for num_hidden_layers = 4"),
        ({"layer_types": [LINEAR] * 3 + ["sliding_attention"]}, "layer types \\['sliding_attention'\\] are not impl"),
        ({"layer_types": FULL}, "layer_types should be list, found 'full_attention'"),
        ({"layer_types": [[FULL]] * 4}, "layer_types should be a list of names"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is not a multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": ...}, "linear_key_head_dim is missing"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim should be at least 2"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps should be float, found '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps should be above 0 and finite, found nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings should be bool, found 'yes'"),
        ({"rope_parameters": [1e4]}, "rope_parameters should be an object"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta should be float, found '1e4'"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta should be above 0 and finite, found -1"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "rotates 48 of 32 dimensions"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "rotates 3 of 32 dimensions"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0}}, "partial_rotary_factor should be above"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta should be above 0 and finite, found inf"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": ["yarn"]}}, "rope type \\['yarn'\\] is not implemented"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": {}}}, "rope type {} is not implemented"),
        ({"rope_theta": 2e4}, "rope_theta is given as 10000.0 and 20000.0"),
        ({"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta should be above 1 for yarn, found 1.0"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor = 1.0 should be below high_freq_fact"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps should be above 0 and finite, found inf"),
        ({"vocab_size": 2**40 + 1}, "vocab_size should be at most 1099511627776, found 1099511627777"),
        ({"num_hidden_layers": 10_001, "layer_types": ...}, "num_hidden_layers should be at most 10000, found 10001"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not implemented"),
    ],
)
def test_targets_that_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        target(**changes)


def test_all_problems_are_listed_once_each():
    with pytest.raises(InputError) as caught:
        target(hidden_size=..., head_dim=..., hidden_act="relu", max_position_embeddings=None, attention_bias=True)
    assert str(caught.value) == (
        "target config.json: hidden_act = 'relu' is not implemented (only 'silu'); "
        "attention_bias = True is not implemented (only False); hidden_size is missing; "
        "partial_rotary_factor = 0.25 rotates 0 of 1 dimensions; "
        "max_position_embeddings should be int, found None"
    )


def test_dense_targets_have_full_attention_only():
    with pytest.raises(InputError, match="linear_attention'\\] are not implemented for this architecture"):
        TargetConfig.from_hf(DENSE_JSON | {"layer_types": [FULL, LINEAR, FULL]})


@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention", ""])
def test_a_layer_that_cannot_be_verified_as_a_tree_is_refused(kind: str):  # cases.md C6
    with pytest.raises(InputError, match="cannot be decoded as a tree"):
        dataclasses.replace(HYBRID, layer_types=(LINEAR, kind))
    with pytest.raises(InputError, match="need a DeltaConfig"):
        dataclasses.replace(HYBRID, delta=None)


# ---- drafters --------------------------------------------------------------------------------------------------------


def test_both_schemas_of_a_drafter_are_the_same():
    legacy = flat_rope(DRAFTER_JSON) | DRAFTER_JSON["dflash_config"]
    assert DrafterConfig.from_hf(changed(legacy, {"dflash_config": ...})) == DRAFTER
    half = changed(legacy, {"dflash_config": {"mask_token_id": 12, "target_layer_ids": [0, 1]}, "mask_token_id": 5})
    assert DrafterConfig.from_hf(half) == DRAFTER  # the inner value wins


@pytest.mark.parametrize("schema", ["flat", "nested"])
def test_a_drafters_yarn_is_what_its_config_says(schema: str):  # cases.md A14
    """null is plain rope, and YaRN another one: nothing is stretched because some revision of the drafter was."""
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    base = flat_rope(DRAFTER_JSON)
    configs = {
        "flat": (base | {"rope_scaling": None}, base | {"rope_scaling": yarn}),
        "nested": (DRAFTER_JSON, DRAFTER_JSON | {"rope_parameters": DRAFTER_JSON["rope_parameters"] | yarn}),
    }
    plain, stretched = (DrafterConfig.from_hf(config).attention.rope for config in configs[schema])
    assert plain == DRAFTER.attention.rope and plain.scaling is None
    assert stretched.scaling == YarnScaling(64.0, 4096, 32.0, 1.0, pytest.approx(0.1 * np.log(64) + 1))
    position = jnp.array([[700]])
    turned, other = (rope_angles(position, rope, jnp.float32) for rope in (plain, stretched))
    assert np.abs(np.asarray(turned) - np.asarray(other)).max() > 0.1


def test_dflash2():
    config = DrafterConfig.from_hf(drafter_json(DFLASH2))
    assert (config.conv, config.selector) == (BlockConvConfig(2, 8), SelectorConfig(rank=6, top_k=5))
    assert config == DFLASH2
    assert DFLASH2 == dataclasses.replace(DRAFTER, conv=config.conv, selector=config.selector)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": ...}, "^drafter config.json: conv_kernel_size is missing$"),
        ({"conv_group_size": 7}, "hidden_size is not a multiple of conv_group_size = 7"),
        ({"selector_rank": 0}, "selector_rank should be at least 1"),
        ({"selector_top_k": ...}, "selector_top_k is missing"),
    ],
)
def test_dflash2_that_is_refused(changes: dict[str, Any], message: str):
    config = drafter_json(DFLASH2)
    config["dflash_config"] = changed(config["dflash_config"], changes)
    with pytest.raises(InputError, match=message):
        DrafterConfig.from_hf(config)


def test_defaults_of_a_drafter():
    inner = changed(DRAFTER_JSON["dflash_config"], {"block_size": ...})
    read = drafter(dflash_config=inner, num_target_layers=..., layer_types=..., use_sliding_window=False)
    assert (read.block_size, read.horizon, read.num_target_layers) == (16, 15, None)
    assert (read.windows, read.rules) == ((None, None), (BlockRule.BIDIRECTIONAL,) * 2)


@pytest.mark.parametrize(
    ("is_causal", "causal"), [(..., (True, False)), (None, (True, False)), (False, (False,) * 2), (True, (True,) * 2)]
)
def test_the_causal_rule(is_causal: Any, causal: tuple[bool, ...]):
    read = drafter(is_causal=is_causal)
    assert read.rules == tuple(BlockRule.CAUSAL if c else BlockRule.BIDIRECTIONAL for c in causal)
    assert read.windows == (8, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DFlash3"]},
            "not a DFlash drafter: architectures is \\['DFlash3'\\], not one of DFl",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "not a DFlash drafter"),
        ({"architectures": ...}, "not a DFlash drafter: architectures is None"),
        ({"architectures": None}, "not a DFlash drafter"),
        ({"architectures": "DFlashDraftModel"}, "not a DFlash drafter"),
        ({"dflash_config": [1]}, "dflash_config should be an object"),
        ({"dflash_config": ...}, "mask_token_id is missing; target_layer_ids is missing"),
        ({"layer_types": [FULL]}, "layer_types should be 2 entries"),
        ({"layer_types": [FULL, LINEAR]}, "layer_types should be 2 entries of full_attention or sliding_attention"),
        ({"layer_types": ...}, "layer_types is missing"),
        ({"sliding_window": None}, "sliding_window should be int, found None"),
        ({"sliding_window": 0}, "sliding_window should be at least 1"),
        ({"is_causal": "false"}, "is_causal should be bool, found 'false'"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers should be at most 10000, found 10001"),
        ({"num_target_layers": "4"}, "num_target_layers should be int, found '4'"),
        ({"projector_type": "domino"}, "projector_type = 'domino' is not implemented"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale = 2.0 is not implemented"),
        ({"draft_vocab_size": 5}, "draft_vocab_size = 5 is not implemented \\(only 13\\)"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type is given as 'default' and 'longrope'"),
    ],
)
def test_drafters_that_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        drafter(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": ...}, "^drafter config.json: mask_token_id is missing$"),
        ({"mask_token_id": None}, "mask_token_id should be int, found None"),
        ({"mask_token_id": "<mask>"}, "mask_token_id should be int"),
        ({"mask_token_id": -1}, "^drafter config.json: mask_token_id should be at least 0, found -1$"),
        ({"block_size": 4097}, "^drafter config.json: block_size should be at most 4096, found 4097$"),
        ({"target_layer_ids": [-1, 0]}, "tap layers \\[-1\\] are outside the target"),
        ({"block_size": 1}, "^drafter config.json: block_size should be at least 2, found 1$"),
        ({"target_layer_ids": ...}, "target_layer_ids is missing"),
        ({"target_layer_ids": []}, "target_layer_ids should be a list of layer numbers, found \\[\\]"),
        ({"target_layer_ids": [1.0]}, "target_layer_ids should be a list of layer numbers"),
        ({"target_layer_ids": 3}, "target_layer_ids should be list, found 3"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not implemented"),
    ],
)
def test_inner_settings_that_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        drafter(dflash_config=changed(DRAFTER_JSON["dflash_config"], changes))


def test_a_drafter_of_its_target_passes():
    DRAFTER.check_against(HYBRID)
    dataclasses.replace(DRAFTER, num_target_layers=4, target_layer_ids=(2,)).check_against(HYBRID)


def test_all_that_keeps_a_drafter_from_a_target_is_listed():
    other = dataclasses.replace(
        DRAFTER, hidden_size=32, vocab_size=99, num_target_layers=8, mask_token_id=13, target_layer_ids=(-1, 0, 3, 9)
    )
    with pytest.raises(InputError) as caught:
        other.check_against(HYBRID)
    assert str(caught.value) == (
        "the drafter does not belong to this target: hidden size 32, the target has 48; "
        "vocabulary 99, the target has 13; made for 8 target layers, the target has 4; "
        "mask token 13 is outside the vocabulary of 13; "
        "tap layers [-1, 3, 9] are outside 0..2 (the last layer's output is not a tap)"
    )


# ---- taps and the shared head ----------------------------------------------------------------------------------------


def test_taps_are_the_outputs_of_their_layers():  # cases.md A15
    """Layers that each add a constant of their own: a tap is the embedding and all constants so far."""
    network = random_network(HYBRID, 0)

    @jax.jit
    def run(network: Network, ids: jax.Array) -> tuple[jax.Array, ...]:
        module = network.module()
        for layer, constant in zip(module.layers, (1.0, 10.0, 100.0, 1000.0), strict=True):
            mixer = layer.linear_attn.out_proj if layer.linear else layer.self_attn.o_proj
            mixer.weight[...] = jnp.zeros_like(mixer.weight[...])
            layer.mlp = Constant(constant)
        embedded = module.embed(ids)
        return embedded, module.norm(embedded + 1111), *module(ids, taps=(2, 0))

    embedded, final, hidden, features = run(network, jnp.array([[1, 7, 12]]))
    np.testing.assert_allclose(features, np.concatenate([embedded + 111, embedded + 1], -1), rtol=1e-5)
    np.testing.assert_allclose(hidden, final, rtol=1e-5)


class Constant:
    """Stands in for a feed-forward network."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.full_like(x, self.value)


@pytest.mark.parametrize("tied", [False, True])
def test_draft_logits_are_those_of_the_targets_head(tied: bool):  # cases.md A17
    config = dataclasses.replace(DENSE, tie_word_embeddings=tied)

    @jax.jit
    def run(target: Network, drafter: Network) -> tuple[jax.Array, ...]:
        network, draft = target.module(), drafter.module()
        _, features = network(jnp.arange(4)[None], taps=DRAFTER.target_layer_ids)
        rows = draft.context(features, jnp.arange(4)[None])
        caches = draft.extend(draft.init_caches(1, 4), rows, jnp.array([0]))
        hidden = draft.draft(network.embed(jnp.array([[3, 12, 12, 12, 12, 12]])), caches, jnp.array([4]))
        head = network.embed_tokens if tied else network.lm_head
        return hidden, network.logits(hidden), head.weight[...]

    hidden, logits, head = map(np.asarray, run(random_network(config, 0), random_network(DRAFTER, 1)))
    np.testing.assert_allclose(logits, hidden @ head.T, rtol=1e-4, atol=1e-5)
    assert logits.shape == (1, 6, 13) and logits.dtype == np.float32
    assert (logits.std(-1) > 0.1).all()
