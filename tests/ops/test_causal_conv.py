"""The causal convolution: windows checked by eye, then against sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.oracle import path_to, random_tree, tree_of

from ddtree_jax.ops import causal_conv
from ddtree_jax.tree import ancestor_ids

IMPLEMENTATIONS = sorted(causal_conv.IMPLEMENTATIONS)
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
sequence = jax.jit(causal_conv.sequence, static_argnames="implementation")
tree_conv = jax.jit(causal_conv.tree, static_argnames="implementation")
next_window = jax.jit(causal_conv.next_window)

# One channel; the weights write the four rows of a window as digits of a number, and silu leaves such numbers alone.
DIGITS = np.array([1000, 100, 10, 1], np.float32)[:, None]
WINDOW = np.array([1, 2, 3], np.float32)[None, :, None]


def column(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)[None, :, None]


def run_tree(x, window, weight, tree, implementation):
    ancestors = ancestor_ids(jnp.asarray(tree.parent), len(weight))[..., 1:]
    return tree_conv(x, window, weight, ancestors, tree.depth, implementation=implementation)


def random_case(rng, rows, taps=4, channels=5, batch=2):
    shapes = (batch, rows, channels), (batch, taps - 1, channels), (taps, channels)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


@each
def test_a_sequence_reaches_into_the_window(implementation):
    out = sequence(column(4, 5, 6, 7, 8), WINDOW, DIGITS, implementation=implementation)
    np.testing.assert_array_equal(out[0, :, 0], [1234, 2345, 3456, 4567, 5678])


@each
def test_a_node_reaches_its_ancestors_then_the_window(implementation):
    # depths 0, 1, 1, 2, 3, 4 and a pad: 4 -> 5 -> 6 -> 7 -> 8 with 9 beside the 5
    tree = tree_of([[-1, 0, 0, 1, 3, 4, -1]])
    out = run_tree(column(4, 5, 9, 6, 7, 8, 0), WINDOW, DIGITS, tree, implementation)
    np.testing.assert_array_equal(out[0, :, 0], [1234, 2345, 2349, 3456, 4567, 5678, 1230])


@each
def test_silu_and_float64_sums(implementation):
    x, window, weight = random_case(np.random.default_rng(0), 7)
    rows = np.concatenate([window, x], axis=1).astype(np.float64)
    total = sum(rows[:, j : j + 7] * np.asarray(weight, np.float64)[j] for j in range(4))
    out = sequence(x, window, weight, implementation=implementation)
    np.testing.assert_allclose(out, total / (1 + np.exp(-total)), atol=1e-6)


@each
@pytest.mark.parametrize("nodes", [1, 2, 11])
def test_a_node_equals_the_end_of_its_path_as_a_sequence(implementation, nodes):
    rng = np.random.default_rng(nodes)
    x, window, weight = random_case(rng, nodes)
    tree = random_tree(rng, 2, nodes, pads=2 if nodes > 4 else 0)
    out = run_tree(x, window, weight, tree, implementation)
    for b, i in np.ndindex(2, nodes):
        path = path_to(tree, b, i)
        padded = path + [0] * (nodes - len(path))
        alone = sequence(x[b : b + 1, padded], window[b : b + 1], weight, implementation="reference")
        np.testing.assert_allclose(out[b, i], alone[0, len(path) - 1], atol=1e-6)


@each
def test_two_taps(implementation):
    x, window, weight = random_case(np.random.default_rng(2), 3, taps=2)
    tree = tree_of([[-1, 0, 0], [-1, 0, 1]])
    out = run_tree(x, window, weight, tree, implementation)
    alone = sequence(x[:1, [0, 2]], window[:1], weight, implementation="reference")
    np.testing.assert_allclose(out[0, 2], alone[0, 1], atol=1e-6)


@each
def test_bfloat16_is_rounded_before_and_after_silu(implementation):
    x, window, weight = (jnp.asarray(t, jnp.bfloat16) for t in random_case(np.random.default_rng(3), 7))
    rows = np.concatenate([window, x], axis=1).astype(np.float32)
    total = sum(rows[:, j : j + 7] * np.asarray(weight, np.float32)[j] for j in range(4))
    rounded = np.asarray(jnp.asarray(total, jnp.bfloat16), np.float32)
    expected = jnp.asarray(rounded / (1 + np.exp(-rounded)), jnp.bfloat16)
    out = sequence(x, window, weight, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    "counts, expected",
    [((0, 1), ([1, 2, 3], [2, 3, 4])), ((2, 3), ([3, 4, 5], [4, 5, 6])), ((4, 5), ([5, 6, 7], [6, 7, 8]))],
)
def test_next_window_is_the_last_rows_up_to_the_count_of_each_sequence(counts, expected):
    window, x = (np.tile(t, (2, 1, 1)) for t in (WINDOW, column(4, 5, 6, 7, 8)))
    np.testing.assert_array_equal(next_window(window, x, np.array(counts))[..., 0], expected)


def test_next_window_of_rows_fewer_than_the_taps():
    np.testing.assert_array_equal(next_window(WINDOW, column(4), np.array([1]))[0, :, 0], [2, 3, 4])


def test_next_window_keeps_the_dtype_of_the_window():
    assert next_window(WINDOW.astype(jnp.bfloat16), column(4), np.array([1])).dtype == jnp.bfloat16


def test_unknown_implementation():
    with pytest.raises(ValueError, match="unknown implementation 'fast': choose one of xla, reference"):
        sequence(column(4), WINDOW, DIGITS, implementation="fast")
