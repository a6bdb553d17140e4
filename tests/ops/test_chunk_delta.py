"""The delta rule over a sequence against a float64 loop, around the borders of the chunks of 64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.oracle import Rows, chain, delta_loop, delta_rows, distance, equations

from ddtree_jax.ops.chunk_delta import IMPLEMENTATIONS, chunk_delta
from ddtree_jax.ops.delta import invert_unit_lower

ATOL = 3e-6  # reference_models.md 3.4
each = pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
run = jax.jit(chunk_delta, static_argnames="implementation")


def check(rows, implementation, atol=ATOL):
    tokens = rows.v.shape[1]
    out, state = run(*rows, implementation=implementation)
    expected, states = delta_loop(rows, chain(rows.v.shape[0], tokens))
    assert out.dtype == state.dtype == jnp.float32
    assert distance(out, expected) < atol
    assert distance(state, states[:, -1]) < atol


# Every length once in the chunked form; the token-by-token form has no borders.
@pytest.mark.parametrize("tokens", [1, 2, 5, 63, 64, 65, 67, 127, 128, 129, 130])
def test_every_length_in_chunks(tokens):  # cases.md B1
    check(delta_rows(np.random.default_rng(tokens), 2, tokens, 1, 3, 7, 5), "xla")


@each
@pytest.mark.parametrize("key_heads, repeats, dk, dv", [(5, 1, 7, 11), (3, 2, 11, 7), (1, 3, 5, 13)])
def test_heads_and_widths(implementation, key_heads, repeats, dk, dv):
    check(delta_rows(np.random.default_rng(dk), 2, 71, key_heads, repeats, dk, dv), implementation)


@each
@pytest.mark.parametrize("decay", ["fast", "mixed"])
def test_decays_down_to_minus_1000(implementation, decay):
    check(delta_rows(np.random.default_rng(1), 2, 130, 1, 2, 5, 7, decay), implementation)


@each
def test_identical_keys_written_in_full_without_decay(implementation):
    rows = delta_rows(np.random.default_rng(2), 1, 128, 1, 2, 3, 5)
    key = np.tile(rows.k[:, :1], (1, 128, 1, 1))
    rows = rows._replace(q=key, k=key, g=np.zeros_like(rows.g), beta=np.ones_like(rows.beta))
    check(rows, implementation, atol=1e-5)  # 128 full-strength writes with nothing forgotten
    np.testing.assert_allclose(run(*rows, implementation=implementation)[0], rows.v, atol=1e-5)


@each
def test_padding_leaves_the_state_untouched(implementation):
    rows = delta_rows(np.random.default_rng(3), 2, 130, 2, 2, 5, 3)
    real = (np.arange(130) < np.array([[70], [0]]))[..., None]  # row 1 is padding only
    padded = rows._replace(g=rows.g * real, beta=rows.beta * real)
    out, state = run(*padded, implementation=implementation)
    expected, states = delta_loop(rows, chain(2, 130))
    assert distance(out[0, :70], expected[0, :70]) < ATOL
    assert distance(state[0], states[0, 69]) < ATOL
    np.testing.assert_array_equal(state[1], rows.state[1])


@each
def test_two_calls_equal_one(implementation):
    rows = delta_rows(np.random.default_rng(4), 2, 99, 2, 1, 5, 3)
    out, state = run(*rows, implementation=implementation)
    first, between = run(*(x[:, :31] for x in rows[:5]), rows.state, implementation=implementation)
    second, after = run(*(x[:, 31:] for x in rows[:5]), between, implementation=implementation)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), out, atol=ATOL)
    np.testing.assert_allclose(after, state, atol=ATOL)


@each
def test_a_key_head_serves_its_own_value_heads(implementation):
    rows = delta_rows(np.random.default_rng(5), 1, 3, 2, 2, 3, 7)
    zeroed = rows._replace(k=rows.k * np.array([0, 1], np.float32)[:, None])
    changed = np.abs(run(*rows, implementation=implementation)[1] - run(*zeroed, implementation=implementation)[1])
    assert np.all(changed.max(axis=(0, 2, 3))[:2] > 1e-3) and not np.any(changed[:, 2:])


@each
def test_gradients_equal_finite_differences_of_the_float64_loop(implementation):
    rows = delta_rows(np.random.default_rng(6), 1, 5, 1, 2, 3, 2)
    towards = delta_rows(np.random.default_rng(7), 1, 5, 1, 2, 3, 2)

    def total(rows):
        out, state = chunk_delta(*rows, implementation=implementation)
        return jnp.sum(out**2) + jnp.sum(state**2)

    def total64(step):
        moved = (x.astype(np.float64) + step * d for x, d in zip(rows, towards, strict=True))
        out, states = delta_loop(Rows(*moved), chain(1, 5))
        return np.sum(out**2) + np.sum(states[:, -1] ** 2)

    gradient = jax.jit(jax.grad(total))(rows)
    along = sum(np.vdot(x, d) for x, d in zip(gradient, towards, strict=True))
    np.testing.assert_allclose(along, (total64(1e-5) - total64(-1e-5)) / 2e-5, rtol=1e-4)


@each
def test_gradients_are_finite_with_rows_of_zeros_and_extreme_decays(implementation):
    rows = delta_rows(np.random.default_rng(8), 1, 67, 1, 2, 3, 5, "mixed")
    for x in rows[:5]:
        x[:, 40:50] = 0.0

    def total(rows):
        out, state = chunk_delta(*rows, implementation=implementation)
        return jnp.sum(out**2) + jnp.sum(state**2)

    assert all(np.all(np.isfinite(x)) for x in jax.jit(jax.grad(total))(rows))


@each
def test_products_ask_for_float32_themselves(implementation):
    rows = delta_rows(np.random.default_rng(9), 1, 67, 1, 2, 3, 5)
    with jax.default_matmul_precision("default"):
        trace = jax.make_jaxpr(partial(chunk_delta, implementation=implementation))(*rows)
    products = [e for e in equations(trace) if e.primitive.name == "dot_general"]
    assert products and all(set(e.params["precision"]) == {jax.lax.Precision.HIGHEST} for e in products)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_inverse_of_a_unit_lower_triangle(size):
    strict = np.tril(np.random.default_rng(size).uniform(-1, 1, (3, size, size)), -1) / np.sqrt(size)
    found = invert_unit_lower(jnp.asarray(strict, jnp.float32))
    assert distance(found, np.linalg.inv(np.eye(size) + strict)) < 1e-5


def test_the_inverse_of_all_ones_is_exact():
    ones = jnp.tril(jnp.ones((1, 128, 128)), -1)
    np.testing.assert_array_equal(invert_unit_lower(ones)[0], np.eye(128) - np.eye(128, k=-1))


def test_unknown_implementation():
    rows = delta_rows(np.random.default_rng(10), 1, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="unknown implementation 'chunks': choose one of xla, reference"):
        run(*rows, implementation="chunks")
