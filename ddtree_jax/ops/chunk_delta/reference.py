"""The delta rule token by token: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax.ops.delta import HIGHEST


def chunk_delta(q, k, v, g, beta, state):
    """See `ddtree_jax.ops.chunk_delta.chunk_delta`."""
    repeats = v.shape[2] // k.shape[2]
    rows = [jnp.repeat(x, repeats, axis=2) for x in (q, k)] + [v, g, beta]
    time_first = [jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in rows]
    state, out = jax.lax.scan(_token, state.astype(jnp.float32), time_first)
    return jnp.moveaxis(out, 0, 1), state


def _token(state, row):
    q, k, v, g, beta = row
    state = state * jnp.exp(g)[..., None, None]
    update = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k, precision=HIGHEST))
    state = state + k[..., :, None] * update[..., None, :]
    return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision=HIGHEST)
