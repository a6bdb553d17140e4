"""Tree attention as split flash decoding: the cache is read once, as far as it is filled, and no scores are stored.

The query heads of a kv head are rows of one matrix. A program has a block of rows and a part of the keys: one of
`splits` equal parts of the visible cache slots (their number is read on the device, so an empty half of the cache costs
nothing), or the nodes. Each part keeps its own maximum and sum; a second kernel joins them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ddtree_jax.ops import pallas_backend as gpu
from ddtree_jax.ops.tree_attention import xla

ROWS, SLOTS = 64, 32  # of one product
PROGRAMS = 132  # streaming multiprocessors of an H200: with fewer programs the cache is split
LOWEST = -1e30  # finite: a row that sees nothing must give no NaN


def tree_attention(q, k_cache, v_cache, k_nodes, v_nodes, length, mask, context_start, scale):
    """See `ddtree_jax.ops.tree_attention.tree_attention`; `length` is [B, N]."""
    start = jnp.zeros_like(length) if context_start is None else context_start
    attend = gpu.with_gradient_of(partial(xla.tree_attention, scale=scale), partial(_run, scale=scale))
    return attend(q, k_cache, v_cache, k_nodes, v_nodes, length, mask, start)


def _run(q, k_cache, v_cache, k_nodes, v_nodes, length, mask, start, *, scale):
    B, N, heads, D = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    rows = N * (heads // kv_heads)
    block = min(ROWS, gpu.side(rows))
    blocks = gpu.cdiv(rows, block)
    splits = max(PROGRAMS // (B * kv_heads * blocks), 1) if slots else 0
    if slots == 0:  # a block of no slots has no address; nothing of this one is read
        k_cache, v_cache = (jnp.zeros((B, kv_heads, 1, D), x.dtype) for x in (k_cache, v_cache))
    shape = (B, kv_heads, splits + 1, blocks * block)
    acc, top, total = gpu.call(
        partial(_kernel, splits=splits, nodes=N, repeats=heads // kv_heads, block=block, scale=scale),
        *(q, k_cache, v_cache, k_nodes, v_nodes, length, start, mask.astype(jnp.int8)),
        name="tree_attention",
        grid=(blocks * (splits + 1), kv_heads, B),
        in_specs=[
            gpu.BlockSpec((None, N, heads, D), lambda i, h, b: (b, 0, 0, 0)),
            *[gpu.BlockSpec((None, None, k_cache.shape[2], D), lambda i, h, b: (b, h, 0, 0))] * 2,
            *[gpu.BlockSpec((None, N, None, D), lambda i, h, b: (b, 0, h, 0))] * 2,
            *[gpu.BlockSpec((None, N), lambda i, h, b: (b, 0))] * 2,
            gpu.BlockSpec((None, N, N), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[
            gpu.BlockSpec((None, None, *shape[2:], D), lambda i, h, b: (b, h, 0, 0, 0)),
            *[gpu.BlockSpec((None, None, *shape[2:]), lambda i, h, b: (b, h, 0, 0))] * 2,
        ],
        out_shape=[jax.ShapeDtypeStruct((*shape, D), jnp.float32), *[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2],
        warps=8 if D > 128 else 4,
        stages=2,
    )
    return _join(acc, top, total, q)


def _join(acc, top, total, like):
    """One softmax from those of the parts, in the layout [B, N, nh, D] and dtype of `like`."""
    B, N, heads, D = like.shape
    kv_heads, parts = acc.shape[1:3]
    repeats = heads // kv_heads
    (out,) = gpu.call(
        partial(_join_kernel, parts=parts),
        *(acc, top, total),
        name="tree_attention_join",
        grid=(N * repeats, kv_heads, B),
        in_specs=[
            gpu.BlockSpec((None, None, parts, None, D), lambda i, h, b: (b, h, 0, i, 0)),
            *[gpu.BlockSpec((None, None, parts, None), lambda i, h, b: (b, h, 0, i))] * 2,
        ],
        out_specs=[
            gpu.BlockSpec((None, None, None, D), lambda i, h, b: (b, i // repeats, h * repeats + i % repeats, 0))
        ],
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype)],
        warps=4,
    )
    return out


def _join_kernel(acc_ref, top_ref, total_ref, out_ref, *, parts):
    part, column = jnp.arange(gpu.next_power_of_2(parts)), jnp.arange(gpu.side(acc_ref.shape[1]))
    there = part < parts
    top = jnp.where(there, gpu.load(top_ref, (part,), there), LOWEST)
    weight = jnp.exp(top - jnp.max(top))
    total = jnp.sum(weight * gpu.load(total_ref, (part,), there))
    acc = gpu.load(acc_ref, _grid(part, column), _both(there, column < acc_ref.shape[1]))
    out = jnp.sum(weight[:, None] * acc, axis=0) / jnp.where(total == 0.0, 1.0, total)
    gpu.store(out_ref, (column,), out.astype(out_ref.dtype), column < acc_ref.shape[1])


def _kernel(q_ref, k_ref, v_ref, k_node_ref, v_node_ref, length_ref, start_ref, mask_ref, *outputs, splits, **shape):
    nodes, repeats, block, scale = (shape[name] for name in ("nodes", "repeats", "block", "scale"))
    part, row = gpu.program_id(0) % (splits + 1), gpu.program_id(0) // (splits + 1) * block + jnp.arange(block)
    node, there = row // repeats, row < nodes * repeats
    q = _queries(q_ref, node, gpu.program_id(1) * repeats + row % repeats, there)
    length, start = (gpu.load(ref, (node,), there) for ref in (length_ref, start_ref))

    def cached(i, carry):
        slot = i * SLOTS + jnp.arange(SLOTS)
        visible = (slot >= start[:, None]) & (slot < length[:, None])
        keys, values = (_rows(ref, slot, slot < k_ref.shape[0], q.shape[1]) for ref in (k_ref, v_ref))
        return _attend(q, keys, values, visible, scale, carry)

    def drafted(i, carry):
        other = i * SLOTS + jnp.arange(SLOTS)
        index = _grid(node, other)
        visible = gpu.load(mask_ref, index, _both(there, other < nodes)) != 0
        keys, values = (_rows(ref, other, other < nodes, q.shape[1]) for ref in (k_node_ref, v_node_ref))
        return _attend(q, keys, values, visible, scale, carry)

    carry = jnp.zeros(q.shape, jnp.float32), jnp.full(block, LOWEST, jnp.float32), jnp.zeros(block, jnp.float32)
    if splits:
        carry = jax.lax.fori_loop(*_share(part, splits, start, length, there), cached, carry)
    blocks = jnp.where(part == splits, jnp.int32(gpu.cdiv(nodes, SLOTS)), 0)
    carry = jax.lax.fori_loop(jnp.int32(0), blocks, drafted, carry)
    _store(outputs, part, row, carry)


def _share(part, splits, start, length, there):
    """The blocks of slots that a part goes through: equal shares of those that any of its rows sees."""
    first = jnp.min(jnp.where(there, start, jnp.iinfo(jnp.int32).max)) // SLOTS
    end = gpu.cdiv(jnp.max(jnp.where(there, length, 0)), SLOTS)
    share = gpu.cdiv(jnp.maximum(end - first, 0), splits)
    begin = first + part * share
    return jnp.where(part < splits, begin, 0), jnp.where(part < splits, jnp.minimum(begin + share, end), 0)


def _attend(q, keys, values, visible, scale, carry):
    """A block of keys added to the running softmax of every row: (weighted values, maximum, sum)."""
    acc, top, total = carry
    scores = jnp.where(visible, gpu.dot(q, keys.T) * scale, LOWEST)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weight = jnp.where(visible, jnp.exp(scores - higher[:, None]), 0.0)
    fade = jnp.exp(top - higher)
    acc = acc * fade[:, None] + gpu.dot(weight.astype(values.dtype), values)
    return acc, higher, total * fade + jnp.sum(weight, axis=1)


def _grid(rows, columns):
    """Two index vectors as the two indices of a matrix."""
    shape = (rows.shape[0], columns.shape[0])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def _both(rows, columns):
    """Where both a row's and a column's condition hold."""
    row, column = _grid(rows, columns)
    return row & column


def _queries(ref, node, head, there):
    """The rows [block, D] of nodes and heads, D widened by zeros to a power of two."""
    column = jnp.arange(gpu.side(ref.shape[2]))
    node_index, column_index = _grid(node, column)
    index = (node_index, _grid(head, column)[0], column_index)
    return gpu.load(ref, index, _both(there, column < ref.shape[2]))


def _rows(ref, row, there, width):
    """Rows of a [rows, D] array, D widened by zeros."""
    column = jnp.arange(width)
    return gpu.load(ref, _grid(row, column), _both(there, column < ref.shape[1]))


def _store(outputs, part, row, carry):
    acc_ref, *others = outputs
    acc, *sums = carry
    column = jnp.arange(acc.shape[1])
    here = jnp.full(row.shape, part, jnp.int32)
    index = (_grid(here, column)[0], *_grid(row, column))
    gpu.store(acc_ref, index, acc, _both(row >= 0, column < acc_ref.shape[2]))
    for ref, value in zip(others, sums, strict=True):
        gpu.store(ref, (here, row), value, row >= 0)
