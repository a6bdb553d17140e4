"""The DFlash drafter: a few Qwen3 layers that fill a block of masks in one pass (reference_models.md 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import BlockRule, DrafterConfig, WindowRule
from ddtree_jax.models.attention import Attention
from ddtree_jax.models.blocks import KVCache, KVRows, empty_kv, write_rows
from ddtree_jax.models.dflash2 import BlockConv, CandidateSelector
from ddtree_jax.models.layers import Embedding, Linear, RMSNorm, SwiGLU, linear, rope_angles
from ddtree_jax.models.target import Target


class DrafterLayer(nnx.Module):
    """A Qwen3 layer whose queries come from the block only; its context keys and values come from the target's
    features. In DFlash2, both sublayers stand between convolutions over the block.
    """

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        norm: dict[str, Any] = dict(eps=config.norm_eps, zero_centred=False, dtype=dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config.attention, config.hidden_size, rngs=rngs, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, rngs=rngs, dtype=dtype)
        self.convolved = config.conv is not None
        if config.conv is not None:
            self.attention_conv = BlockConv(config.conv, config.hidden_size, rngs=rngs, dtype=dtype)
            self.mlp_conv = BlockConv(config.conv, config.hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x, angles, cache: KVCache, length, mask, context_start, slot):
        def attend(u):
            return self.self_attn(u, angles, cache, length, mask, context_start)[0]

        x = x + self._between(self.attention_conv if self.convolved else None, attend, self.input_layernorm(x), slot)
        u = self.post_attention_layernorm(x)
        return x + self._between(self.mlp_conv if self.convolved else None, self.mlp, u, slot)

    def _between(self, conv: BlockConv | None, sublayer, u, slot):
        """sublayer(u), where there is one between the two halves of a convolution."""
        if conv is None:
            return sublayer(u)
        before, after = conv.kernels(u)
        return conv(sublayer(conv(u, before, slot)), after, slot)


class Drafter(nnx.Module):
    """DFlash and DFlash2. Embedding and head are the target's, unless the checkpoint brings its own."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        hidden, taps = config.hidden_size, len(config.target_layer_ids)
        norm: dict[str, Any] = dict(eps=config.norm_eps, zero_centred=False, dtype=dtype)
        self.fc = Linear(taps * hidden, hidden, rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm(hidden, **norm)
        self.layers = nnx.List([DrafterLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(hidden, **norm)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(
                config.selector, hidden, config.vocab_size, rngs=rngs, dtype=dtype
            )
        if config.own_embedding:
            self.embed_tokens = Embedding(config.vocab_size, hidden, rngs=rngs, dtype=dtype)
        if config.own_head:
            self.lm_head = Linear(hidden, config.draft_vocab_size or config.vocab_size, rngs=rngs, dtype=dtype)
        if config.draft_vocab_size is not None:
            self.draft_ids = nnx.Param(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))

    def embed(self, ids: Int[Array, "*batch"], target: Target) -> Float[Array, "*batch H"]:
        """Embeddings of the block's tokens, from the drafter's own table where it has one."""
        return self.embed_tokens(ids) if self.config.own_embedding else target.embed(ids)

    def logits(self, hidden: Float[Array, "*batch H"], target: Target) -> Float[Array, "*batch V"]:
        """float32 logits over the target's vocabulary; -inf for tokens that a reduced draft vocabulary lacks."""
        if not self.config.own_head:
            return target.logits(hidden)
        own = linear(hidden, self.lm_head.weight[...], jnp.float32)
        if self.config.draft_vocab_size is None:
            return own
        whole = jnp.full((*own.shape[:-1], self.config.vocab_size), -jnp.inf, jnp.float32)
        return whole.at[..., self.draft_ids[...]].set(own)

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

        length: where each row's block begins; slot i of a block is at position length + i. Every layer adds its own
        rule and window to `mask` (reference_models.md 5.1): allowed =
        (causal ? kp <= qp : true) and (window ? qp - kp < W and (causal or kp - qp < W) : true),
        and with windows that begin at the anchor: kp >= length - W.
        """
        angles = rope_angles(position, self.config.attention.rope, self.dtype)
        start = jnp.broadcast_to(length.reshape(len(length), -1), position.shape)
        x = noise
        for layer, cache, rule, window in zip(self.layers, caches, self.config.rules, self.config.windows, strict=True):
            allowed, context_start = self._sight(position, start, mask, rule, window)
            x = layer(x, angles, cache, length, allowed, context_start, position - start)
        return self.norm(x)

    def _sight(self, position, start, mask, rule: BlockRule, window: int | None):
        """What a layer's slots see: of the block (a mask), and of the context from where on (None: all)."""
        ahead = position[:, None, :] - position[:, :, None]  # key position minus query position
        allowed = mask & (ahead <= 0) if rule is BlockRule.CAUSAL else mask
        if window is None:
            return allowed, None
        if self.config.window_rule is WindowRule.ANCHOR:
            return allowed, jnp.maximum(start - window, 0)
        return allowed & (jnp.abs(ahead) < window), jnp.maximum(position - window + 1, 0)

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
        return tuple(empty_kv(shape, self.dtype) for _ in self.layers)
