"""DDTree itself, as pure functions over arrays: marginals -> tree -> accepted path."""

from ddtree_jax.tree.draw import draw_tree, host_row
from ddtree_jax.tree.expand import KINDS, expand, marginals
from ddtree_jax.tree.topology import DraftTree, ancestor_ids, ancestor_mask
from ddtree_jax.tree.walk import Walk, walk, walk_choices

__all__ = [
    "KINDS",
    "DraftTree",
    "Walk",
    "ancestor_ids",
    "ancestor_mask",
    "draw_tree",
    "expand",
    "host_row",
    "marginals",
    "walk",
    "walk_choices",
]
