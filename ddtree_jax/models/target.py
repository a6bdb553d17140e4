"""The target model: every Qwen3 and Qwen3.5 decoder, over a sequence (prefill, training) or over a tree (verify)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ddtree_jax.config import LINEAR, TargetConfig
from ddtree_jax.models.attention import Attention
from ddtree_jax.models.blocks import (
    Cache,
    DeltaCache,
    KVRows,
    Rows,
    SequenceBlock,
    TreeBlock,
    empty_kv,
    extend,
    sequence_block,
)
from ddtree_jax.models.delta_net import GatedDeltaNet
from ddtree_jax.models.layers import Embedding, Linear, RMSNorm, SwiGLU, linear, rope_angles
from ddtree_jax.models.moe import SparseMoe
from ddtree_jax.parallel import split


class DecoderLayer(nnx.Module):
    """Mixer and feed-forward, each behind a norm and a residual."""

    def __init__(self, config: TargetConfig, index: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        norm: dict[str, Any] = dict(eps=config.norm_eps, zero_centred=config.zero_centred_norm, dtype=dtype)
        hidden = config.hidden_size
        self.linear = config.layer_types[index] == LINEAR
        self.input_layernorm = RMSNorm(hidden, **norm)
        if self.linear and config.delta is not None:
            self.linear_attn = GatedDeltaNet(config.delta, hidden, eps=config.norm_eps, rngs=rngs, dtype=dtype)
        else:
            self.self_attn = Attention(config.attention, hidden, rngs=rngs, **norm)
        self.post_attention_layernorm = RMSNorm(hidden, **norm)
        if config.moe is not None and config.has_experts(index):
            self.mlp = SparseMoe(config.moe, hidden, rngs=rngs, dtype=dtype)
        else:
            self.mlp = SwiGLU(hidden, config.intermediate_size, rngs=rngs, dtype=dtype)

    def __call__(self, x, cache: Cache, block: SequenceBlock | TreeBlock, angles):
        """The layer's output, and what it made: K/V rows, node rows, or (delta layer, sequence) the new cache."""
        y, made = self._mix(self.input_layernorm(x), cache, block, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), made

    def _mix(self, x, cache, block, angles):
        if not self.linear:
            return self.self_attn(x, angles, cache, block.length, block.mask)
        if isinstance(block, TreeBlock):
            return self.linear_attn.tree(x, cache, block)
        return self.linear_attn.sequence(x, cache, block)


class Target(nnx.Module):
    """A decoder-only language model. `dtype` is that of weights and activations; what Hugging Face keeps in float32
    stays float32.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, i, rngs=rngs, dtype=dtype) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, zero_centred=config.zero_centred_norm, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)

    def __call__(
        self, ids: Int[Array, "B T"], taps: Sequence[int] = ()
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T features"]]:
        """Plain forward over whole sequences: final hidden states (after the norm) and tap features."""
        batch, size = ids.shape
        start, count = jnp.zeros(batch, jnp.int32), jnp.full(batch, size, jnp.int32)
        hidden, features, _ = self.sequence(ids, self.init_caches(batch, 0), start, count, taps)
        return hidden, features

    def sequence(
        self,
        ids: Int[Array, "B T"],
        caches: Sequence[Cache],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        taps: Sequence[int] = (),
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T features"], list[KVRows | DeltaCache]]:
        """`count[b]` further tokens of every sequence (right-padded to T) after `length[b]` committed ones.

        Returns final hidden states, tap features, and per layer what `extend` writes. `taps` are decoder layers whose
        output is wanted (0-based; Hugging Face's hidden_states[i + 1]), concatenated in the order given.
        """
        return self._run(ids, caches, sequence_block(length, count, ids.shape[1]), taps)

    def extend(
        self, caches: Sequence[Cache], made: Sequence[KVRows | DeltaCache | None], length: Int[Array, " B"]
    ) -> tuple[Cache, ...]:
        """The caches after a `sequence` call. Needs room for T more slots."""
        return tuple(extend(c, m, length) for c, m in zip(caches, made, strict=True))

    def verify(
        self, tokens: Int[Array, "B N"], caches: Sequence[Cache], block: TreeBlock, taps: Sequence[int] = ()
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N features"], list[Rows]]:
        """All nodes of a tree at once; the caches are only read. Returns final hidden states, tap features and the node
        rows.
        """
        return self._run(tokens, caches, block, taps)

    def _run(self, ids, caches, block, taps):
        angles = rope_angles(block.position, self.config.attention.rope, self.dtype)
        x, tapped, made = self.embed(ids), {}, []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x, out = layer(x, cache, block, angles)
            made.append(out)
            if i in taps:
                tapped[i] = x
        features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else x[..., :0]
        return self.norm(x), features, made

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch H"]:
        """Raw embeddings, also the drafter's input."""
        return self.embed_tokens(ids)

    def logits(self, hidden: Float[Array, "*batch H"]) -> Float[Array, "*batch V"]:
        """float32 logits of hidden states that went through a final norm (the target's own, or the drafter's)."""
        if self.config.tie_word_embeddings:
            return linear(hidden, self.embed_tokens.weight[...], jnp.float32)
        return self.lm_head(hidden, jnp.float32)

    def init_caches(self, batch: int, capacity: int) -> tuple[Cache, ...]:
        """Empty caches of `capacity` slots, one a layer."""
        a, d = self.config.attention, self.config.delta
        kv = (batch, a.num_kv_heads, capacity, a.head_dim)

        def empty(kind: str) -> Cache:
            if kind != LINEAR or d is None:
                return empty_kv(kv, self.dtype)
            state = split(jnp.zeros((batch, d.num_value_heads, d.key_dim, d.value_dim), jnp.float32), 1)
            return DeltaCache(state, jnp.zeros((batch, d.conv_taps - 1, d.channels), self.dtype))

        return tuple(empty(kind) for kind in self.config.layer_types)
