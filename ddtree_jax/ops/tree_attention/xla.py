"""Fast writing of tree attention: a block of scores for the cache, one for the nodes, and one softmax over both.

The cache is used in its stored layout [B, nk, S, D], as the right side of plain batched matrix products. Joining it
with the nodes' rows, or contracting with node and head axes unmerged, makes XLA:CPU copy it (and for some shapes in
bfloat16 refuse the product).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax.ops.dispatch import platform

LOWEST = float(jnp.finfo(jnp.float32).min)  # finite: a row that sees nothing must give no NaN


def tree_attention(q, k_cache, v_cache, k_nodes, v_nodes, length, mask, context_start, scale):
    """See `ddtree_jax.ops.tree_attention.tree_attention`; `length` is [B, N]."""
    heads, slots = k_cache.shape[1:3]
    rows = _group(q, heads)
    k_nodes, v_nodes = jnp.swapaxes(k_nodes, 1, 2), jnp.swapaxes(v_nodes, 1, 2)
    repeats = q.shape[2] // heads
    visible = [jnp.repeat(x, repeats, axis=1)[:, None] for x in (_visible_slots(slots, length, context_start), mask)]
    scores = [_dot("bkmd,bksd->bkms", rows, keys) * scale for keys in (k_cache, k_nodes)]
    weights = _joint_softmax(scores, visible)
    parts = [_dot("bkms,bksd->bkmd", w.astype(v.dtype), v) for w, v in zip(weights, (v_cache, v_nodes), strict=True)]
    return _ungroup(parts[0] + parts[1], q.shape).astype(q.dtype)


def _group(q, heads):
    """[B, N, nh, D] -> [B, nk, N * nh/nk, D]: the queries of one kv head together."""
    B, N, nh, D = q.shape
    return q.reshape(B, N, heads, nh // heads, D).swapaxes(1, 2).reshape(B, heads, N * (nh // heads), D)


def _ungroup(rows, shape):
    """Back to `shape` [B, N, nh, D]."""
    B, N, nh, D = shape
    heads = rows.shape[1]
    return rows.reshape(B, heads, N, nh // heads, D).swapaxes(1, 2).reshape(shape)


def _visible_slots(slots, length, context_start):
    """[B, N, S]: which cache slots each row sees."""
    slot = jnp.arange(slots)
    visible = slot < length[..., None]
    return visible if context_start is None else visible & (slot >= context_start[..., None])


def _joint_softmax(scores, visible):
    """Softmax over the last axes of several blocks together, zero where not visible."""
    # Hidden before exp, so that no gradient passes through a hidden score; hidden after, for rows that see nothing.
    scores = [jnp.where(v, s, LOWEST) for s, v in zip(scores, visible, strict=True)]
    top = jax.lax.stop_gradient(jnp.maximum(*(jnp.max(s, axis=-1, keepdims=True, initial=LOWEST) for s in scores)))
    weights = [jnp.where(v, jnp.exp(s - top), 0.0) for s, v in zip(scores, visible, strict=True)]
    total = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    return [w / jnp.where(total == 0.0, 1.0, total) for w in weights]


def _dot(pattern, left, right):
    """A batched product, float32 result. One bfloat16 row goes in twice: for a single one XLA:CPU converts `right`."""
    if left.shape[2] == 1 and left.dtype == jnp.bfloat16 and platform() == "cpu":
        return _dot(pattern, jnp.repeat(left, 2, axis=2), right)[:, :, :1]
    return jnp.einsum(pattern, left, right, preferred_element_type=jnp.float32)
