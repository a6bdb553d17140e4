"""From the drafter's scores to the draft tree: its most probable prefixes, on the device, static shapes.

The scores are marginals, one list of tokens a position, or depend on the token before (`Branches`). The reference pops
nodes from a heap. Here the same tree is built depth by depth (algorithm.md section 12): the best nodes of a depth come
from (parent's place, token's rank) pairs, and one merge over all depths keeps the best of them.

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
from jaxtyping import Array, Bool, Float, Int, Shaped

from ddtree_jax.ops.top_k import top_k as top_tokens
from ddtree_jax.tree.topology import DraftTree

KINDS = ("best-first", "spine", "chain", "star")


class Branches(NamedTuple):
    """What may follow what: at every position, after every token that can stand before it, R tokens, best first.

    Tokens that stand at the same position are told apart by their group, and `group` says into which one a token leads
    at the next position. Depth 1 has one group in use, number 0: what follows the root. Marginals are the case of a
    single group (G = 1).

    Attributes:
        logp: fp32 log-probability given the token before, descending in the last axis; -inf where nothing may follow.
        token: int32 vocabulary ids; those that follow the same token are different.
        group: int32, in 0..G-1.
    """

    logp: Float[Array, "*B L G R"]
    token: Int[Array, "*B L G R"]
    group: Int[Array, "*B L G R"]


class Level(NamedTuple):
    """The W best nodes of one depth, best first. "Place" is the index in this order.

    Of a spine, place 0 is the node of the top-1 chain as long as that lasts, whatever else is better.

    Attributes:
        score: fp32 log-probability of the path; -inf for places that hold no node.
        group: int32, which of the next position's lists of tokens follows the node.
        lex: int32 permutation, each node's number in the lexicographic order of the rank paths of this depth.
        offset: int32, the node's preorder number (from 0, depth 0 left out) less the sizes of the subtrees that begin
            before it at this depth.
        parent: int32 place in the level above.
        rank: int32 rank of the token at this depth.
    """

    score: Float[Array, " W"]
    group: Int[Array, " W"]
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
    branches = marginal_branches(logits, 1 if kind == "chain" else top_k or budget)
    return grow(branches, root, budget=budget, kind=kind, row_budget=row_budget, row_horizon=row_horizon)


def marginal_branches(logits: Float[Array, "B L V"], ranks: int) -> Branches:
    """The `ranks` best tokens of every position (at most V), whatever stands before: one group."""
    logp, token = (x[:, :, None] for x in marginals(logits, min(ranks, logits.shape[2])))
    return Branches(logp, token, jnp.zeros_like(token))


def grow(
    branches: Branches,
    root: Int[Array, " B"],
    *,
    budget: int,
    kind: str = "best-first",
    row_budget: Int[Array, " B"] | None = None,
    row_horizon: Int[Array, " B"] | None = None,
) -> DraftTree:
    """Like `expand`, from scores that may depend on the token before: the tree of the most probable prefixes.

    Exact for any such scores: log-probabilities are at most 0, so a node among the `budget` best has all its ancestors
    among them. The top-1 chain takes the best token after the one it took; with dependent scores, unlike with
    marginals, it need not be the most probable path.
    """
    _check(kind, budget)
    if kind == "star":
        branches = Branches(*(x[:, :1] for x in branches))
    if kind == "chain":
        branches = Branches(*(x[..., :1] for x in branches))
    logp, token, group = branches
    size = min(budget, _possible_nodes(logp.shape[1], logp.shape[3]))
    if size == 0:
        return _assemble(root, _no_nodes(root.shape[0], budget), row_budget)
    if row_horizon is not None:
        reach = jnp.arange(logp.shape[1]) < row_horizon[:, None]
        logp = jnp.where(reach[:, :, None, None], logp, -jnp.inf)
    nodes = jax.vmap(partial(_best_nodes, size, kind == "spine"))(Branches(logp, token, group))
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


def _check(kind: str, budget: int, top_k: int | None = None) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown tree kind {kind!r}: choose one of {', '.join(KINDS)}")
    if budget < 0 or (top_k or 0) < 0:
        raise ValueError(f"budget and top_k must not be negative, got budget {budget} and top_k {top_k}")


def _possible_nodes(depths: int, ranks: int) -> int:
    """Nodes of the complete tree: for a chain its length, for a star its width."""
    return sum(ranks**depth for depth in range(1, depths + 1))


def _pairs(size: int, ranks: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs (parent's place i, rank r) that can be among the `size` best nodes, by i then r; and the pairs of every i.

    With one group, (i, r) is beaten by all (i' <= i, r' <= r): a staircase, (i+1)(r+1) <= size, of about
    size * ln(size) pairs. With more, only by its parent, those before the parent, and its own better siblings.
    """
    place = np.arange(size)
    counts = np.minimum(ranks, size // (place + 1) if groups == 1 else size - place)
    parent = np.repeat(place, counts)
    rank = np.arange(parent.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return parent.astype(np.int32), rank.astype(np.int32), counts.astype(np.int32)


def _best_nodes(size: int, spine: bool, branches: Branches) -> Nodes:
    """The `size` nodes of one row's tree."""
    _, groups, ranks = branches.logp.shape
    pairs = _pairs(size, ranks, groups)

    def deeper(carry: tuple[Level, Bool[Array, ""] | None], step: tuple[Float[Array, "G R"], Int[Array, "G R"]]):
        level, chain = _next_level(pairs, *carry, *step)
        return (level, chain), (level, chain)

    start = _root_level(size), jnp.array(True) if spine else None
    _, (levels, chain) = jax.lax.scan(deeper, start, (branches.logp, branches.group))
    above = jnp.concatenate([jnp.zeros_like(levels.group[:1]), levels.group[:-1]])
    before = jnp.take_along_axis(above, levels.parent, axis=1)
    token = jax.vmap(_following)(branches.token, before, levels.rank)
    return _merge(levels, token, chain)


def _root_level(size: int) -> Level:
    """Depth 0: the root at place 0, nothing at the others. Preorder numbers leave this depth out, hence the offset."""
    place = jnp.arange(size, dtype=jnp.int32)
    none = jnp.zeros(size, jnp.int32)
    score = jnp.where(place == 0, 0.0, -jnp.inf).astype(jnp.float32)
    return Level(score, none, place, -1 - place, none, none)


def _next_level(
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray],
    above: Level,
    chain: Bool[Array, ""] | None,
    logp: Float[Array, "G R"],
    group: Int[Array, "G R"],
) -> tuple[Level, Bool[Array, ""] | None]:
    """The best nodes of the next depth, and of a spine whether the first is the top-1 chain's and so stands before all.

    chain: the same of the depth above, None if it is no spine. A slot is a candidate's number in lexicographic order.
    """
    place, rank, counts = pairs
    first_slot = _sums_before(jnp.asarray(counts), above.lex)
    slot = first_slot[place] + rank
    candidates = above.score[place] + _following(logp, above.group[place], rank)
    score = key = _moved(candidates, slot)
    if chain is not None:
        chain &= candidates[0] > -jnp.inf
        key = score.at[slot[0]].set(jnp.where(chain, jnp.inf, candidates[0]))
    _, kept = jax.lax.top_k(key, counts.size)
    lex = jnp.cumsum(jnp.zeros_like(slot).at[kept].set(1, unique_indices=True))[kept] - 1
    candidate = _moved(jnp.arange(slot.size, dtype=jnp.int32), slot)[kept]
    parent, rank = jnp.asarray(place)[candidate], jnp.asarray(rank)[candidate]
    offset = above.offset[parent] + above.lex[parent] + 1
    return Level(score[kept], _following(group, above.group[parent], rank), lex, offset, parent, rank), chain


def _following(table: Shaped[Array, "G R"], group: Int[Array, " n"], rank: Shaped[Array | np.ndarray, " n"]):
    """table[group, rank]; where there is one group, what group a node has need not be looked up."""
    return table[0, rank] if table.shape[0] == 1 else table[group, rank]


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


def _merge(levels: Level, token: Int[Array, "L W"], chain: Bool[Array, " L"] | None) -> Nodes:
    """The W best of the nodes of all levels, with the parents as indices into the tree.

    chain: where place 0 holds the top-1 chain's node, which comes before all others (they tie, so by depth).
    """
    width, key = levels.score.shape[1], levels.score
    if chain is not None:
        key = key.at[:, 0].set(jnp.where(chain, jnp.inf, key[:, 0]))
    number = _preorder(levels).ravel()
    node_at = _moved(jnp.arange(number.size, dtype=jnp.int32), number)
    node = node_at[jax.lax.top_k(_moved(key.ravel(), number), width)[1]]
    # Index of every node in the tree; the first `width` entries stand for depth 0, where only the root is: 0.
    index = jnp.zeros(width + number.size, jnp.int32)
    index = index.at[width + node].set(jnp.arange(1, width + 1, dtype=jnp.int32), unique_indices=True)
    depth = node // width
    parent = index[depth * width + levels.parent.ravel()[node]]
    return Nodes(token.ravel()[node], parent, depth + 1, levels.score.ravel()[node])


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
