"""Walks over trees small enough to follow by eye."""

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree import DraftTree, ancestor_ids, walk, walk_choices

# Tokens of the nodes; parents:      root -> 1(5) -> 3(6) -> 4(0);  root -> 2(9);  nodes 5 and 6 are pads.
TOKEN = [7, 5, 9, 6, 0, 0, 0]
PARENT = [-1, 0, 0, 1, 3, -1, -1]
DEPTH = [0, 1, 1, 2, 3, 0, 0]
VALID = [True] * 5 + [False] * 2


def small_tree(rows: int, *, parent=PARENT, token=TOKEN, valid=VALID) -> DraftTree:
    def batch(values, dtype):
        return jnp.broadcast_to(jnp.array(values, dtype), (rows, len(values)))

    score = jnp.where(jnp.array(valid), -1.0 * jnp.array(DEPTH), -jnp.inf)
    return DraftTree(
        batch(token, jnp.int32),
        batch(parent, jnp.int32),
        batch(DEPTH, jnp.int32),
        batch(score, jnp.float32),
        batch(valid, bool),
    )


def by_node(*rows):
    """A chooser that looks the token up by node, a list of choices for each row."""
    table = jnp.array(rows, jnp.int32)
    return lambda node, depth: jnp.take_along_axis(table, node[:, None], axis=1)[:, 0]


def test_rows_walk_each_on_their_own():
    choices = by_node(
        [8, 1, 1, 1, 1, 1, 1],  # accepts nothing
        [5, 6, 1, 0, 4, 1, 1],  # accepts the whole path 1, 3, 4, the last by the real token 0
        [9, 1, 3, 1, 1, 1, 1],  # the other child, which has no children
        [5, 9, 1, 1, 1, 1, 1],  # 9 is a token of the tree, but no child of node 1
    )
    result = jax.jit(lambda tree: walk(tree, choices, 3))(small_tree(4))
    np.testing.assert_array_equal(result.count, [1, 4, 2, 2])
    np.testing.assert_array_equal(result.path, [[0, 0, 0, 0], [0, 1, 3, 4], [0, 2, 0, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(result.tokens, [[8, 0, 0, 0], [5, 6, 0, 4], [9, 3, 0, 0], [5, 9, 0, 0]])
    assert {leaf.dtype for leaf in result} == {jnp.dtype(jnp.int32)}


def test_pads_are_never_entered():
    """Choosing token 0 matches the pads' token; node 4, whose token really is 0, hangs elsewhere."""
    result = walk(small_tree(1), by_node([0] * 7), 3)
    np.testing.assert_array_equal(result.count, [1])
    np.testing.assert_array_equal(result.tokens, [[0, 0, 0, 0]])


def test_an_invalid_node_is_not_entered_even_with_a_parent():
    parent, valid = [-1, 0, 0, 1, 3, 0, 0], [True] * 4 + [False] * 3
    result = walk(small_tree(2, parent=parent, valid=valid), by_node([0] * 7, [5, 6, 1, 0, 1, 1, 1]), 3)
    np.testing.assert_array_equal(result.count, [1, 3])
    np.testing.assert_array_equal(result.tokens, [[0, 0, 0, 0], [5, 6, 0, 0]])


def test_the_chooser_sees_node_and_depth():
    def choose(node, depth):
        return jnp.where((depth == 0) & (node == 0), 5, jnp.where((depth == 1) & (node == 1), 6, 70 + depth))

    result = walk(small_tree(1), choose, 3)
    np.testing.assert_array_equal(result.tokens, [[5, 6, 72, 0]])
    np.testing.assert_array_equal(result.path, [[0, 1, 3, 0]])


def test_a_tree_of_the_root_alone_emits_one_token():
    root = DraftTree(*(jnp.array([[value]]) for value in (7, -1, 0, 0.0, True)))
    result = walk(root, by_node([7]), 0)
    np.testing.assert_array_equal(result.path, [[0]])
    np.testing.assert_array_equal(result.count, [1])
    np.testing.assert_array_equal(result.tokens, [[7]])


def test_known_choices_give_the_same_walk():
    """Random trees of 12 nodes and 3 pads over 4 tokens, siblings with different ones; most choices lead somewhere."""
    rng = np.random.default_rng(0)
    parent, token = np.full((60, 15), -1), np.zeros((60, 15), int)
    depth = np.zeros((60, 15), int)
    for row in range(60):
        for node in range(1, 12):
            free = [
                (p, t) for p in range(node) for t in range(4) if (p, t) not in zip(parent[row], token[row], strict=True)
            ]
            parent[row, node], token[row, node] = free[rng.integers(len(free))]
            depth[row, node] = depth[row, parent[row, node]] + 1
    deepest = int(depth.max())
    tree = DraftTree(*map(jnp.asarray, (token, parent, depth, np.zeros((60, 15), np.float32), np.arange(15) < 12)))
    tree = jax.tree.map(lambda x: jnp.broadcast_to(x, (60, 15)), tree)
    choice = jnp.asarray(rng.integers(0, 4, (60, 15)), jnp.int32)
    expected = walk(tree, lambda node, depth: jnp.take_along_axis(choice, node[:, None], axis=1)[:, 0], deepest)
    result = walk_choices(tree, choice, ancestor_ids(tree.parent, deepest + 1))
    for name in ("count", "path", "tokens"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), err_msg=name)
    assert 1 in result.count and max(result.count) > 3
