"""The delta rule in chunks of 64: a triangular solve inside each chunk, a scan over chunks for the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax.ops.delta import HIGHEST, path_decays, repeat_heads, solve_unit_lower

CHUNK = 64


def chunk_delta(q, k, v, g, beta, state):
    """See `ddtree_jax.ops.chunk_delta.chunk_delta`."""
    T, dv = v.shape[1], v.shape[3]
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    size = min(CHUNK, T)
    q, k, v, g, beta = (_to_chunks(x, size) for x in (q, k, v, g, beta[..., None]))
    lower = jnp.tril(jnp.ones((size, size), bool))
    gain, decay = path_decays(g, lower)
    strict = jnp.where(lower & ~jnp.eye(size, dtype=bool), beta * _rows(k, k) * decay, 0.0)
    solved = solve_unit_lower(strict, beta * jnp.concatenate([v, gain * k], axis=-1))
    values, keys = solved[..., :dv], solved[..., dv:]
    leaving = k * decay[..., -1, :, None]
    chunks = (values, keys, _rows(q, k) * decay, gain * q, leaving, gain[..., -1:, :])
    state, out = jax.lax.scan(_chunk, state, chunks)
    return _from_chunks(out, T), state


def _chunk(state, rows):
    values, keys, inner, entry, leaving, gain = rows
    update = values - jnp.einsum("bhik,bhkv->bhiv", keys, state, precision=HIGHEST)
    out = jnp.einsum("bhik,bhkv->bhiv", entry, state, precision=HIGHEST)
    out = out + jnp.einsum("bhij,bhjv->bhiv", inner, update, precision=HIGHEST)
    written = jnp.einsum("bhik,bhiv->bhkv", leaving, update, precision=HIGHEST)
    return gain * state + written, out


def _rows(a, b):
    """All inner products of the rows of two [..., i, d] arrays."""
    return jnp.einsum("...ik,...jk->...ij", a, b, precision=HIGHEST)


def _to_chunks(x, size):
    """[B, T, h, ...] -> [chunks, B, h, size, ...], padded with rows that change nothing."""
    B, T, heads, *rest = x.shape
    chunks = -(-T // size)
    padding = [(0, 0), (0, chunks * size - T)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding).reshape(B, chunks, size, heads, *rest)
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


def _from_chunks(x, T):
    """[chunks, B, h, size, d] -> [B, T, h, d]."""
    chunks, B, heads, size, d = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, chunks * size, heads, d)[:, :T]
