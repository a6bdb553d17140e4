"""The three forms of the delta rule over a tree against a float64 loop, and the state after a path."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.oracle import Rows, chain, delta_loop, delta_rows, distance, equations, path_to, random_tree, tree_of

from ddtree_jax.ops.chunk_delta import chunk_delta
from ddtree_jax.ops.tree_delta import IMPLEMENTATIONS, commit_path, replay_path, tree_delta

ATOL = 3e-6  # reference_models.md 3.4
each = pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
run = jax.jit(tree_delta, static_argnames=("max_depth", "implementation"))
commit, replay = jax.jit(commit_path), jax.jit(replay_path)


def run_on(rows, tree, implementation, max_depth=None):
    deepest = int(tree.depth.max()) if max_depth is None else max_depth
    return run(*rows, *tree, max_depth=deepest, implementation=implementation)


@each
@pytest.mark.parametrize("nodes, key_heads, repeats, dk, dv", [(1, 2, 2, 4, 6), (2, 5, 1, 7, 3), (13, 5, 2, 3, 7), (29, 2, 3, 17, 5)])
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
    key = jnp.broadcast_to(rows.k[:, :1], rows.k.shape)
    rows = rows._replace(q=key, k=key, g=jnp.zeros_like(rows.g), beta=jnp.ones_like(rows.beta))
    tree = chain(1, nodes) if shape == "chain" else tree_of([[-1] + [0] * (nodes - 1)])
    out, factors = run_on(rows, tree, implementation)
    assert distance(out, delta_loop(rows, tree)[0]) < ATOL
    # Each write replaces the last one, so every node reads its own value.
    np.testing.assert_allclose(out, rows.v, atol=1e-5)
    assert np.max(np.abs(factors.u)) < 20


@each
def test_a_key_head_serves_its_own_value_heads(implementation):
    """Value head h uses key head h // repeats: without key head 0, value heads 0 and 1 change and 2 and 3 do not."""
    rows, tree = delta_rows(np.random.default_rng(3), 1, 5, 2, 2, 3, 7), chain(1, 5)
    zeroed = rows._replace(k=rows.k.at[:, :, 0].set(0.0))
    changed = np.abs(run_on(rows, tree, implementation)[0] - run_on(zeroed, tree, implementation)[0]).max(axis=(0, 1, 3))
    assert np.all(changed[:2] > 1e-3) and np.all(changed[2:] == 0.0)


@each
def test_the_order_of_siblings_does_not_matter(implementation):
    rows = delta_rows(np.random.default_rng(4), 1, 7, 2, 2, 3, 5)
    order = np.array([0, 2, 1, 5, 6, 3, 4])  # new index -> old index: parents still come first
    tree, permuted = tree_of([[-1, 0, 0, 1, 1, 2, 2]]), tree_of([[-1, 0, 0, 1, 1, 2, 2]])
    shuffled = Rows(*(x[:, order] for x in rows[:5]), rows.state)
    out, again = run_on(rows, tree, implementation)[0], run_on(shuffled, permuted, implementation)[0]
    np.testing.assert_allclose(again, out[:, order], atol=1e-6)


@each
def test_a_node_equals_the_end_of_its_path_as_a_sequence(implementation):
    rng = np.random.default_rng(5)
    rows, tree = delta_rows(rng, 1, 13, 3, 2, 5, 7), random_tree(rng, 1, 13)
    out, _ = run_on(rows, tree, implementation)
    for node in range(13):
        path = jnp.array(path_to(tree, 0, node))
        alone, _ = chunk_delta(*(x[:, path] for x in rows[:5]), rows.state, implementation="reference")
        np.testing.assert_allclose(out[:, node], alone[:, -1], atol=ATOL)


@each
def test_pads_disturb_nobody(implementation):
    rng = np.random.default_rng(6)
    rows, tree = delta_rows(rng, 2, 11, 2, 1, 3, 5), random_tree(rng, 2, 11, pads=2)  # 2 pads in row 0, 3 in row 1
    clean = run_on(rows, tree, implementation, max_depth=10)[0]
    dirty = Rows(*(x.at[:, 9:].set(-1e6) for x in rows[:5]), rows.state)
    np.testing.assert_array_equal(run_on(dirty, tree, implementation, max_depth=10)[0][:, :8], clean[:, :8])


