"""The delta rule over a tree in one kernel: products, the solve by blocks of nodes, and the outputs.

A program has one value head and a slice of its value dimensions. It goes through the nodes in blocks, in their order
(parents first): a block takes what earlier blocks wrote, and then inverts its own unit lower-triangular matrix by
doubling (see `ops.delta.invert_unit_lower`), which is a few products of BLOCK x BLOCK.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ddtree_jax.ops import pallas_backend as gpu
from ddtree_jax.ops.delta import path_decays
from ddtree_jax.ops.tree_delta.xla import ancestors_or_self

BLOCK = 32  # nodes
COLUMNS = 32  # value dimensions of a program
KEYS = 32  # key dimensions of a product at a time; all 128 at once would not fit into the registers
WARPS = 4


def solve(q, k, v, g, beta, state, parent, depth, max_depth):
    """See `ddtree_jax.ops.tree_delta.tree_delta`; returns (out, u)."""
    del depth
    B, N, heads, dv = v.shape
    keys, values = gpu.side(k.shape[3]), gpu.side(dv)
    q, k, state = (_widen(x, axis, keys) for x, axis in ((q, 3), (k, 3), (state, 2)))
    v, state = _widen(v, 3, values), _widen(state, 3, values)
    gain, decay = path_decays(jnp.swapaxes(g, 1, 2), ancestors_or_self(parent, max_depth))
    columns, block = min(COLUMNS, values), min(BLOCK, gpu.side(N))
    repeats = heads // k.shape[2]
    by_key = gpu.BlockSpec((None, N, None, keys), lambda b, h, c: (b, 0, h // repeats, 0))
    by_value = gpu.BlockSpec((None, N, None, columns), lambda b, h, c: (b, 0, h, c))
    out, u = gpu.call(
        partial(_kernel, nodes=N, block=block),
        *(q, k, v, jnp.swapaxes(beta, 1, 2), gain[..., 0], decay, state),
        name="tree_delta",
        grid=(B, heads, values // columns),
        in_specs=[
            *(by_key, by_key, by_value),
            *[gpu.BlockSpec((None, None, N), lambda b, h, c: (b, h, 0))] * 2,
            gpu.BlockSpec((None, None, N, N), lambda b, h, c: (b, h, 0, 0)),
            gpu.BlockSpec((None, None, keys, columns), lambda b, h, c: (b, h, 0, c)),
        ],
        out_specs=[by_value, by_value],
        out_shape=[jax.ShapeDtypeStruct((B, N, heads, values), jnp.float32)] * 2,
        warps=WARPS,
    )
    return out[..., :dv], u[..., :dv]


def _widen(x, axis, size):
    """Zeros behind an axis up to `size`: they add nothing to a product."""
    padding = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, padding) if size > x.shape[axis] else x


def _kernel(q_ref, k_ref, v_ref, beta_ref, gain_ref, decay_ref, state_ref, out_ref, u_ref, *, nodes, block):
    def one_block(i, _):
        first = i * block
        beta, gain = (_column(ref, first, nodes, block) for ref in (beta_ref, gain_ref))
        values, held_k, held_q, kk, qk = _products(q_ref, k_ref, v_ref, state_ref, first, nodes, block)

        def earlier(j, carry):
            """What the nodes of an earlier block wrote, taken from x and added to the outputs."""
            x, out = carry
            kk, qk = _inner(q_ref, k_ref, first, j * block, nodes, block)
            decay, u = _square(decay_ref, first, j * block, nodes, block), _rows(u_ref, j * block, nodes, block)
            return x - gpu.dot(beta * decay * kk, u), out + gpu.dot(decay * qk, u)

        x, out = jax.lax.fori_loop(0, i, earlier, (beta * (values - gain * held_k), gain * held_q))
        decay = _square(decay_ref, first, first, nodes, block)
        u = gpu.dot(_inverse(jnp.where(_below(block), beta * decay * kk, 0.0)), x)
        out += gpu.dot(decay * qk, u)
        index, there = _index(first, nodes, block, u.shape[1])
        gpu.store(u_ref, index, u, there)
        gpu.store(out_ref, index, out, there)
        gpu.barrier()
        return 0

    jax.lax.fori_loop(0, gpu.cdiv(nodes, block), one_block, 0)


def _products(q_ref, k_ref, v_ref, state_ref, first, nodes, block):
    """A block's values, its keys and queries on the committed state, and their products with its keys."""
    columns, width = state_ref.shape[1], min(KEYS, k_ref.shape[1])

    def part(c, sums):
        k, q = (_rows(ref, first, nodes, block, c * width, width) for ref in (k_ref, q_ref))
        state = state_ref[gpu.ds(c * width, width), :]
        return tuple(
            s + gpu.dot(a, b) for s, (a, b) in zip(sums, ((k, state), (q, state), (k, k.T), (q, k.T)), strict=True)
        )

    zeros = tuple(jnp.zeros((block, n), jnp.float32) for n in (columns, columns, block, block))
    return _rows(v_ref, first, nodes, block), *jax.lax.fori_loop(0, k_ref.shape[1] // width, part, zeros)


def _inner(q_ref, k_ref, first, other, nodes, block):
    """The products of a block's keys and queries with the keys of another block."""
    width = min(KEYS, k_ref.shape[1])

    def part(c, sums):
        k, q = (_rows(ref, first, nodes, block, c * width, width) for ref in (k_ref, q_ref))
        key = _rows(k_ref, other, nodes, block, c * width, width).T
        return sums[0] + gpu.dot(k, key), sums[1] + gpu.dot(q, key)

    zeros = (jnp.zeros((block, block), jnp.float32),) * 2
    return jax.lax.fori_loop(0, k_ref.shape[1] // width, part, zeros)


def _below(block):
    """Strictly below the diagonal."""
    row, column = _positions(block)
    return row > column


def _inverse(strict):
    """(I + strict)^-1 of a strictly lower-triangular matrix, by doubling the size of inverted diagonal blocks."""
    row, column = _positions(strict.shape[0])
    inverse = jnp.where(row == column, 1.0, 0.0)
    width = 1
    while width < strict.shape[0]:
        corner = jnp.where((row // width % 2 == 1) & (column // width == row // width - 1), strict, 0.0)
        inverse -= corner if width == 1 else gpu.dot(inverse, gpu.dot(corner, inverse))
        width *= 2
    return inverse


def _positions(block):
    rows = jax.lax.broadcasted_iota(jnp.int32, (block, block), 0)
    return rows, jax.lax.broadcasted_iota(jnp.int32, (block, block), 1)


def _index(first, nodes, block, width, start=0):
    """Rows first..first+block, columns start..start+width of an array of `nodes` rows, and which there are."""
    shape = (block, width)
    row = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row, start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)), row < nodes


def _rows(ref, first, nodes, block, start=0, width=None):
    return gpu.load(ref, *_index(first, nodes, block, width or ref.shape[1], start))


def _column(ref, first, nodes, block):
    row = first + jnp.arange(block)
    return gpu.load(ref, (row,), row < nodes)[:, None]


def _square(ref, first, other, nodes, block):
    row, column = _positions(block)
    row, column = first + row, other + column
    return gpu.load(ref, (row, column), (row < nodes) & (column < nodes))
