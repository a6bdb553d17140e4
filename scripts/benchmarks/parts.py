"""The parts of a round as calls to be timed, in the programs that generation runs or cut out of them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.pairs import Pair
from ddtree_jax.decode import round as one_round
from ddtree_jax.decode.loop import Request, decode_rounds, module, prefill
from ddtree_jax.decode.state import DecodeState, RoundConfig
from ddtree_jax.generation import Options, make_sampling
from ddtree_jax.models.network import Network
from ddtree_jax.tree import DraftTree, expand, walk

PLAIN = RoundConfig(0, "chain", 0)
UNLIMITED = 2**30
SHARPNESS = 6.0  # standard deviation of the logits that trees are made from: peaked enough for trees of some depth


def tree_config(pair: Pair, budget: int, kind: str = "best-first") -> RoundConfig:
    """A round that drafts and verifies `budget` nodes."""
    return RoundConfig(budget, kind, pair.drafter.config.horizon)


def ready(pair: Pair, config: RoundConfig, context: int, room: int) -> DecodeState:
    """The state after a random prompt of `context` tokens, with caches for `room` more; it never ends."""
    state, _ = prefill(pair.target, pair.drafter if config.budget else None, request(pair, config, context, room))
    progress = dataclasses.replace(state.progress, limit=jnp.full_like(state.progress.limit, UNLIMITED))
    return dataclasses.replace(state, progress=progress)


def request(pair: Pair, config: RoundConfig, context: int, room: int) -> Request:
    """One greedy random prompt."""
    prompt = jax.random.randint(jax.random.key(2), (context,), 0, pair.target.config.vocab_size).tolist()
    return Request([prompt], [room], [config.budget], (), make_sampling(Options(), 1), config)


class Rounds:
    """Calls of `decode_rounds`, the program of generation, that all begin at the same length.

    The drafter and target see other tokens each time; what a round costs depends on the length alone.
    """

    def __init__(self, pair: Pair, config: RoundConfig, context: int, room: int, rounds: int):
        self.pair, self.config, self.rounds = pair, config, rounds
        self.state = ready(pair, config, context, max(room, (rounds + 1) * config.path_length))
        self.length = jnp.copy(self.state.length)

    @property
    def capacity(self) -> int:
        """Slots of the caches."""
        return next(c.k.shape[2] for c in self.state.caches if hasattr(c, "k"))

    def __call__(self) -> jax.Array:
        drafter = self.pair.drafter if self.config.budget else None
        state, _ = decode_rounds(self.pair.target, drafter, self.state, jnp.int32(self.rounds), config=self.config)
        self.state = dataclasses.replace(state, length=jnp.copy(self.length))
        return state.root

    def accepted(self) -> float:
        """Mean acceptance length of all rounds so far (the first token came from the prompt)."""
        progress = self.state.progress
        return (int(progress.produced[0]) - 1) / max(int(progress.rounds[0]), 1)


class Commit:
    """Calls that walk a tree along its first children and write what that accepts, always from the same length."""

    def __init__(self, pair: Pair, state: DecodeState, nodes: int):
        self.pair, self.length = pair, jnp.copy(state.length)
        self.tree, self.depth = some_tree(pair, nodes)
        _, self.features, self.rows = verify(pair.target, pair.drafter, state, self.tree, self.depth)
        self.state = state

    def __call__(self) -> jax.Array:
        state = commit(self.pair.drafter, self.state, self.tree, self.rows, self.features, self.depth)
        self.state = dataclasses.replace(state, length=jnp.copy(self.length))
        return state.root


@partial(jax.jit, static_argnames=["depth"])
def verify(target: Network, drafter: Network, state: DecodeState, tree: DraftTree, depth: int) -> tuple[Any, Any, Any]:
    """Verify a tree: the target's choice after every node, and what the commit takes."""
    model = target.module()
    block = one_round.tree_block(tree, state.length, depth)
    hidden, features, rows = model.verify(tree.token, state.caches, block, drafter.config.target_layer_ids)
    return jnp.argmax(model.logits(hidden), axis=-1), features, rows


@partial(jax.jit, static_argnames=["horizon"])
def draft(target: Network, drafter: Network, state: DecodeState, horizon: int) -> jax.Array:
    """The drafter's logits for one block."""
    return one_round.draft(target.module(), drafter.module(), state, horizon)[0]


@partial(jax.jit, static_argnames=["depth"], donate_argnames=["state"])
def commit(drafter: Network, state: DecodeState, tree: DraftTree, rows: Any, features: Any, depth: int) -> DecodeState:
    """The walk whose choices are the first children's tokens, and the commit of its path."""

    def first_child(node, _):
        child = tree.valid & (tree.parent == node[:, None])
        return jnp.take_along_axis(tree.token, jnp.argmax(child, axis=1)[:, None], axis=1)[:, 0]

    walked = walk(tree, first_child, depth)
    stopped = jnp.zeros_like(state.progress.done)
    return one_round.advance(module(drafter), state, tree, walked, walked.count, stopped, rows, features)


@partial(jax.jit, static_argnames=["budget"])
def grown(logits: jax.Array, budget: int) -> DraftTree:
    """A best-first tree."""
    return expand(logits, jnp.zeros(1, jnp.int32), budget=budget)


def sharp_logits(pair: Pair) -> jax.Array:
    """Random draft logits, as the drafter's in shape and type."""
    shape = (1, pair.drafter.config.horizon, pair.target.config.vocab_size)
    return SHARPNESS * jax.random.normal(jax.random.key(3), shape)


def some_tree(pair: Pair, nodes: int) -> tuple[DraftTree, int]:
    """A tree of so many nodes, and the most that its depth can be."""
    return grown(sharp_logits(pair), nodes - 1), min(nodes - 1, pair.drafter.config.horizon)
