"""From the drafter's marginals to the draft tree: the best prefixes of their product, on the device, static shapes.

The reference pops nodes from a heap. Here the same tree is built depth by depth (algorithm.md section 12): the best
nodes of a depth come from a staircase of (parent's place, token's rank) pairs, and one merge over all depths keeps the
best of them.

The order is by score, ties by rank path, a prefix before its extension. Nothing is sorted by several keys for it:
candidates are scattered to the place that their rank path has in lexicographic order, so a stable top-k settles ties by
itself, and the lexicographic places come from cumulative sums. On the CPU, from budget 64 on, merging by lax.sort with
several keys took 2 to 16 times as long.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ddtree_jax.ops.top_k import top_k as top_tokens
from ddtree_jax.tree.topology import DraftTree

KINDS = ("best-first", "spine", "chain", "star")


class Level(NamedTuple):
    """The W best nodes of one depth, best first. "Place" is the index in this order.

    Place 0 is the node of the top-1 chain: nothing of its depth has a better score, and its rank path comes first.

    Attributes:
        score: fp32 log-probability of the path; -inf for places that hold no node.
        lex: int32 permutation, each node's number in the lexicographic order of the rank paths of this depth.
        offset: int32, the node's preorder number (from 0, depth 0 left out) less the sizes of the subtrees that begin
            before it at this depth.
        parent: int32 place in the level above.
        rank: int32 rank of the token at this depth.
    """

    score: Float[Array, " W"]
    lex: Int[Array, " W"]
    offset: Int[Array, " W"]
    parent: Int[Array, " W"]
    rank: Int[Array, " W"]


class Nodes(NamedTuple):
    """Nodes below the root in the tree's order; those that do not exist have score -inf."""

    token: Int[Array, "*B W"]
    parent: Int[Array, "*B W"]
    depth: Int[Array, "*B W"]
    score: Float[Array, "*B W"]


def expand(
    logits: Float[Array, "B L V"],
    root: Int[Array, " B"],
    *,
    budget: int,
    kind: str = "best-first",
    top_k: int | None = None,
    row_budget: Int[Array, " B"] | None = None,
    row_horizon: Int[Array, " B"] | None = None,
) -> DraftTree:
    """Draft trees of at most `budget` nodes below the root (algorithm.md sections 5, 12 and 15).

    Nodes come in the order in which the reference heap pops them: descending log-probability of the path, ties by rank
    path, a prefix before its extension. So the first b nodes are the tree of budget b, parents come before children,
    and siblings stand by rank. Scores accumulate in fp32 along the path. Where nodes tie for the last places only
    because fp32 rounded their different scores to one, any of them may be taken.

    Args:
        logits: the drafter's logits for L positions, any real dtype; a position whose logits hold NaN or +inf gets no
            nodes, and a token of logit -inf is never drafted.
        root: int32, the bonus tokens.
        budget: static; the tree has N = 1 + budget nodes, the last ones pads where fewer exist.
        kind: "best-first"; "spine": the top-1 chain's min(budget, L) nodes first, then the best others; "chain": only
            the top-1 chain; "star": only depth 1.
        top_k: static, tokens considered at each position (None or 0: `budget` of them, which loses nothing).
        row_budget: int32, nodes allowed in each row (default: budget).
        row_horizon: int32, depth allowed in each row (default: L).

    Raises:
        ValueError: unknown kind, negative budget or top_k.
    """
    _check(kind, budget, top_k)
    if kind == "star":
        logits = logits[:, :1]
    ranks = 1 if kind == "chain" else min(top_k or budget, logits.shape[2])
    size = min(budget, _possible_nodes(logits.shape[1], ranks))
    if size == 0:
        return _assemble(root, _no_nodes(root.shape[0], budget), row_budget)
    logp, token = marginals(logits, ranks)
    if row_horizon is not None:
        logp = jnp.where(jnp.arange(logp.shape[1])[:, None] < row_horizon[:, None, None], logp, -jnp.inf)
    nodes = jax.vmap(partial(_best_nodes, size, kind == "spine"))(logp, token)
    pads = _no_nodes(root.shape[0], budget - size)
    return _assemble(root, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), nodes, pads), row_budget)


def marginals(logits: Float[Array, "B L V"], ranks: int) -> tuple[Float[Array, "B L K"], Int[Array, "B L K"]]:
    """The `ranks` best tokens of every position: (fp32 log-probabilities over the full vocabulary, int32 token ids).

    Descending, of equal logits the lower token id first. Nothing exceeds 0, and what is not a number becomes -inf.
    """
    rows = logits.reshape(-1, logits.shape[2])
    value, token = top_tokens(rows, ranks)
    total = jax.nn.logsumexp(rows.astype(jnp.float32), axis=1, keepdims=True)
    logp = jnp.minimum(value.astype(jnp.float32) - total, 0.0)
    shape = (*logits.shape[:2], ranks)
    return jnp.where(jnp.isnan(logp), -jnp.inf, logp).reshape(shape), token.reshape(shape)


