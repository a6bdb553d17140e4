"""The walk: from the target's choices to the accepted path."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ddtree_jax.tree.topology import DraftTree


class Walk(NamedTuple):
    """The accepted path of every row; P = max_depth + 1.

    Attributes:
        path: int32, accepted nodes from the root down, 0 at and beyond count.
        count: int32, at least 1: accepted nodes with the root, which is also the number of tokens emitted this round.
        tokens: int32, the target's token after each accepted node, 0 at and beyond count; the last is the next root.
    """

    path: Int[Array, "B P"]
    count: Int[Array, " B"]
    tokens: Int[Array, "B P"]


def walk(tree: DraftTree, choose: Callable[[Array, Array], Array], max_depth: int) -> Walk:
    """Goes down from the root while the token the target chooses is that of a valid child (algorithm.md section 1).

    Args:
        tree: B trees of N nodes.
        choose: (node int32 [B], depth int32 scalar) -> int32 [B], the target's token after each row's node. Rows that
            have stopped are still asked, about the node where they stopped; their answer is not used.
        max_depth: static, at least the depth of the deepest node.
    """

    def step(at, depth):
        node, walking = at
        token = choose(node, depth)
        child = tree.valid & (tree.parent == node[:, None]) & (tree.token == token[:, None])
        entry = jnp.where(walking, node, 0), jnp.where(walking, token, 0), walking
        further = walking & child.any(axis=1)
        return (jnp.where(further, jnp.argmax(child, axis=1), node).astype(jnp.int32), further), entry

    rows = tree.token.shape[0]
    start = jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    _, (path, tokens, accepted) = jax.lax.scan(step, start, jnp.arange(max_depth + 1, dtype=jnp.int32))
    return Walk(path.T, accepted.sum(axis=0, dtype=jnp.int32), tokens.T)


def walk_choices(tree: DraftTree, choice: Int[Array, "B N"], ancestors: Int[Array, "B N P"]) -> Walk:
    """The walk where the target's token after every node is known: the same result without a loop.

    A node is accepted when it and all its ancestors below the root are what the target chose after their parents.
    Siblings have different tokens, so there is one such node a depth, and they are a path.

    Args:
        choice: int32, the target's token after each node.
        ancestors: `ancestor_ids(tree.parent, max_depth + 1)`.
    """
    wanted = jnp.take_along_axis(choice, jnp.maximum(tree.parent, 0), axis=1)
    chosen = (tree.valid & (tree.token == wanted)).at[:, 0].set(True)
    above = jax.vmap(lambda row, index: row[index])(chosen, jnp.maximum(ancestors, 0))
    accepted = jnp.all(above | (ancestors < 0), axis=2)
    here = accepted[:, None, :] & (tree.depth[:, None, :] == jnp.arange(ancestors.shape[2])[:, None])
    there = here.any(axis=2)
    path = jnp.argmax(here, axis=2).astype(jnp.int32)
    tokens = jnp.where(there, jnp.take_along_axis(choice, path, axis=1), 0)
    return Walk(path, there.sum(axis=1, dtype=jnp.int32), tokens)
