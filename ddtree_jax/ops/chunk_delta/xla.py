"""The delta rule in chunks of 64: a triangular solve inside each chunk, a scan over chunks for the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax.ops.delta import HIGHEST, masked_decay, solve_unit_lower

CHUNK = 64


def chunk_delta(q, k, v, g, beta, state):
    """See `ddtree_jax.ops.chunk_delta.chunk_delta`."""
    T, dv = v.shape[1], v.shape[3]
    repeats = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    size = min(CHUNK, T)
    q, k, v, g, beta = (_to_chunks(x, size) for x in (q, k, v, g, beta))
    total = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    decay = masked_decay(total, lower)
    strict = jnp.where(lower & ~jnp.eye(size, dtype=bool), beta[..., None] * _rows(k, k) * decay, 0.0)
    right = jnp.concatenate([v, k * jnp.exp(total)[..., None]], axis=-1) * beta[..., None]
    solved = solve_unit_lower(strict, right)
    values, keys = solved[..., :dv], solved[..., dv:]
    inner = _rows(q, k) * decay
    entry = q * jnp.exp(total)[..., None]
    leaving = k * jnp.exp(total[..., -1:] - total)[..., None]
    gain = jnp.exp(total[..., -1])
    state, out = jax.lax.scan(_chunk, state.astype(jnp.float32), (values, keys, inner, entry, leaving, gain))
    return _from_chunks(out, T), state


def _chunk(state, rows):
    values, keys, inner, entry, leaving, gain = rows
    update = values - jnp.einsum("bhik,bhkv->bhiv", keys, state, precision=HIGHEST)
    out = jnp.einsum("bhik,bhkv->bhiv", entry, state, precision=HIGHEST)
    out = out + jnp.einsum("bhij,bhjv->bhiv", inner, update, precision=HIGHEST)
    written = jnp.einsum("bhik,bhiv->bhkv", leaving, update, precision=HIGHEST)
    return state * gain[..., None, None] + written, out


def _rows(a, b):
    """All inner products of the rows of two [..., i, d] arrays."""
    return jnp.einsum("...ik,...jk->...ij", a, b, precision=HIGHEST)


def _to_chunks(x, size):
    """[B, T, h, ...] -> float32 [chunks, B, h, size, ...], padded with rows that change nothing."""
    B, T, heads, *rest = x.shape
    chunks = -(-T // size)
    padding = [(0, 0), (0, chunks * size - T)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x.astype(jnp.float32), padding).reshape(B, chunks, size, heads, *rest)
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


def _from_chunks(x, T):
    """[chunks, B, h, size, d] -> [B, T, h, d]."""
    chunks, B, heads, size, d = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, chunks * size, heads, d)[:, :T]
