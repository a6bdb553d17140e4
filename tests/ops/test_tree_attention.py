"""Tree attention: every writing against a float64 loop, and a look at the compiled program for copies of the cache."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.oracle import distance, random_tree

from ddtree_jax.ops.tree_attention import IMPLEMENTATIONS, tree_attention
from ddtree_jax.tree import ancestor_mask

each = pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
attend = jax.jit(tree_attention, static_argnames=("scale", "implementation"))


def inputs(rng, batch, nodes, heads, repeats, slots, width, dtype=jnp.float32):
    """Random q, k_cache, v_cache, k_nodes, v_nodes."""
    shapes = [(batch, nodes, heads * repeats, width), *[(batch, heads, slots, width)] * 2, *[(batch, nodes, heads, width)] * 2]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def loop(q, k_cache, v_cache, k_nodes, v_nodes, length, mask, context_start=None, scale=None):
    """One row and head at a time, float64; rows that see nothing are 0."""
    q, k_cache, v_cache, k_nodes, v_nodes = (np.asarray(x, np.float64) for x in (q, k_cache, v_cache, k_nodes, v_nodes))
    out, (batch, nodes, heads, width) = np.zeros_like(q), q.shape
    length = np.broadcast_to(np.reshape(length, (batch, -1)), (batch, nodes))
    start = np.zeros((batch, nodes), int) if context_start is None else np.asarray(context_start)
    for b, i, h in np.ndindex(batch, nodes, heads):
        kv = h // (heads // k_cache.shape[1])
        slots, seen = slice(start[b, i], max(start[b, i], length[b, i])), np.asarray(mask)[b, i]
        keys = np.concatenate([k_cache[b, kv, slots], k_nodes[b, seen, kv]])
        values = np.concatenate([v_cache[b, kv, slots], v_nodes[b, seen, kv]])
        if len(keys):
            score = keys @ q[b, i, h] * (width**-0.5 if scale is None else scale)
            weight = np.exp(score - score.max())
            out[b, i, h] = weight @ values / weight.sum()
    return out


@each
@pytest.mark.parametrize("nodes, repeats, slots", [(1, 2, 11), (7, 1, 11), (7, 2, 0), (7, 3, 11), (13, 2, 1)])
def test_float64_loop(implementation, nodes, repeats, slots):
    rng = np.random.default_rng(nodes)
    rows = inputs(rng, 3, nodes, 5, repeats, slots, 6)
    mask = ancestor_mask(random_tree(rng, 3, nodes).parent, nodes)
    length = jnp.array([0, slots, slots // 2], jnp.int32)
    out = attend(*rows, length, mask, implementation=implementation)
    assert out.dtype == jnp.float32
    assert distance(out, loop(*rows, length, mask)) < 2e-6


@each
def test_lengths_and_windows_of_every_row(implementation):
    rng = np.random.default_rng(1)
    rows, mask = inputs(rng, 2, 5, 3, 2, 7, 4), jnp.asarray(rng.random((2, 5, 5)) < 0.4)
    length = jnp.array([[0, 1, 7, 5, 3], [7, 7, 2, 0, 6]], jnp.int32)
    start = jnp.array([[0, 0, 6, 5, 1], [7, 3, 2, 2, 0]], jnp.int32)  # some windows are empty
    out = attend(*rows, length, mask, context_start=start, scale=0.3, implementation=implementation)
    assert distance(out, loop(*rows, length, mask, start, scale=0.3)) < 2e-6


@each
@pytest.mark.parametrize("slots", [0, 4])
def test_a_row_that_sees_nothing_is_zero_and_disturbs_nobody(implementation, slots):
    rng = np.random.default_rng(2)
    rows = inputs(rng, 1, 3, 2, 2, slots, 4)
    mask = jnp.array([[[1, 0, 0], [1, 1, 0], [0, 0, 0]]], bool)
    out = attend(*rows, jnp.array([0], jnp.int32), mask, implementation=implementation)
    assert not np.any(out[0, 2])
    assert distance(out, loop(*rows, [0], mask)) < 2e-6


@each
def test_hidden_slots_and_nodes_do_not_count(implementation):
    rng = np.random.default_rng(3)
    q, *rest = inputs(rng, 1, 3, 2, 2, 5, 4)
    mask = jnp.tril(jnp.ones((1, 3, 3), bool)).at[0, 2, 1].set(False)
    length = jnp.array([3], jnp.int32)
    clean = attend(q, *rest, length, mask, implementation=implementation)
    dirty = [x.at[:, :, 3:].set(1e30) for x in rest[:2]] + [x.at[:, 1].set(1e30) for x in rest[2:]]
    out = attend(q, *dirty, length, mask, implementation=implementation)
    np.testing.assert_array_equal(out[:, [0, 2]], clean[:, [0, 2]])


@each
def test_large_scores_do_not_overflow(implementation):
    rows = inputs(np.random.default_rng(4), 1, 3, 2, 1, 5, 4)
    rows[0] = 1e4 * rows[0]
    mask = jnp.tril(jnp.ones((1, 3, 3), bool))
    out = attend(*rows, jnp.array([5], jnp.int32), mask, implementation=implementation)
    assert distance(out, loop(*rows, [5], mask)) < 1e-3


# 65 nodes, batch 2 and two kv heads: a shape for which XLA:CPU refuses other ways of writing these products in bfloat16.
@each
@pytest.mark.parametrize("shape", [(1, 1, 3, 1, 5, 8), (2, 7, 3, 2, 11, 8), (2, 65, 2, 1, 64, 64)])
def test_bfloat16(implementation, shape):
    rng = np.random.default_rng(5)
    rows = inputs(rng, *shape, dtype=jnp.bfloat16)
    mask = ancestor_mask(random_tree(rng, *shape[:2]).parent, shape[1])
    length = jnp.full(shape[0], shape[4] - 1, jnp.int32)
    out = attend(*rows, length, mask, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    assert distance(out, loop(*rows, length, mask)) < 2e-2


@each
def test_one_node_at_a_time_equals_all_at_once(implementation):
    """Verifying a path in one block, and decoding it token by token with the cache growing."""
    rng = np.random.default_rng(6)
    q, k_cache, v_cache, k_nodes, v_nodes = inputs(rng, 1, 3, 2, 3, 6, 4)
    mask = jnp.tril(jnp.ones((1, 3, 3), bool))
    block = attend(q, k_cache, v_cache, k_nodes, v_nodes, jnp.array([3], jnp.int32), mask, implementation=implementation)
    for i in range(3):
        one = slice(i, i + 1)
        row = (q[:, one], k_cache, v_cache, k_nodes[:, one], v_nodes[:, one], jnp.array([3 + i], jnp.int32), mask[:, :1, :1])
        out = attend(*row, implementation=implementation)
        assert distance(out, np.asarray(block[:, one], np.float64)) < 1e-6
        k_cache = k_cache.at[:, :, 3 + i].set(k_nodes[:, i])
        v_cache = v_cache.at[:, :, 3 + i].set(v_nodes[:, i])


@each
def test_the_gradient_is_finite_where_rows_see_nothing(implementation):
    rows = inputs(np.random.default_rng(7), 1, 3, 2, 2, 5, 4)
    mask = jnp.array([[[1, 0, 0], [0, 0, 0], [1, 0, 1]]], bool)
    length = jnp.array([[0, 0, 2]], jnp.int32)

    def total(*rows):
        return jnp.sum(attend(*rows, length, mask, implementation=implementation) ** 2)

    rows[1] = rows[1].at[:, :, 2:].set(1e4)  # hidden scores whose exp would be inf
    gradients = jax.grad(total, argnums=range(5))(*rows)
    assert all(np.all(np.isfinite(x)) for x in gradients)
    assert np.any(gradients[0][0, 2]) and not np.any(gradients[0][0, 1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("nodes, repeats", [(1, 1), (1, 4), (9, 2)])
def test_the_cache_is_neither_copied_nor_converted(dtype, nodes, repeats):
    rows = inputs(np.random.default_rng(8), 1, nodes, 2, repeats, 768, 256, dtype)
    mask = jnp.ones((1, nodes, nodes), bool)
    program = jax.jit(partial(tree_attention, implementation="xla")).lower(*rows, jnp.array([700]), mask).compile()
    assert program.memory_analysis().temp_size_in_bytes < rows[1].nbytes / 2


def test_unknown_implementation():
    rows = inputs(np.random.default_rng(9), 1, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="unknown implementation 'flash': choose one of xla, reference"):
        tree_attention(*rows, jnp.array([1]), jnp.ones((1, 1, 1), bool), implementation="flash")
