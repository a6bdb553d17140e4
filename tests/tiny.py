"""Tiny random pairs for tests: every mechanism, weights large enough that choices are clear, a vocabulary small enough
to hit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

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
)
from ddtree_jax.loading import Model
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.network import Network

HYBRID = TargetConfig(
    model_type="qwen3_5_text",
    vocab_size=13,
    hidden_size=48,
    intermediate_size=64,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, rope=RopeConfig(1e4, 8), gated=True),
    delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, conv_taps=4),
    norm_eps=1e-6,
    zero_centred_norm=True,
    tie_word_embeddings=False,
    max_positions=4096,
)
DENSE = dataclasses.replace(
    HYBRID,
    model_type="qwen3",
    layer_types=(FULL, FULL, FULL),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(1e4, 16), gated=False),
    delta=None,
    zero_centred_norm=False,
    tie_word_embeddings=True,
)
DRAFTER = DrafterConfig(
    hidden_size=48,
    intermediate_size=64,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(1e4, 16), gated=False),
    rules=(BlockRule.CAUSAL, BlockRule.BIDIRECTIONAL),
    windows=(8, None),
    norm_eps=1e-6,
    block_size=6,
    mask_token_id=12,
    target_layer_ids=(0, 1),
    num_target_layers=None,
    vocab_size=13,
)
DFLASH2 = dataclasses.replace(
    DRAFTER, conv=BlockConvConfig(taps=2, group_size=8), selector=SelectorConfig(rank=6, top_k=5)
)
SCALE = 10.0  # from the 0.02 of initialisation to 0.2


def scaled(module: nnx.Module, factor: float = SCALE) -> Network:
    """A network whose matrices are `factor` times their initial values; norms, gates and biases stay."""
    network = Network.of(module)
    return dataclasses.replace(network, leaves=tuple(x * factor if x.ndim > 1 else x for x in network.leaves))


def tiny_target(seed: int = 0, config: TargetConfig = HYBRID, dtype: jnp.dtype = jnp.float32) -> Network:
    """A random target."""
    return scaled(Target(config, rngs=nnx.Rngs(seed), dtype=dtype))


def tiny_drafter(seed: int = 1, config: DrafterConfig = DRAFTER, dtype: jnp.dtype = jnp.float32) -> Network:
    """A random drafter: with 13 tokens its trees are right often enough for every acceptance length to occur."""
    return scaled(Drafter(config, rngs=nnx.Rngs(seed), dtype=dtype))


def tiny_model(seed: int = 0, target: TargetConfig = HYBRID, drafter: DrafterConfig = DRAFTER) -> Model:
    """A random pair without a tokenizer; nothing stops it."""
    return Model(tiny_target(seed, target), tiny_drafter(seed + 1, drafter), None, ())


def tiny_prompt(seed: int, length: int, vocab: int = HYBRID.vocab_size) -> list[int]:
    """Random token ids."""
    return jax.random.randint(jax.random.key(seed), (length,), 0, vocab).tolist()
