"""The delta rule over a tree, node by node from a buffer of their parents' states: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax.ops.delta import read, repeat_heads, step


def scan(q, k, v, g, beta, state, parent, depth, max_depth):
    """See `ddtree_jax.ops.tree_delta.tree_delta`; returns (out, u). Needs neither depth nor max_depth."""
    del depth, max_depth
    B, N, heads, _ = v.shape
    rows = (repeat_heads(q, heads), repeat_heads(k, heads), v, g, beta, parent)
    slots = jnp.zeros((B, N + 1, *state.shape[1:]), jnp.float32).at[:, 0].set(state)  # slot 0: before the root

    def node(slots, row):
        i, q, k, v, g, beta, parent = row
        before = jax.vmap(lambda s, p: s[p])(slots, parent + 1)
        after, u = step(before, k, v, g, beta)
        return jax.lax.dynamic_update_index_in_dim(slots, after, i + 1, axis=1), (read(after, q), u)

    _, outputs = jax.lax.scan(node, slots, (jnp.arange(N), *(jnp.swapaxes(x, 0, 1) for x in rows)))
    return tuple(jnp.swapaxes(x, 0, 1) for x in outputs)
