"""The delta rule token by token: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax.ops.delta import read, repeat_heads, step


def chunk_delta(q, k, v, g, beta, state):
    """See `ddtree_jax.ops.chunk_delta.chunk_delta`."""
    rows = (repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2]), v, g, beta)

    def token(state, row):
        q, *rest = row
        state, _ = step(state, *rest)
        return state, read(state, q)

    state, out = jax.lax.scan(token, state, tuple(jnp.swapaxes(x, 0, 1) for x in rows))
    return jnp.swapaxes(out, 0, 1), state
