"""DDTree itself, as pure functions over arrays: draft scores -> tree -> accepted path."""

from ddtree_jax.tree.draw import draw_tree, host_row
from ddtree_jax.tree.expand import KINDS, Branches, expand, grow, marginal_branches, marginals
from ddtree_jax.tree.topology import DraftTree, ancestor_ids, ancestor_mask
from ddtree_jax.tree.walk import Walk, walk, walk_choices

__all__ = [
    "KINDS",
    "Branches",
    "DraftTree",
    "Walk",
    "ancestor_ids",
    "ancestor_mask",
    "draw_tree",
    "expand",
    "grow",
    "host_row",
    "marginal_branches",
    "marginals",
    "walk",
    "walk_choices",
]
