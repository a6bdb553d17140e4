"""The draft tree as arrays, and what verification asks of its shape: ancestors of every node.

A tree is batch first and has a fixed number of nodes. Node 0 is the root (the bonus token of the last round), a parent
has a lower index than its children, and siblings stand in the order of their rank. Pad nodes fill the rest: they belong
to nobody, and the walk never enters them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftTree:
    """B draft trees of N nodes each.

    A pad node has token 0, parent -1, depth 0, score -inf and valid False. Token 0 is also a real token: `valid` tells
    the two apart.

    Attributes:
        token: int32; the root's is the bonus token.
        parent: int32, index of the parent; -1 for the root and for pads.
        depth: int32, 0 for the root; a node stands at absolute position start + depth.
        score: fp32 log-probability of the path from the root under the drafter's marginals; 0 for the root.
        valid: bool, False for pads.
    """

    token: Int[Array, "B N"]
    parent: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    score: Float[Array, "B N"]
    valid: Bool[Array, "B N"]


def ancestor_ids(parent: Int[Array, "B N"], levels: int) -> Int[Array, "B N levels"]:
    """Chains of ancestors: `[b, i, t]` is the t-th ancestor of node i (t = 0: i itself), -1 beyond the root.

    Args:
        parent: int32, -1 where a node has none.
        levels: static, at least 1; `levels - 1` parents are followed.
    """
    chain = jnp.broadcast_to(jnp.arange(parent.shape[1], dtype=parent.dtype), parent.shape)[..., None]
    while (known := chain.shape[2]) < levels:  # a node's next ancestors are the known ones of the last one's parent
        last = _at(parent, chain[..., -1])
        chain = jnp.concatenate([chain, _at(chain, last)[..., : levels - known]], axis=2)
    return chain


def _at(rows: Int[Array, "B N *rest"], node: Int[Array, "B N"]) -> Int[Array, "B N *rest"]:
    """The rows of other nodes; -1 for node -1."""
    found = jax.vmap(lambda row, index: row[index])(rows, node)
    return jnp.where((node < 0).reshape(*node.shape, *[1] * (rows.ndim - 2)), -1, found)


def ancestor_mask(parent: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """Who sees whom in the tree: `[b, i, j]` is True where j is i or an ancestor of i (algorithm.md section 6).

    Args:
        parent: int32, -1 where a node has none; a pad node sees only itself.
        max_depth: static, at least the depth of the deepest node.
    """
    chain = ancestor_ids(parent, max_depth + 1)
    return (chain[..., None] == jnp.arange(parent.shape[1])).any(axis=2)
