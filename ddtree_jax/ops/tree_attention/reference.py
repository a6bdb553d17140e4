"""Plain writing of tree attention: keys and values joined, heads repeated, one masked softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def tree_attention(q, k_cache, v_cache, k_nodes, v_nodes, length, mask, context_start, scale):
    """See `ddtree_jax.ops.tree_attention.tree_attention`; `length` is [B, N]."""
    repeats = q.shape[2] // k_cache.shape[1]
    k, v = (jnp.repeat(_join(*pair), repeats, axis=1) for pair in ((k_cache, k_nodes), (v_cache, v_nodes)))
    scores = jnp.einsum("bnhd,bhsd->bhns", q, k, preferred_element_type=jnp.float32) * scale
    slots = _visible_slots(q.shape[:2], k_cache.shape[2], length, context_start)
    visible = jnp.concatenate([slots, mask], axis=2)[:, None]
    probability = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
    probability = jnp.where(visible, probability, 0.0).astype(v.dtype)
    return jnp.einsum("bhns,bhsd->bnhd", probability, v, preferred_element_type=jnp.float32).astype(q.dtype)


def _join(cache, nodes):
    """[B, nk, S, D] and [B, N, nk, D] -> [B, nk, S + N, D]."""
    return jnp.concatenate([cache, jnp.swapaxes(nodes, 1, 2)], axis=2)


def _visible_slots(rows, slots, length, context_start):
    """[B, N, S]: which cache slots each row sees."""
    slot = jnp.arange(slots)
    start = jnp.zeros(rows, jnp.int32) if context_start is None else context_start
    return (slot >= start[..., None]) & (slot < length[..., None])
