"""The three forms of the delta rule over a tree against a float64 loop, and the state after a path."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.oracle import Rows, Tree, chain, delta_loop, delta_rows, distance, equations, path_to, random_tree, tree_of

from ddtree_jax.ops.chunk_delta import chunk_delta
from ddtree_jax.ops.delta import solve_by_depth
from ddtree_jax.ops.tree_delta import IMPLEMENTATIONS, commit_path, replay_path, tree_delta

ATOL = 3e-6  # reference_models.md 3.4
each = pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
run = jax.jit(tree_delta, static_argnames=("max_depth", "implementation"))
commit, replay = jax.jit(commit_path), jax.jit(replay_path)
sequence = jax.jit(chunk_delta, static_argnames="implementation")


def run_on(rows, tree, implementation, max_depth=None):
    deepest = int(tree.depth.max()) if max_depth is None else max_depth
    return run(*rows, *tree, max_depth=deepest, implementation=implementation)


@each
@pytest.mark.parametrize(
    "nodes, key_heads, repeats, dk, dv", [(1, 2, 2, 4, 6), (2, 5, 1, 7, 3), (13, 5, 2, 3, 7), (29, 2, 3, 17, 5)]
)
def test_float64_loop(implementation, nodes, key_heads, repeats, dk, dv):
    rng = np.random.default_rng(nodes)
    rows, tree = delta_rows(rng, 3, nodes, key_heads, repeats, dk, dv), random_tree(rng, 3, nodes, pads=nodes // 5)
    out, factors = run_on(rows, tree, implementation)
    expected, states = delta_loop(rows, tree)
    assert distance(out, expected) < ATOL
    assert all(x.dtype == jnp.float32 for x in (out, factors.u, factors.k, factors.g))
    # u is what makes S = exp(g) S_parent + k u^T
    wrote = np.repeat(np.asarray(rows.k), repeats, axis=2)[..., None] * np.asarray(factors.u)[..., None, :]
    root_decay = np.exp(np.asarray(rows.g, np.float64))[:, 0, :, None, None]
    assert distance(root_decay * np.asarray(rows.state) + wrote[:, 0], states[:, 0]) < ATOL


@each
@pytest.mark.parametrize("decay", ["fast", "mixed"])
def test_decays_down_to_minus_1000(implementation, decay):
    rng = np.random.default_rng(1)
    rows, tree = delta_rows(rng, 2, 13, 3, 2, 5, 7, decay), random_tree(rng, 2, 13)
    out, _ = run_on(rows, tree, implementation)
    assert distance(out, delta_loop(rows, tree)[0]) < ATOL


@each
@pytest.mark.parametrize("shape", ["star", "chain"])
def test_identical_keys_written_in_full_without_decay(implementation, shape):
    """(I + M) is then all ones below the diagonal: a product of powers of M would cancel numbers like C(127, 63)."""
    nodes = 128
    rows = delta_rows(np.random.default_rng(2), 1, nodes, 1, 2, 3, 5)
    key = np.tile(rows.k[:, :1], (1, nodes, 1, 1))
    rows = rows._replace(q=key, k=key, g=np.zeros_like(rows.g), beta=np.ones_like(rows.beta))
    tree = chain(1, nodes) if shape == "chain" else tree_of([[-1] + [0] * (nodes - 1)])
    out, factors = run_on(rows, tree, implementation)
    assert distance(out, delta_loop(rows, tree)[0]) < ATOL
    # Each write replaces the last one, so every node reads its own value.
    np.testing.assert_allclose(out, rows.v, atol=1e-5)
    assert np.max(np.abs(factors.u)) < 20


def test_substitution_by_depth_never_holds_large_numbers():
    """On a chain of ones the solution is the difference of neighbours; half-done sums would reach 1e46."""
    right = np.random.default_rng(14).integers(-9, 9, (1, 2, 160, 3)).astype(np.float32)
    ones = np.tile(np.tril(np.ones((160, 160), np.float32), -1), (1, 2, 1, 1))
    x = jax.jit(solve_by_depth, static_argnums=3)(ones, right, chain(1, 160).depth, 159)
    np.testing.assert_array_equal(x[:, :, 1:], np.diff(right, axis=2))


@each
def test_a_key_head_serves_its_own_value_heads(implementation):
    """cases.md A19: value head h uses key head h // repeats. Without key head 0, value heads 0 and 1 change and 2 and
    3 do not.
    """
    rows, tree = delta_rows(np.random.default_rng(3), 1, 5, 2, 2, 3, 7), chain(1, 5)
    zeroed = rows._replace(k=rows.k * np.array([0, 1], np.float32)[:, None])
    changed = np.abs(run_on(rows, tree, implementation)[0] - run_on(zeroed, tree, implementation)[0]).max(
        axis=(0, 1, 3)
    )
    assert np.all(changed[:2] > 1e-3) and np.all(changed[2:] == 0.0)


@each
def test_the_order_of_siblings_does_not_matter(implementation):
    rows, tree = delta_rows(np.random.default_rng(4), 1, 7, 2, 2, 3, 5), tree_of([[-1, 0, 0, 1, 1, 2, 0]])
    order = [0, 6, 2, 1, 5, 4, 3]  # node order[i] comes i-th: still parents first
    reordered = tree_of([[-1, 0, 0, 0, 2, 3, 3]])
    shuffled = Rows(*(x[:, order] for x in rows[:5]), rows.state)
    out, again = run_on(rows, tree, implementation)[0], run_on(shuffled, reordered, implementation)[0]
    np.testing.assert_allclose(again, out[:, order], atol=1e-6)


@each
def test_a_node_equals_the_end_of_its_path_as_a_sequence(implementation):
    rng = np.random.default_rng(5)
    rows, tree = delta_rows(rng, 1, 13, 3, 2, 5, 7), random_tree(rng, 1, 13)
    out, _ = run_on(rows, tree, implementation)
    for node in range(13):
        path = path_to(tree, 0, node)
        padded = path + [0] * (13 - len(path))
        alone, _ = sequence(*(x[:, padded] for x in rows[:5]), rows.state, implementation="reference")
        np.testing.assert_allclose(out[:, node], alone[:, len(path) - 1], atol=ATOL)


@each
def test_pads_disturb_nobody(implementation):
    rng = np.random.default_rng(6)
    rows, tree = delta_rows(rng, 2, 11, 2, 1, 3, 5), random_tree(rng, 2, 11, pads=2)  # 2 pads in row 0, 3 in row 1
    clean = run_on(rows, tree, implementation, max_depth=10)[0]
    dirty = Rows(*(np.concatenate([x[:, :9], np.full_like(x[:, 9:], -1e6)], axis=1) for x in rows[:5]), rows.state)
    np.testing.assert_array_equal(run_on(dirty, tree, implementation, max_depth=10)[0][:, :8], clean[:, :8])


@each
def test_rows_of_a_batch_never_see_each_other(implementation):
    rng = np.random.default_rng(7)
    rows, tree = delta_rows(rng, 3, 5, 2, 1, 3, 7), random_tree(rng, 3, 5)
    together = run_on(rows, tree, implementation, max_depth=4)[0]
    for b in range(3):
        alone = Rows(*(x[b : b + 1] for x in rows)), Tree(*(x[b : b + 1] for x in tree))
        np.testing.assert_allclose(run_on(*alone, implementation, max_depth=4)[0][0], together[b], atol=1e-6)


@settings(max_examples=25)
@given(data=st.data(), decay=st.sampled_from(["mild", "fast", "mixed"]))
def test_all_forms_agree_on_any_tree(data, decay):
    parents = [[-1] + [data.draw(st.integers(-1, i - 1)) for i in range(1, 9)] for _ in range(2)]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, tree = delta_rows(rng, 2, 9, 2, 2, 3, 5, decay), tree_of(parents)
    expected = delta_loop(rows, tree)[0]
    for implementation in IMPLEMENTATIONS:
        assert distance(run_on(rows, tree, implementation, max_depth=8)[0], expected) < ATOL


def every_path(decay, nodes=13):
    """For every node of two trees: rows, factors, path (filled up with a node to be ignored), count, float64 state."""
    rng = np.random.default_rng(8)
    rows, tree = delta_rows(rng, 2, nodes, 3, 2, 5, 7, decay), random_tree(rng, 2, nodes)
    factors = run_on(rows, tree, "solve")[1]
    _, states = delta_loop(rows, tree)
    for node in range(nodes):
        paths = [path_to(tree, b, node) for b in range(2)]
        padded = np.array([path + [nodes - 1] * (nodes - len(path)) for path in paths])
        yield rows, factors, padded, np.array([len(path) for path in paths]), states[:, node]


@pytest.mark.parametrize("decay", ["mild", "fast", "mixed"])
def test_the_state_after_a_path(decay):
    for rows, factors, path, count, expected in every_path(decay):
        assert distance(commit(rows.state, factors, path, count), expected) < ATOL
        assert distance(replay(rows.state, rows.k, rows.v, rows.g, rows.beta, path, count), expected) < ATOL


def test_the_state_after_every_count_of_a_path():
    rows, tree = delta_rows(np.random.default_rng(9), 2, 7, 2, 3, 5, 3, "mixed"), chain(2, 7)
    factors, states = run_on(rows, tree, "solve")[1], delta_loop(rows, tree)[1]
    path = np.tile(np.arange(7), (2, 1))
    for count in range(1, 8):
        counts = np.array([count, 8 - count])
        expected = np.stack([states[0, count - 1], states[1, 7 - count]])
        assert distance(commit(rows.state, factors, path, counts), expected) < ATOL
        assert distance(replay(rows.state, rows.k, rows.v, rows.g, rows.beta, path, counts), expected) < ATOL


def test_count_zero_keeps_the_state_bit_for_bit():
    rows, tree = delta_rows(np.random.default_rng(10), 2, 3, 2, 1, 5, 3), chain(2, 3)
    path, count = np.tile(np.arange(3), (2, 1)), np.array([0, 2])
    committed = commit(rows.state, run_on(rows, tree, "solve")[1], path, count)
    replayed = replay(rows.state, rows.k, rows.v, rows.g, rows.beta, path, count)
    np.testing.assert_array_equal(committed[0], rows.state[0])
    np.testing.assert_array_equal(replayed[0], rows.state[0])
    assert np.any(committed[1] != rows.state[1])


def test_one_node_after_another_is_plain_decoding():
    """Rounds of a one-node tree and its commit: the state stays that of the sequence."""
    rows = delta_rows(np.random.default_rng(11), 2, 11, 2, 2, 3, 5)
    expected, states = delta_loop(rows, chain(2, 11))
    state, root, one = rows.state, chain(2, 1), np.ones(2, int)
    for t in range(11):
        out, factors = run_on(Rows(*(x[:, t : t + 1] for x in rows[:5]), state), root, "solve")
        state = commit(state, factors, np.zeros((2, 1), int), one)
        assert distance(out[:, 0], expected[:, t]) < ATOL
    assert distance(state, states[:, -1]) < ATOL


def trace(implementation, nodes=5, max_depth=4):
    rows, tree = delta_rows(np.random.default_rng(12), 1, nodes, 2, 2, 16, 8), chain(1, nodes)
    return jax.make_jaxpr(partial(tree_delta, max_depth=max_depth, implementation=implementation))(*rows, *tree)


@each
def test_products_ask_for_float32_themselves(implementation):
    highest = jax.lax.Precision.HIGHEST
    with jax.default_matmul_precision("default"):
        products = [e for e in equations(trace(implementation)) if e.primitive.name == "dot_general"]
    assert products and all(set(e.params["precision"]) == {highest} for e in products)


def test_the_solve_keeps_no_state_per_node():
    states = 5 * 4 * 16 * 8
    assert max(v.aval.size for e in equations(trace("scan")) for v in e.outvars) >= states
    assert max(v.aval.size for e in equations(trace("solve")) for v in e.outvars) < states


def test_a_single_node_is_not_solved():
    names = {e.primitive.name for e in equations(trace("solve", nodes=1, max_depth=0))}
    assert not names & {"scan", "while", "triangular_solve"}


def test_unknown_implementation():
    rows, tree = delta_rows(np.random.default_rng(13), 1, 1, 1, 1, 1, 1), chain(1, 1)
    with pytest.raises(ValueError, match="unknown implementation 'tree': choose one of solve, levels, scan"):
        run_on(rows, tree, "tree")
