"""The delta rule over a tree without a scan over nodes: level by level, and solved with no state per node."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ddtree_jax.ops.delta import HIGHEST, path_decays, read, repeat_heads, solve_by_depth, step


def levels(q, k, v, g, beta, state, parent, depth, max_depth):
    """See `ddtree_jax.ops.tree_delta.tree_delta`; returns (out, u). A scan over depths, all nodes of one at once."""
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    state = jnp.broadcast_to(state[:, None], (*v.shape[:2], *state.shape[1:]))

    def level(carry, d):
        states, u = carry
        above = jax.vmap(lambda s, p: s[p])(states, jnp.maximum(parent, 0))
        before = jnp.where((parent < 0)[..., None, None, None], state, above)
        new_states, new_u = step(before, k, v, g, beta)
        here = (depth == d)[..., None, None]
        return (jnp.where(here[..., None], new_states, states), jnp.where(here, new_u, u)), None

    (states, u), _ = jax.lax.scan(level, (state, jnp.zeros_like(v)), jnp.arange(max_depth + 1))
    return read(states, q), u


def solve(q, k, v, g, beta, state, parent, depth, max_depth):
    """See `ddtree_jax.ops.tree_delta.tree_delta`; returns (out, u). The solve of algorithm.md 13."""
    N, heads = v.shape[1:3]
    rows = jnp.swapaxes(jnp.concatenate([k, q], axis=1), 1, 2)
    products = jnp.einsum("bhmk,bhnk->bhmn", rows, rows[:, :, :N], precision=HIGHEST)
    rows, products = (jnp.repeat(x, heads // k.shape[2], axis=1) for x in (rows, products))
    held = jnp.einsum("bhmk,bhkv->bhmv", rows, state, precision=HIGHEST)  # k and q read the committed state once
    v, g, beta = (jnp.swapaxes(x, 1, 2) for x in (v, g, beta[..., None]))
    gain, decay = path_decays(g, ancestors_or_self(parent, max_depth))
    strict = jnp.where(jnp.eye(N, dtype=bool), 0.0, decay) * products[:, :, :N] * beta
    u = solve_by_depth(strict, beta * (v - gain * held[:, :, :N]), depth, max_depth)
    out = gain * held[:, :, N:] + jnp.einsum("bhij,bhjv->bhiv", decay * products[:, :, N:], u, precision=HIGHEST)
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(u, 1, 2)


def ancestors_or_self(parent: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """[b, i, j]: j is i or one of its ancestors. Squaring doubles the number of levels that are reached."""
    nodes = parent.shape[1]
    index = jnp.arange(nodes)
    path = (index[:, None] == index) | (parent[..., None] == index)
    for _ in range(math.ceil(math.log2(max(min(max_depth, nodes - 1), 1)))):
        steps = path.astype(jnp.float32)
        path = jnp.einsum("bij,bjk->bik", steps, steps, precision=HIGHEST) > 0.0
    return path