@each
def test_rows_of_a_batch_never_see_each_other(implementation):
    rng = np.random.default_rng(7)
    rows, tree = delta_rows(rng, 3, 5, 2, 1, 3, 7), random_tree(rng, 3, 5)
    together = run_on(rows, tree, implementation, max_depth=4)[0]
    for b in range(3):
        row = slice(b, b + 1)
        alone = run(*(x[row] for x in rows), tree.parent[row], tree.depth[row], max_depth=4, implementation=implementation)[0]
        np.testing.assert_allclose(alone, together[row], atol=1e-6)


@settings(max_examples=25)
@given(data=st.data(), decay=st.sampled_from(["mild", "fast", "mixed"]))
def test_all_forms_agree_on_any_tree(data, decay):
    parents = [[-1] + [data.draw(st.integers(-1, i - 1)) for i in range(1, 9)] for _ in range(2)]  # -1: a pad or its subtree
    rows, tree = delta_rows(np.random.default_rng(data.draw(st.integers(0, 99))), 2, 9, 2, 2, 3, 5, decay), tree_of(parents)
    expected = delta_loop(rows, tree)[0]
    for implementation in IMPLEMENTATIONS:
        assert distance(run_on(rows, tree, implementation, max_depth=8)[0], expected) < ATOL


def path_case(decay, nodes=13):
    """A tree, its rows, all states in float64, and for every node the path to it, padded to `nodes` with an index to be ignored."""
    rng = np.random.default_rng(8)
    rows, tree = delta_rows(rng, 2, nodes, 3, 2, 5, 7, decay), random_tree(rng, 2, nodes)
    factors = run_on(rows, tree, "solve")[1]
    _, states = delta_loop(rows, tree)
    for node in range(nodes):
        paths = [path_to(tree, b, node) for b in range(2)]
        padded = jnp.array([path + [nodes - 1] * (nodes - len(path)) for path in paths], jnp.int32)
        yield rows, factors, padded, jnp.array([len(path) for path in paths], jnp.int32), states[:, node]


@pytest.mark.parametrize("decay", ["mild", "fast", "mixed"])
def test_the_state_after_a_path(decay):
    for rows, factors, path, count, expected in path_case(decay):
        assert distance(commit(rows.state, factors, path, count), expected) < ATOL
        assert distance(replay(rows.state, rows.k, rows.v, rows.g, rows.beta, path, count), expected) < ATOL


def test_the_state_after_every_count_of_a_path():
    rows, tree = delta_rows(np.random.default_rng(9), 2, 7, 2, 3, 5, 3, "mixed"), chain(2, 7)
    factors, states = run_on(rows, tree, "solve")[1], delta_loop(rows, tree)[1]
    path = jnp.tile(jnp.arange(7, dtype=jnp.int32), (2, 1))
    for count in range(1, 8):
        counts = jnp.array([count, 8 - count], jnp.int32)
        expected = np.stack([states[0, count - 1], states[1, 7 - count]])
        assert distance(commit(rows.state, factors, path, counts), expected) < ATOL
        assert distance(replay(rows.state, rows.k, rows.v, rows.g, rows.beta, path, counts), expected) < ATOL


def test_count_zero_keeps_the_state_bit_for_bit():
    rows, tree = delta_rows(np.random.default_rng(10), 2, 3, 2, 1, 5, 3), chain(2, 3)
    path, count = jnp.tile(jnp.arange(3, dtype=jnp.int32), (2, 1)), jnp.array([0, 2], jnp.int32)
    committed = commit(rows.state, run_on(rows, tree, "solve")[1], path, count)
    replayed = replay(rows.state, rows.k, rows.v, rows.g, rows.beta, path, count)
    np.testing.assert_array_equal(committed[0], rows.state[0])
    np.testing.assert_array_equal(replayed[0], rows.state[0])
    assert np.any(committed[1] != rows.state[1])


def test_one_node_after_another_is_plain_decoding():
    """Rounds of a one-node tree and its commit: the state stays that of the sequence."""
    rows = delta_rows(np.random.default_rng(11), 2, 11, 2, 2, 3, 5)
    expected, states = delta_loop(rows, chain(2, 11))
    state, root, one = rows.state, chain(2, 1), jnp.ones(2, jnp.int32)
    for t in range(11):
        out, factors = run_on(Rows(*(x[:, t : t + 1] for x in rows[:5]), state), root, "solve")
        state = commit(state, factors, jnp.zeros((2, 1), jnp.int32), one)
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
        tree_delta(*rows, *tree, max_depth=0, implementation="tree")
