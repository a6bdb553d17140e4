"""Published targets and their drafters by name: what their config.json says (reference_models.md 1.9, 5.5), as data.

For planning without a checkpoint. A checkpoint's own config.json is always what counts.
"""

from __future__ import annotations

from typing import Any

from ddtree_jax.config import FULL, SLIDING, DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError

_COMMON = dict(hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6)
_QWEN3_5 = _COMMON | dict(
    vocab_size=248320,
    head_dim=256,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    max_position_embeddings=262144,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
)
_QWEN3 = _COMMON | dict(
    model_type="qwen3", vocab_size=151936, head_dim=128, rope_theta=1e6, max_position_embeddings=40960
)


def _hybrid(layers: int, hidden: int, heads: int, kv: int, value_heads: int, tied: bool, **more: Any) -> dict[str, Any]:
    return (
        _QWEN3_5
        | dict(
            model_type="qwen3_5_text",
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            linear_num_value_heads=value_heads,
            tie_word_embeddings=tied,
        )
        | more
    )


def _experts(count: int, chosen: int, size: int) -> dict[str, Any]:
    return dict(
        model_type="qwen3_5_moe_text",
        num_experts=count,
        num_experts_per_tok=chosen,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=size,
    )


SIZES: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _hybrid(24, 1024, 8, 2, 16, True, intermediate_size=3584),
    "Qwen3.5-2B": _hybrid(24, 2048, 8, 2, 16, True, intermediate_size=6144),
    "Qwen3.5-4B": _hybrid(32, 2560, 16, 4, 32, True, intermediate_size=9216),
    "Qwen3.5-9B": _hybrid(32, 4096, 16, 4, 32, False, intermediate_size=12288),
    "Qwen3.5-27B": _hybrid(64, 5120, 24, 4, 48, False, intermediate_size=17408),
    "Qwen3.5-35B-A3B": _hybrid(40, 2048, 16, 2, 32, False, **_experts(256, 8, 512)),
    "Qwen3.5-122B-A10B": _hybrid(48, 3072, 32, 2, 64, False, **_experts(256, 8, 1024)),
    "Qwen3.5-397B-A17B": _hybrid(60, 4096, 32, 2, 64, False, **_experts(512, 10, 1024)),
    "Qwen3-Next-80B-A3B": _hybrid(
        48, 2048, 16, 2, 32, False, **_experts(512, 10, 512) | dict(model_type="qwen3_next", vocab_size=151936)
    ),
    "Qwen3-4B": _QWEN3
    | dict(num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, num_attention_heads=32)
    | dict(num_key_value_heads=8, tie_word_embeddings=True),
    "Qwen3-8B": _QWEN3
    | dict(num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32)
    | dict(num_key_value_heads=8, tie_word_embeddings=False),
    "Qwen3-Coder-30B-A3B": _QWEN3
    | dict(model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048, num_attention_heads=32)
    | dict(num_key_value_heads=4, tie_word_embeddings=False, rope_theta=1e7, max_position_embeddings=262144)
    | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True),
    "Llama-3.1-8B": dict(
        model_type="llama",
        hidden_act="silu",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        vocab_size=128256,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        rope_theta=5e5,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
}


def _drafter(layers: int, size: int, kv: int, taps: tuple[int, ...], mask: int, window: int | None = None):
    kinds = [FULL] * layers if window is None else [SLIDING] * (layers - 1) + [FULL]
    return dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        num_hidden_layers=layers,
        intermediate_size=size,
        num_attention_heads=32,
        num_key_value_heads=kv,
        head_dim=128,
        rope_theta=1e7,
        layer_types=kinds,
        sliding_window=window,
        block_size=16,
        dflash_config=dict(mask_token_id=mask, target_layer_ids=list(taps)),
    )


# By the target they belong to. For Qwen3.5-0.8B none is published: this is one on the plan of the others.
DRAFTERS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _drafter(5, 3584, 8, (1, 6, 11, 16, 21), 248070),
    "Qwen3.5-4B": _drafter(6, 9216, 8, (1, 5, 9, 13, 17, 21, 25, 29), 248077, window=4096),
    "Qwen3.5-27B": _drafter(5, 17408, 8, (1, 16, 31, 46, 61), 248070),
    "Qwen3.5-35B-A3B": _drafter(8, 6144, 4, (1, 10, 19, 28, 37), 248070),
}


def published(name: str) -> TargetConfig:
    """The configuration of a published target; InputError for a name that is not in the table."""
    known = {size.lower(): size for size in SIZES}
    if name.lower() not in known:
        raise InputError(f"{name!r} is neither a directory nor one of {', '.join(SIZES)}")
    return TargetConfig.from_hf(SIZES[known[name.lower()]])


def published_drafter(target: str) -> DrafterConfig:
    """The configuration of the drafter of a published target; InputError where the table has none."""
    known = {name.lower(): name for name in DRAFTERS}
    if target.lower() not in known:
        raise InputError(f"no drafter of {target!r} in the table: it has those of {', '.join(DRAFTERS)}")
    name = known[target.lower()]
    shared = {key: SIZES[name][key] for key in ("hidden_size", "vocab_size")}
    return DrafterConfig.from_hf(
        _COMMON | DRAFTERS[name] | shared | {"num_target_layers": SIZES[name]["num_hidden_layers"]}
    )