def _check(kind: str, budget: int, top_k: int | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown tree kind {kind!r}: choose one of {', '.join(KINDS)}")
    if budget < 0 or (top_k or 0) < 0:
        raise ValueError(f"budget and top_k must not be negative, got budget {budget} and top_k {top_k}")


def _possible_nodes(depths: int, ranks: int) -> int:
    """Nodes of the complete tree: for a chain its length, for a star its width."""
    return sum(ranks**depth for depth in range(1, depths + 1))


def _staircase(size: int, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs (parent's place i, rank r) with (i+1)(r+1) <= size and r < ranks, by i then r; and the pairs of every i.

    Every other pair is beaten by `size` pairs (i' <= i, r' <= r). About size * ln(size) pairs remain.
    """
    counts = np.minimum(ranks, size // np.arange(1, size + 1))
    place = np.repeat(np.arange(size), counts)
    rank = np.arange(place.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return place.astype(np.int32), rank.astype(np.int32), counts.astype(np.int32)


def _best_nodes(size: int, spine: bool, logp: Float[Array, "L K"], token: Int[Array, "L K"]) -> Nodes:
    """The `size` nodes of one row's tree."""
    stairs = _staircase(size, logp.shape[1])

    def deeper(level: Level, logp: Float[Array, " K"]) -> tuple[Level, Level]:
        below = _next_level(stairs, level, logp)
        return below, below

    _, levels = jax.lax.scan(deeper, _root_level(size), logp)
    return _merge(levels, token, spine)


def _root_level(size: int) -> Level:
    """Depth 0: the root at place 0, nothing at the others. Preorder numbers leave this depth out, hence the offset."""
    place = jnp.arange(size, dtype=jnp.int32)
    none = jnp.zeros(size, jnp.int32)
    score = jnp.where(place == 0, 0.0, -jnp.inf).astype(jnp.float32)
    return Level(score, place, -1 - place, none, none)


def _next_level(stairs: tuple[np.ndarray, np.ndarray, np.ndarray], above: Level, logp: Float[Array, " K"]) -> Level:
    """The best nodes of the next depth. A slot is a candidate's number in lexicographic order."""
    place, rank, counts = stairs
    first_slot = _sums_before(jnp.asarray(counts), above.lex)
    slot = first_slot[place] + rank
    score = _moved(above.score[place] + logp[rank], slot)
    score, kept = jax.lax.top_k(score, counts.size)
    lex = jnp.cumsum(jnp.zeros_like(slot).at[kept].set(1, unique_indices=True))[kept] - 1
    candidate = _moved(jnp.arange(slot.size, dtype=jnp.int32), slot)[kept]
    parent = jnp.asarray(place)[candidate]
    return Level(score, lex, above.offset[parent] + above.lex[parent] + 1, parent, jnp.asarray(rank)[candidate])


def _moved(values: Shaped[Array, " n"], slot: Int[Array, " n"]) -> Shaped[Array, " n"]:
    """Element i at index slot[i]; `slot` is a permutation."""
    return jnp.zeros_like(values).at[slot].set(values, unique_indices=True)


def _sums_before(amount: Int[Array, " W"], order: Int[Array, " W"]) -> Int[Array, " W"]:
    """For every element the sum of the amounts that stand before it in `order` (a permutation)."""
    in_order = _moved(amount, order)
    return (jnp.cumsum(in_order) - in_order)[order]


def _preorder(levels: Level) -> Int[Array, "L W"]:
    """Every node's number when all levels are walked depth first, siblings by rank: the order that settles ties."""

    def up(below: Int[Array, " W"], level: Level) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
        subtree = below + 1
        number = level.offset + _sums_before(subtree, level.lex)
        return jnp.zeros_like(below).at[level.parent].add(subtree), number

    _, number = jax.lax.scan(up, jnp.zeros_like(levels.lex[0]), levels, reverse=True)
    return number


def _merge(levels: Level, token: Int[Array, "L K"], spine: bool) -> Nodes:
    """The W best of the nodes of all levels, with the parents as indices into the tree."""
    width = levels.score.shape[1]
    key = levels.score
    if spine:  # the chain before everything else; its nodes tie, so they come in order of depth
        key = key.at[:, 0].set(jnp.where(key[:, 0] > -jnp.inf, jnp.inf, -jnp.inf))
    number = _preorder(levels).ravel()
    node_at = _moved(jnp.arange(number.size, dtype=jnp.int32), number)
    node = node_at[jax.lax.top_k(_moved(key.ravel(), number), width)[1]]
    # Index of every node in the tree; the first `width` entries stand for depth 0, where only the root is: 0.
    index = jnp.zeros(width + number.size, jnp.int32)
    index = index.at[width + node].set(jnp.arange(1, width + 1, dtype=jnp.int32), unique_indices=True)
    depth = node // width
    parent = index[depth * width + levels.parent.ravel()[node]]
    return Nodes(token[depth, levels.rank.ravel()[node]], parent, depth + 1, levels.score.ravel()[node])


def _no_nodes(rows: int, count: int) -> Nodes:
    none = jnp.zeros((rows, count), jnp.int32)
    return Nodes(none, none, none, jnp.full((rows, count), -jnp.inf, jnp.float32))


def _assemble(root: Int[Array, " B"], nodes: Nodes, row_budget: Int[Array, " B"] | None) -> DraftTree:
    """Puts the root in front and turns nodes that do not exist, or lie beyond the row's budget, into pads."""
    valid = nodes.score > -jnp.inf
    if row_budget is not None:
        valid &= jnp.arange(1, valid.shape[1] + 1) <= row_budget[:, None]

    def column(first, rest, pad):
        first = jnp.broadcast_to(jnp.asarray(first, rest.dtype), root.shape)
        return jnp.concatenate([first[:, None], jnp.where(valid, rest, pad)], axis=1)

    return DraftTree(
        token=column(root, nodes.token, 0),
        parent=column(-1, nodes.parent, -1),
        depth=column(0, nodes.depth, 0),
        score=column(0.0, nodes.score, -jnp.inf),
        valid=column(True, valid, False),
    )
