"""Two-stage top-k against a stable sort, ties and infinities included."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.oracle import equations

from ddtree_jax.ops.top_k import IMPLEMENTATIONS, top_k
from ddtree_jax.ops.top_k.xla import block_width

each = pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
select = jax.jit(top_k, static_argnames=("k", "implementation"))


def check(x, k, implementation="xla"):
    """Descending, equal values with the lower index first."""
    values, index = select(x, k, implementation=implementation)
    row = np.asarray(x, np.float64)
    order = np.argsort(-row, axis=1, kind="stable")[:, :k]
    assert values.dtype == x.dtype and index.dtype == jnp.int32
    np.testing.assert_array_equal(index, order)
    np.testing.assert_array_equal(np.asarray(values, np.float64), np.take_along_axis(row, order, axis=1))


def with_ties(rng, rows, size, levels, dtype=jnp.float32):
    return jnp.asarray(rng.integers(0, levels, (rows, size)), dtype)


@each
def test_by_eye(implementation):
    x = jnp.array([[1.0, 7.0, -jnp.inf, 7.0, 3.0], [-jnp.inf, -jnp.inf, 2.0, -jnp.inf, jnp.inf]])
    values, index = top_k(x, 4, implementation=implementation)
    np.testing.assert_array_equal(values, [[7, 7, 3, 1], [np.inf, 2, -np.inf, -np.inf]])
    np.testing.assert_array_equal(index, [[1, 3, 4, 0], [4, 2, 0, 1]])


@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size, k", [(1, 1), (7, 7), (1009, 1), (1009, 13), (1009, 600), (4096, 31), (9973, 5)])
def test_random_rows_with_ties(implementation, dtype, size, k):
    rng = np.random.default_rng(size + k)
    check(jnp.asarray(rng.standard_normal((3, size)), dtype), k, implementation)
    check(with_ties(rng, 3, size, 4, dtype), k, implementation)


@each
@pytest.mark.parametrize("size", [1000, 4096])
def test_fewer_finite_entries_than_k(implementation, size):
    x = jnp.full((2, size), -jnp.inf).at[0, 777].set(1.0).at[0, 3].set(-2.0)
    check(x, 9, implementation)


@each
def test_zeros_of_either_sign_are_equal(implementation):
    x = jnp.full((1, 4096), -1.0).at[0, 100].set(-0.0).at[0, 2000].set(0.0).at[0, 3000].set(-0.0)
    np.testing.assert_array_equal(select(x, 3, implementation=implementation)[1], [[100, 2000, 3000]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_whole_vocabulary(dtype):
    rng = np.random.default_rng(0)
    check(jnp.asarray(rng.standard_normal((2, 248320)), dtype), 64)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 6), infinite=st.floats(0, 1))
def test_it_is_the_whole_rows_top_k(seed, levels, infinite):
    rng = np.random.default_rng(seed)
    x = jnp.where(rng.random((3, 640)) < infinite, -jnp.inf, with_ties(rng, 3, 640, levels))
    for found, expected in zip(select(x, 10), jax.lax.top_k(x, 10), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_no_stage_sorts_a_whole_vocabulary():
    trace = jax.make_jaxpr(partial(top_k, k=64))(jnp.zeros((2, 248320)))
    sorted_rows = [e.invars[0].aval.shape[1] for e in equations(trace) if e.primitive.name in ("top_k", "sort")]
    assert sorted(sorted_rows) == [64, 3880, 4096]  # the chosen blocks, the blocks, the survivors


@pytest.mark.parametrize(
    "size, k, width", [(248320, 64, 64), (151936, 64, 64), (151936, 1, 128), (248321, 64, 64), (5, 5, 1)]
)
def test_block_width(size, k, width):
    assert block_width(size, k) == width


@pytest.mark.parametrize("k", [-1, 6])
def test_k_outside_the_row(k):
    with pytest.raises(ValueError, match=f"k = {k} is outside 0..5"):
        top_k(jnp.zeros((1, 5)), k)


@each
def test_k_zero_gives_nothing(implementation):
    values, index = top_k(jnp.zeros((2, 5)), 0, implementation=implementation)
    assert values.shape == index.shape == (2, 0)
