"""Gated DeltaNet: a causal convolution, a gated delta rule over heads, and a gated norm (reference_models.md 1.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ddtree_jax.config import DeltaConfig
from ddtree_jax.models.blocks import DeltaCache, DeltaRows, SequenceBlock, TreeBlock
from ddtree_jax.models.layers import Linear, normalise
from ddtree_jax.ops import causal_conv
from ddtree_jax.ops.chunk_delta import chunk_delta
from ddtree_jax.ops.tree_delta import tree_delta

UNIT_EPS = 1e-6  # fixed in the published networks, added to the sum of squares, and not rms_norm_eps


class Convolution(nnx.Module):
    """Weight of the depthwise convolution, [K, C]: row K-1 multiplies the current token. No bias."""

    def __init__(self, taps: int, channels: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        bound = taps**-0.5
        self.weight = nnx.Param(jax.random.uniform(rngs.params(), (taps, channels), dtype, -bound, bound))


class GatedNorm(nnx.Module):
    """norm(o) * weight * silu(z), per head over dv. The weight is plain (not 1 + w) and stays float32."""

    def __init__(self, size: int, *, eps: float):
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, out: Float[Array, "*batch dv"], gate: Float[Array, "*batch dv"]) -> Float[Array, "*batch dv"]:
        scaled = self.weight[...] * normalise(out, self.eps).astype(gate.dtype)
        return (scaled * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


class GatedDeltaNet(nnx.Module):
    """One linear-attention mixer. `A_log`, `dt_bias` and the norm's weight stay float32 in a bfloat16 model."""

    def __init__(self, config: DeltaConfig, hidden: int, *, eps: float, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        heads = config.num_value_heads
        self.in_proj_qkv = Linear(hidden, config.channels, rngs=rngs, dtype=dtype)
        self.in_proj_z = Linear(hidden, config.value_width, rngs=rngs, dtype=dtype)
        self.in_proj_b = Linear(hidden, heads, rngs=rngs, dtype=dtype)
        self.in_proj_a = Linear(hidden, heads, rngs=rngs, dtype=dtype)
        self.conv1d = Convolution(config.conv_taps, config.channels, rngs=rngs, dtype=dtype)
        self.dt_bias = nnx.Param(jnp.ones(heads, jnp.float32))
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), jnp.float32, 0.01, 16.0)))
        self.norm = GatedNorm(config.value_dim, eps=eps)
        self.out_proj = Linear(config.value_width, hidden, rngs=rngs, dtype=dtype)

    def sequence(
        self, x: Float[Array, "B T H"], cache: DeltaCache, block: SequenceBlock
    ) -> tuple[Float[Array, "B T H"], DeltaCache]:
        """T consecutive tokens; returns the cache after the real ones (padding rows leave it as it was)."""
        conv = self.in_proj_qkv(x)
        q, k, v = self._heads(causal_conv.sequence(conv, cache.window, self.conv1d.weight[...]))
        g, beta = self._gates(x)
        real = (jnp.arange(x.shape[1]) < block.count[:, None])[..., None]
        out, state = chunk_delta(q, k, v, jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0), cache.state)
        window = causal_conv.next_window(cache.window, conv, block.count)
        return self._finish(out, x), DeltaCache(state, window)

    def tree(
        self, x: Float[Array, "B N H"], cache: DeltaCache, block: TreeBlock
    ) -> tuple[Float[Array, "B N H"], DeltaRows]:
        """N tree nodes from the committed cache, which is only read."""
        conv = self.in_proj_qkv(x)
        ancestors = nearest_ancestors(block, self.config.conv_taps - 1)
        q, k, v = self._heads(causal_conv.tree(conv, cache.window, self.conv1d.weight[...], ancestors, block.depth))
        g, beta = self._gates(x)
        out, factors = tree_delta(q, k, v, g, beta, cache.state, block.parent, block.depth, max_depth=block.max_depth)
        return self._finish(out, x), DeltaRows(conv, factors)

    def _heads(self, mixed: Float[Array, "B N C"]):
        """Split the convolved channels into unit queries (scaled), unit keys and values."""
        c = self.config
        keys = c.num_key_heads * c.key_dim
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        q, k = (unit(t.reshape(*t.shape[:2], c.num_key_heads, c.key_dim)) for t in (q, k))
        return q * c.key_dim**-0.5, k, v.reshape(*v.shape[:2], c.num_value_heads, c.value_dim)

    def _gates(self, x: Float[Array, "B N H"]) -> tuple[Float[Array, "B N Hv"], Float[Array, "B N Hv"]]:
        """Log-decay g <= 0 and write strength beta, float32."""
        beta = jax.nn.sigmoid(self.in_proj_b(x)).astype(jnp.float32)
        rate = jnp.exp(self.A_log[...].astype(jnp.float32))
        step = jax.nn.softplus(self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        return -rate * step, beta

    def _finish(self, out: Float[Array, "B N Hv dv"], x: Float[Array, "B N H"]) -> Float[Array, "B N H"]:
        gate = self.in_proj_z(x).reshape(out.shape)
        return self.out_proj(self.norm(out.astype(x.dtype), gate).reshape(*x.shape[:2], -1))


def nearest_ancestors(block: TreeBlock, count: int) -> Int[Array, "B N count"]:
    """Parent, grandparent, ...: `count` of them whatever the depth of the tree, -1 beyond the root."""
    there = block.ancestors[..., 1 : count + 1]
    return jnp.pad(there, ((0, 0), (0, 0), (0, count - there.shape[-1])), constant_values=-1)


def unit(x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
    """x / |x| in float32, with 1e-6 added to the sum of squares (so the gradient at zero is finite)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
