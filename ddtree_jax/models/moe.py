"""Mixture of experts: a router, the chosen experts by a grouped product, for some models a shared expert (spec 1.6)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ddtree_jax.config import MoeConfig
from ddtree_jax.models.layers import Linear, SwiGLU, normal
from ddtree_jax.models.quantised import operands
from ddtree_jax.ops.grouped_matmul import grouped_matmul
from ddtree_jax.parallel import over_experts


class Experts(nnx.Module):
    """E SwiGLU experts with fused weights: gate_up_proj [E, 2I, H] (gate rows first), down_proj [E, H, I]."""

    def __init__(self, experts: int, hidden: int, inner: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.gate_up_proj = normal(rngs, (experts, 2 * inner, hidden), dtype)
        self.down_proj = normal(rngs, (experts, hidden, inner), dtype)

    def __call__(self, rows: Float[Array, "M H"], sizes: Int[Array, " E"], largest: int) -> Float[Array, "M H"]:
        """Rows sorted by expert, sizes[e] of them, at most `largest`, for expert e. On a mesh every device computes its
        own experts.
        """
        graph, weights = nnx.split(self)

        def own(rows, sizes, weights):
            module: Any = nnx.merge(graph, weights)
            return module.products(rows, sizes, largest)

        return over_experts(own, rows, sizes, weights)

    def products(self, rows: Float[Array, "M H"], sizes: Int[Array, " E"], largest: int) -> Float[Array, "M H"]:
        """The same on one device."""
        gate, up = jnp.split(grouped_matmul(*operands(self, "gate_up_proj", rows), sizes, largest=largest), 2, axis=-1)
        return grouped_matmul(*operands(self, "down_proj", jax.nn.silu(gate) * up), sizes, largest=largest)


class SparseMoe(nnx.Module):
    """Every token through its `top_k` experts, weighted by the router; no capacity, nothing dropped."""

    def __init__(self, config: MoeConfig, hidden: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        self.gate = Linear(hidden, config.num_experts, rngs=rngs, dtype=dtype)
        self.experts = Experts(config.num_experts, hidden, config.expert_size, rngs=rngs, dtype=dtype)
        if config.shared_size is not None:
            self.shared_expert = SwiGLU(hidden, config.shared_size, rngs=rngs, dtype=dtype)
            self.shared_expert_gate = Linear(hidden, 1, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "B N H"]) -> Float[Array, "B N H"]:
        rows = x.reshape(-1, x.shape[-1])
        weight, expert = self._route(rows)
        out = self._dispatch(rows, weight, expert)
        if self.config.shared_size is not None:
            out = out + jax.nn.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return out.reshape(x.shape)

    def _route(self, rows: Float[Array, "M H"]) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
        """The best experts of every row and their weights: softmax over all experts in float32, then the top k."""
        p = jax.nn.softmax(self.gate(rows).astype(jnp.float32), axis=-1)
        weight, expert = jax.lax.top_k(p, self.config.top_k)
        if self.config.normalise:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        return weight.astype(rows.dtype), expert

    def _dispatch(self, rows, weight, expert):
        """Copies of the rows sorted by expert, through the experts, and back to their rows."""
        chosen = expert.reshape(-1)
        order = jnp.argsort(chosen, stable=True)
        sizes = jnp.zeros(self.config.num_experts, jnp.int32).at[chosen].add(1)
        made = self.experts(rows[order // self.config.top_k], sizes, largest=rows.shape[0])
        back = jnp.zeros_like(made).at[order].set(made, unique_indices=True)
        return jnp.einsum("mk,mkh->mh", weight, back.reshape(*expert.shape, -1))
