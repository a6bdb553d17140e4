"""What a generation carries from round to round, all of it on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ddtree_jax.decode.sampling import Sampling
from ddtree_jax.models.blocks import Cache, KVCache


@dataclass(frozen=True)
class RoundConfig:
    """The static shape of a round. Plain decoding is a tree of budget 0, the chain a chain-shaped tree: one code path.

    budget: drafted nodes verified a round, the root not counted.
    tree: best-first, spine, chain or star.
    horizon: positions the drafter fills (block_size - 1; 0 without drafting).
    couple: build the tree from noise-coupled scores.
    cap_block: near the limit, draft only as many slots as may still be produced (the reference loop of some drafters
    does; the slots that remain are then drafted with fewer masks than the drafter was trained with).
    """

    budget: int
    tree: str
    horizon: int
    couple: bool = False
    cap_block: bool = False

    @property
    def max_depth(self) -> int:
        """The deepest node a round can have."""
        return min(self.budget, self.horizon)

    @property
    def path_length(self) -> int:
        """P: most tokens a round can produce."""
        return self.max_depth + 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """What every row has produced and may produce.

    tokens: output without the prompt, `produced[b]` of them.
    limit: most tokens row b may produce.
    accepted: acceptance length of each of `rounds[b]` rounds, the root included, as the walk found it (the last may
    reach past a stop or the limit).
    nodes: tree nodes verified in all rounds, roots included.
    stop_ids: padded with -1.
    row_budget: a row's own budget, at most the compiled one.
    """

    tokens: Int[Array, "B M"]
    produced: Int[Array, " B"]
    limit: Int[Array, " B"]
    done: Bool[Array, " B"]
    rounds: Int[Array, " B"]
    accepted: Int[Array, "B M"]
    nodes: Int[Array, " B"]
    stop_ids: Int[Array, " n"]
    row_budget: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """`length[b]` tokens of row b are in the caches; `root[b]` is the token after them, already part of the output."""

    caches: tuple[Cache, ...]
    draft_caches: tuple[KVCache, ...]
    length: Int[Array, " B"]
    root: Int[Array, " B"]
    progress: Progress
    sampling: Sampling


def empty_progress(
    limit: Int[Array, " B"], row_budget: Int[Array, " B"], stop_ids: Int[Array, " n"], room: int
) -> Progress:
    """No token yet; `room` is the size M of the output buffer."""
    batch = limit.shape[0]
    zeros = partial(jnp.zeros, dtype=jnp.int32)
    return Progress(
        tokens=zeros((batch, room)),
        produced=zeros(batch),
        limit=limit,
        done=jnp.zeros(batch, bool),
        rounds=zeros(batch),
        accepted=zeros((batch, room)),
        nodes=zeros(batch),
        stop_ids=stop_ids,
        row_budget=row_budget,
    )
