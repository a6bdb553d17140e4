"""One round for every row: draft a block, expand it to a tree, verify all nodes at once, walk, commit what was
accepted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.decode.sampling import Sampling, couple, pick
from ddtree_jax.decode.state import DecodeState, Progress, RoundConfig
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.blocks import KVCache, Rows, TreeBlock, commit, take_path
from ddtree_jax.tree import (
    Branches,
    DraftTree,
    Walk,
    ancestor_ids,
    ancestor_mask,
    grow,
    marginal_branches,
    walk,
    walk_choices,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundTrace:
    """What one round saw, for tests and the debug summary: inside the device loop it is dead code."""

    tree: DraftTree
    walk: Walk
    logits: Float[Array, "B N V"]
    draft_logits: Float[Array, "B L V"] | None


def decode_round(
    target: Target, drafter: Drafter | None, state: DecodeState, config: RoundConfig
) -> tuple[DecodeState, RoundTrace]:
    """Advance every row that is not done by 1 to P tokens (algorithm.md section 1). Rows never see each other."""
    taps = drafter.config.target_layer_ids if drafter else ()
    with jax.named_scope("draft"):
        tree, draft_logits = propose(target, drafter, state, config)
    with jax.named_scope("verify"):
        block = tree_block(tree, state.length, config.max_depth)
        hidden, features, rows = target.verify(tree.token, state.caches, block, taps)
        logits = target.logits(hidden)
    with jax.named_scope("walk"):
        walked = accepted_path(tree, block, logits, state)
        kept, stopped = count_kept(walked, state.progress)
    with jax.named_scope("commit"):
        state = advance(drafter, state, tree, walked, kept, stopped, rows, features)
    return state, RoundTrace(tree, walked, logits, draft_logits)


def propose(
    target: Target, drafter: Drafter | None, state: DecodeState, config: RoundConfig
) -> tuple[DraftTree, Float[Array, "B L V"] | None]:
    """The tree to verify, and the draft logits it was built from; without a drafter the tree is the root alone."""
    if config.budget == 0 or drafter is None:
        return root_tree(state.root), None
    left = state.progress.limit - state.progress.produced
    slots = jnp.clip(left + 1, 1, config.horizon + 1) if config.cap_block else None
    logits, hidden = draft(target, drafter, state, config.horizon, slots)
    tree = grow(
        branches(drafter, logits, hidden, state, config),
        state.root,
        budget=config.budget,
        kind=config.tree,
        row_budget=state.progress.row_budget,
        row_horizon=None if slots is None else slots - 1,
    )
    return tree, logits


def draft(
    target: Target, drafter: Drafter, state: DecodeState, horizon: int, slots: Int[Array, " B"] | None = None
) -> tuple[Float[Array, "B L V"], Float[Array, "B L H"]]:
    """The drafter's float32 logits and final hidden states for the `horizon` positions after each root.

    slots: how many slots of the block are there, the root's counted (default all).
    """
    ids = jnp.full((state.root.shape[0], horizon + 1), drafter.config.mask_token_id, jnp.int32)
    noise = drafter.embed(ids.at[:, 0].set(state.root), target)
    hidden = drafter.draft(noise, state.draft_caches, state.length, slots)[:, 1:]
    return drafter.logits(hidden, target), hidden


def branches(
    drafter: Drafter,
    logits: Float[Array, "B L V"],
    hidden: Float[Array, "B L H"],
    state: DecodeState,
    config: RoundConfig,
) -> Branches:
    """What the tree is grown from: the draft's marginals, or a DFlash2 drafter's scores of neighbouring tokens."""
    scores = couple(logits, state.sampling, state.length) if config.couple else logits
    if drafter.config.selector is None:
        return marginal_branches(scores, 1 if config.tree == "chain" else config.budget)
    scaled = state.sampling.temperature > 0 if config.couple else False
    pair_scale = jnp.where(scaled, 1 / jnp.maximum(state.sampling.temperature, 1e-6), 1.0)
    return drafter.candidate_selector(scores, hidden, state.root, pair_scale)


def root_tree(root: Int[Array, " B"]) -> DraftTree:
    """The tree of plain decoding: one node."""
    column = root[:, None]
    zero = jnp.zeros_like(column)
    return DraftTree(column, zero - 1, zero, zero.astype(jnp.float32), zero == 0)


def tree_block(tree: DraftTree, length: Int[Array, " B"], max_depth: int) -> TreeBlock:
    """The tree as the target sees it: positions are start + depth, whatever slot a node has."""
    return TreeBlock(
        position=length[:, None] + tree.depth,
        length=length,
        mask=ancestor_mask(tree.parent, max_depth),
        parent=tree.parent,
        depth=tree.depth,
        ancestors=ancestor_ids(tree.parent, max_depth + 1),
        max_depth=max_depth,
    )


def accepted_path(tree: DraftTree, block: TreeBlock, logits: Float[Array, "B N V"], state: DecodeState) -> Walk:
    """The walk by the target's own choices.

    Greedy choices are one argmax over all nodes; sampled ones are drawn along the walk only, at most P of them.
    """
    if state.sampling.greedy:
        return walk_choices(tree, jnp.argmax(logits, axis=-1).astype(jnp.int32), block.ancestors)

    return walk(tree, chooser(logits, state.sampling, state.length), block.max_depth)


def chooser(logits: Float[Array, "B N V"], sampling: Sampling, length: Int[Array, " B"]):
    """The walk's question: which token does the target draw after this node?"""

    def choose(node, depth):
        row = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        return pick(row, sampling, length + depth + 1)

    return choose


