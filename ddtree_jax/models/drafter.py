"""The DFlash drafter: a few Qwen3 layers that fill a block of masks in one pass (reference_models.md 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import DrafterConfig
from ddtree_jax.models.attention import Attention
from ddtree_jax.models.blocks import KVCache, KVRows, write_rows
from ddtree_jax.models.layers import Linear, RMSNorm, SwiGLU, rope_angles


class DrafterLayer(nnx.Module):
    """A Qwen3 layer whose queries come from the block only; its context keys and values come from the target's
    features.
    """

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        norm: dict[str, Any] = dict(eps=config.norm_eps, zero_centred=False, dtype=dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config.attention, config.hidden_size, rngs=rngs, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, rngs=rngs, dtype=dtype)

    def __call__(self, x, angles, cache: KVCache, length, mask, context_start):
        y, _ = self.self_attn(self.input_layernorm(x), angles, cache, length, mask, context_start)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nnx.Module):
    """DFlash. It has no embedding, head or vocabulary of its own: embed with the target, and give the result to the
    target's head.
    """

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        hidden, taps = config.hidden_size, len(config.target_layer_ids)
        norm: dict[str, Any] = dict(eps=config.norm_eps, zero_centred=False, dtype=dtype)
        self.fc = Linear(taps * hidden, hidden, rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm(hidden, **norm)
        self.layers = nnx.List([DrafterLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(hidden, **norm)

    def context(self, features: Float[Array, "B T features"], position: Int[Array, "B T"]) -> tuple[KVRows, ...]:
        """Context rows of every layer for committed tokens; they never change, so each is computed and written once.

        features: the target's taps at those positions. The same normed projection feeds every layer, without its input
          norm.
        """
        fused = self.hidden_norm(self.fc(features))
        angles = rope_angles(position, self.config.attention.rope, self.dtype)
        return tuple(layer.self_attn.rows(fused, angles) for layer in self.layers)

    def extend(
        self, caches: Sequence[KVCache], rows: Sequence[KVRows], length: Int[Array, " B"]
    ) -> tuple[KVCache, ...]:
        """The context caches after `rows` were committed behind `length` tokens."""
        return tuple(write_rows(c, r, length) for c, r in zip(caches, rows, strict=True))

    def attend(
        self,
        noise: Float[Array, "B N H"],
        caches: Sequence[KVCache],
        position: Int[Array, "B N"],
        length: Int[Array, "B"] | Int[Array, "B N"],
        mask: Bool[Array, "B N N"],
    ) -> Float[Array, "B N H"]:
        """Final hidden states of noise rows that see the context before `length` and each other under `mask`.

        Every layer adds its own causal rule and window to `mask` (reference_models.md 5.1): allowed =
        (causal ? kp <= qp : true) and (window ? qp - kp < W and (causal or kp - qp < W) : true).
        """
        angles = rope_angles(position, self.config.attention.rope, self.dtype)
        ahead = position[:, None, :] - position[:, :, None]  # key position minus query position
        x = noise
        for layer, cache, causal, window in zip(
            self.layers, caches, self.config.causal, self.config.windows, strict=True
        ):
            allowed = mask & (ahead <= 0) if causal else mask
            start = None
            if window is not None:
                allowed = allowed & (jnp.abs(ahead) < window)
                start = jnp.maximum(position - window + 1, 0)
            x = layer(x, angles, cache, length, allowed, start)
        return self.norm(x)

    def draft(
        self,
        noise: Float[Array, "B block H"],
        caches: Sequence[KVCache],
        length: Int[Array, " B"],
        slots: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B block H"]:
        """One block: the root's embedding and masks, at positions length, length + 1, ...

        slots: how many slots of the block are there (default all); a shorter block near the end of the budget is
          drafted with fewer masks.
        """
        steps = jnp.arange(noise.shape[1])
        there = jnp.full(noise.shape[0], noise.shape[1]) if slots is None else slots
        mask = jnp.broadcast_to((steps < there[:, None])[:, None, :], (*noise.shape[:2], noise.shape[1]))
        return self.attend(noise, caches, length[:, None] + steps, length, mask)

    def init_caches(self, batch: int, capacity: int) -> tuple[KVCache, ...]:
        """Empty context caches of `capacity` slots, one a layer."""
        a = self.config.attention
        shape = (batch, a.num_kv_heads, capacity, a.head_dim)
        return tuple(KVCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in self.layers)
