"""Ancestors of a small tree, checked by eye."""

import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree import ancestor_ids, ancestor_mask

# 0 -> 1 -> 3 -> 4, 0 -> 2, and node 5 is a pad; the second row is a star with a pad.
PARENT = jnp.array([[-1, 0, 0, 1, 3, -1], [-1, 0, 0, 0, 0, -1]], jnp.int32)


def test_ancestor_ids_follow_the_parents_and_end_in_minus_one():
    ids = ancestor_ids(PARENT, 3)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids[0], [[0, -1, -1], [1, 0, -1], [2, 0, -1], [3, 1, 0], [4, 3, 1], [5, -1, -1]])
    np.testing.assert_array_equal(ids[1], [[0, -1, -1], [1, 0, -1], [2, 0, -1], [3, 0, -1], [4, 0, -1], [5, -1, -1]])


def test_one_level_is_the_node_itself():
    np.testing.assert_array_equal(ancestor_ids(PARENT, 1)[0, :, 0], range(6))


def test_ancestor_mask_has_the_node_and_all_its_ancestors():
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    mask = ancestor_mask(PARENT, 3)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))
    np.testing.assert_array_equal(mask[1, 4], [1, 0, 0, 0, 1, 0])


def test_the_mask_of_a_deep_chain_is_causal():
    chain = jnp.arange(-1, 16, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(ancestor_mask(chain, 16)[0], np.tril(np.ones((17, 17), bool)))
