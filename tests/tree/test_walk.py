"""Walks over trees small enough to follow by eye."""

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree import DraftTree, walk

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
