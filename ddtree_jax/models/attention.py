"""Softmax attention over committed positions and the block's own tokens: Qwen3, Qwen3.5 (gated) and the drafter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import AttentionConfig
from ddtree_jax.models.blocks import KVCache, KVRows
from ddtree_jax.models.layers import Linear, RMSNorm, rotate
from ddtree_jax.ops.tree_attention import tree_attention

Angles = Float[Array, "2 B N half"]


class Attention(nnx.Module):
    """Grouped-query attention with normed, rotated queries and keys; gated heads interleave [query | gate] per head in
    q_proj.
    """

    def __init__(
        self,
        config: AttentionConfig,
        hidden: int,
        *,
        eps: float,
        zero_centred: bool,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        self.config = config
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(hidden, 2 * width if config.gated else width, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(hidden, kv_width, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(hidden, kv_width, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(width, hidden, rngs=rngs, dtype=dtype)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=eps, zero_centred=zero_centred, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, eps=eps, zero_centred=zero_centred, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B N H"],
        angles: Angles,
        cache: KVCache,
        length: Int[Array, "B"] | Int[Array, "B N"],
        mask: Bool[Array, "B N N"],
        context_start: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N H"], KVRows]:
        """Attend to cache slots context_start..length-1 and to block tokens under `mask`; also return the block's own
        K/V rows.
        """
        query, gate = self._query(x, angles)
        rows = self.rows(x, angles)
        out = tree_attention(query, cache.k, cache.v, rows.k, rows.v, length, mask, context_start=context_start)
        out = out.reshape(*x.shape[:2], -1)
        return self.o_proj(out if gate is None else out * jax.nn.sigmoid(gate)), rows

    def rows(self, x: Float[Array, "B N H"], angles: Angles) -> KVRows:
        """Keys, normed and rotated, and values of the tokens x."""
        heads = (*x.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        key = self.k_proj(x).reshape(heads)
        if self.config.qk_norm:
            key = self.k_norm(key)
        return KVRows(rotate(key, angles), self.v_proj(x).reshape(heads))

    def _query(self, x, angles):
        query = self.q_proj(x).reshape(*x.shape[:2], self.config.num_heads, -1)
        gate = None
        if self.config.gated:
            query, gate = jnp.split(query, 2, axis=-1)
            gate = gate.reshape(*x.shape[:2], -1)
        if self.config.qk_norm:
            query = self.q_norm(query)
        return rotate(query, angles), gate