def count_kept(walked: Walk, progress: Progress) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """How many of the walk's tokens each row keeps, and whether it ends in a stop id.

    A stop id inside the path ends it there, itself kept; then the limit applies; rows that are done keep none.
    """
    steps = jnp.arange(walked.tokens.shape[1])
    is_stop = jnp.isin(walked.tokens, progress.stop_ids) & (steps < walked.count[:, None])
    until_stop = jnp.where(jnp.any(is_stop, axis=1), jnp.argmax(is_stop, axis=1) + 1, walked.count)
    kept = jnp.minimum(until_stop, progress.limit - progress.produced)
    kept = jnp.where(progress.done, 0, kept).astype(jnp.int32)
    return kept, jnp.any(is_stop & (steps < kept[:, None]), axis=1)


def advance(
    drafter: Drafter | None,
    state: DecodeState,
    tree: DraftTree,
    walked: Walk,
    kept: Int[Array, " B"],
    stopped: Bool[Array, " B"],
    rows: list[Rows],
    features: Float[Array, "B N features"],
) -> DecodeState:
    """Commit the kept part of the path: afterwards the caches hold exactly the kept text but its last token, which is
    the new root.
    """
    caches = tuple(
        commit(cache, made, walked.path, kept, state.length) for cache, made in zip(state.caches, rows, strict=True)
    )
    last = jnp.take_along_axis(walked.tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    return dataclasses.replace(
        state,
        caches=caches,
        draft_caches=extend_context(drafter, state.draft_caches, take_path(features, walked.path), state.length),
        length=state.length + kept,
        root=jnp.where(kept > 0, last, state.root),
        progress=record(state.progress, tree, walked, kept, stopped),
    )


def extend_context(
    drafter: Drafter | None,
    caches: tuple[KVCache, ...],
    features: Float[Array, "B P features"],
    length: Int[Array, " B"],
) -> tuple[KVCache, ...]:
    """Write the drafter's context rows of P tokens behind `length`; those past the kept ones are overwritten later."""
    if drafter is None:
        return caches
    position = length[:, None] + jnp.arange(features.shape[1])
    return drafter.extend(caches, drafter.context(features, position), length)


def record(
    progress: Progress, tree: DraftTree, walked: Walk, kept: Int[Array, " B"], stopped: Bool[Array, " B"]
) -> Progress:
    """Append the kept tokens and the round's figures. Writes of rows that are done fall outside the buffers and are
    dropped.
    """
    row = jnp.arange(kept.shape[0])
    steps = jnp.arange(walked.tokens.shape[1])
    room = progress.tokens.shape[1]
    slot = jnp.where(steps < kept[:, None], progress.produced[:, None] + steps, room)
    active = ~progress.done
    produced = progress.produced + kept
    return dataclasses.replace(
        progress,
        tokens=progress.tokens.at[row[:, None], slot].set(walked.tokens, mode="drop"),
        produced=produced,
        done=progress.done | stopped | (produced >= progress.limit),
        rounds=progress.rounds + active,
        accepted=progress.accepted.at[row, jnp.where(active, progress.rounds, room)].set(walked.count, mode="drop"),
        nodes=progress.nodes + jnp.where(active, jnp.sum(tree.valid, axis=1), 0).astype(jnp.int32),
    )
