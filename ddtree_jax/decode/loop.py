"""Prefill, and rounds under `lax.while_loop`: a dispatch runs many rounds, and the host reads their tokens one dispatch
late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ddtree_jax.decode.round import RoundTrace, decode_round, extend_context
from ddtree_jax.decode.sampling import Sampling, pick
from ddtree_jax.decode.state import DecodeState, Progress, RoundConfig, empty_progress
from ddtree_jax.models.blocks import DeltaCache, KVRows
from ddtree_jax.models.network import Network
from ddtree_jax.parallel import on_its_mesh, replicate

PREFILL_SIZES = (64, 256, 1024)  # compiled chunk lengths: no prompt length compiles anything else
PASS_TOKENS = 128  # what a pass costs beside its tokens: the weights are read once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """A copy of the progress that outlives the donated state; see `Progress`."""

    tokens: Int[Array, "B M"]
    produced: Int[Array, " B"]
    done: Array
    rounds: Int[Array, " B"]
    accepted: Int[Array, "B M"]
    nodes: Int[Array, " B"]


def module(network: Network | None) -> Any:
    """The NNX module of a network, or None: for use inside jit."""
    return None if network is None else network.module()


@partial(jax.jit, static_argnames=["config"], donate_argnames=["state"])
@on_its_mesh
def decode_rounds(
    target: Network, drafter: Network | None, state: DecodeState, rounds: Int[Array, ""], config: RoundConfig
) -> tuple[DecodeState, Report]:
    """Run up to `rounds` rounds, fewer when every row is done. `state` is donated: its caches are updated in place."""
    target_module, drafter_module = module(target), module(drafter)

    def body(carry):
        done, state = carry
        return done + 1, decode_round(target_module, drafter_module, state, config)[0]

    def more(carry):
        done, state = carry
        return (done < rounds) & ~jnp.all(state.progress.done)

    _, state = jax.lax.while_loop(more, body, (jnp.int32(0), state))
    return state, report(state.progress)


@partial(jax.jit, static_argnames=["config"])
@on_its_mesh
def trace_round(
    target: Network, drafter: Network | None, state: DecodeState, config: RoundConfig
) -> tuple[DecodeState, RoundTrace]:
    """One round that also returns its tree, walk and logits; the state is not donated. For tests and debugging."""
    return decode_round(module(target), module(drafter), state, config)


def report(progress: Progress) -> Report:
    """What the host reads after a dispatch."""
    return replicate(Report(**{f.name: getattr(progress, f.name) for f in dataclasses.fields(Report)}))


def prefill_chunk(
    target: Network,
    drafter: Network | None,
    state: DecodeState,
    last: Float[Array, "B H"],
    ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    start: Int[Array, ""],
) -> tuple[DecodeState, Float[Array, "B H"]]:
    """Tokens start..start+T-1 of right-padded prompts that are `lengths` long. `state` is donated.

    `last` collects the hidden state of every row's last prompt token. Two programs: in one, nothing would order the
    write of a cache after its reads, and XLA would then copy it (in a round the walk stands between the two).
    """
    last, made, features = read_chunk(target, drafter, state, last, ids, lengths, start)
    state, rows = take_delta(state, made)
    return write_chunk(target, drafter, state, rows, features, lengths, start), last


def take_delta(state: DecodeState, made: list[KVRows | DeltaCache]) -> tuple[DecodeState, list[KVRows | None]]:
    """Put in the new delta caches, buffers as they are, and leave the rows that are still to be written.

    Given to `write_chunk` beside the state they would be copied.
    """
    caches = tuple(m if isinstance(m, DeltaCache) else c for c, m in zip(state.caches, made, strict=True))
    return dataclasses.replace(state, caches=caches), [None if isinstance(m, DeltaCache) else m for m in made]


@jax.jit
@on_its_mesh
def read_chunk(
    target: Network,
    drafter: Network | None,
    state: DecodeState,
    last: Float[Array, "B H"],
    ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    start: Int[Array, ""],
) -> tuple[Float[Array, "B H"], list[KVRows | DeltaCache], Float[Array, "B T features"]]:
    """A chunk of the prompts through the target, the caches only read: `last`, and what `write_chunk` takes."""
    size = ids.shape[1]
    count = jnp.clip(lengths - start, 0, size)
    taps = drafter.config.target_layer_ids if drafter else ()
    hidden, features, made = module(target).sequence(ids, state.caches, state.length, count, taps)
    ends_here = (lengths > start) & (lengths <= start + size)
    final = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(ends_here[:, None], final, last), made, features


@partial(jax.jit, donate_argnames=["state"])
@on_its_mesh
def write_chunk(
    target: Network,
    drafter: Network | None,
    state: DecodeState,
    rows: list[KVRows | None],
    features: Float[Array, "B T features"],
    lengths: Int[Array, " B"],
    start: Int[Array, ""],
) -> DecodeState:
    """The caches with a chunk's rows from slot `start` on; what lies past a row's length is overwritten later."""
    offset = jnp.full_like(state.length, start)
    return dataclasses.replace(
        state,
        caches=module(target).extend(state.caches, rows, offset),
        draft_caches=extend_context(module(drafter), state.draft_caches, features, offset),
        length=jnp.clip(lengths, 0, start + features.shape[1]),
    )


@partial(jax.jit, donate_argnames=["state"])
@on_its_mesh
def first_token(target: Network, state: DecodeState, last: Float[Array, "B H"]) -> tuple[DecodeState, Report]:
    """Choose the token after every prompt: the first root, and the first token of the output."""
    token = pick(target.module().logits(last), state.sampling, state.length)
    progress = state.progress
    progress = dataclasses.replace(
        progress,
        tokens=progress.tokens.at[:, 0].set(token),
        produced=jnp.ones_like(progress.produced),
        done=jnp.isin(token, progress.stop_ids) | (progress.limit <= 1),
    )
    return dataclasses.replace(state, root=token, progress=progress), report(progress)


@dataclass(frozen=True)
class Request:
    """Everything a batch of prompts needs, on the host. Lists have one entry a row."""

    prompts: list[list[int]]
    limits: list[int]
    row_budgets: list[int]
    stop_ids: tuple[int, ...]
    sampling: Sampling
    config: RoundConfig


def prefill_plan(longest: int) -> list[tuple[int, int]]:
    """(start, size) of the chunks that cover `longest` prompt tokens, sizes from PREFILL_SIZES, the largest first.

    The cheapest plan, where a pass costs as much as PASS_TOKENS tokens beside its own: two passes of 256 rather than
    one of 1024 for 300 tokens, one of 256 rather than three of 64 for 150.
    """
    largest = max(PREFILL_SIZES)
    whole = [largest] * (longest // largest)
    sizes = whole + _cheapest_cover(longest - sum(whole))
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return list(zip(starts, sizes, strict=True)) if sizes else []


def _cheapest_cover(left: int) -> list[int]:
    """Chunk sizes, descending, for fewer tokens than the largest chunk has."""
    if left <= 0:
        return []
    plans = (sorted([size, *_cheapest_cover(left - size)], reverse=True) for size in PREFILL_SIZES)
    return min(plans, key=lambda plan: (sum(plan) + PASS_TOKENS * len(plan), len(plan)))


def bucket(size: int, smallest: int) -> int:
    """The next of smallest * 1, 1.5, 2, 3, 4, 6, 8, ...: buffer sizes that keep recompilation rare and waste below a
    half.
    """
    power = smallest
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def start(target: Network, drafter: Network | None, request: Request) -> DecodeState:
    """An empty state with room for the request."""
    batch, longest = len(request.prompts), max(map(len, request.prompts))
    padded = sum(size for _, size in prefill_plan(longest))
    path = request.config.path_length
    needed = max(len(p) + n for p, n in zip(request.prompts, request.limits, strict=True)) + path
    capacity = bucket(max(padded, needed), 256)
    room = bucket(max(request.limits), 64)
    stop_ids = np.full(bucket(len(request.stop_ids), 8), -1, np.int32)  # so that their number compiles nothing anew
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    return _allocate(
        target,
        drafter,
        jnp.array(request.limits, jnp.int32),
        jnp.array(request.row_budgets, jnp.int32),
        jnp.asarray(stop_ids),
        request.sampling,
        (batch, capacity, room),
    )


@partial(jax.jit, static_argnames=["sizes"])
@on_its_mesh
def _allocate(target, drafter, limits, row_budgets, stop_ids, sampling, sizes):
    batch, capacity, room = sizes
    return DecodeState(
        caches=module(target).init_caches(batch, capacity),
        draft_caches=module(drafter).init_caches(batch, capacity) if drafter else (),
        length=jnp.zeros(batch, jnp.int32),
        root=jnp.zeros(batch, jnp.int32),
        progress=empty_progress(limits, row_budgets, stop_ids, room),
        sampling=sampling,
    )


def prefill(target: Network, drafter: Network | None, request: Request) -> tuple[DecodeState, Report]:
    """All prompts into the caches, and the first token of each row."""
    lengths = [len(p) for p in request.prompts]
    plan = prefill_plan(max(lengths))
    ids = np.zeros((len(lengths), sum(size for _, size in plan)), np.int32)
    for row, prompt in zip(ids, request.prompts, strict=True):
        row[: len(prompt)] = prompt
    state = start(target, drafter, request)
    last = jnp.zeros((len(lengths), target.config.hidden_size), target.spec.dtype)
    ends = jnp.array(lengths, jnp.int32)
    for begin, size in plan:
        chunk = jnp.asarray(ids[:, begin : begin + size])
        state, last = prefill_chunk(target, drafter, state, last, chunk, ends, jnp.int32(begin))
    return first_token(target, state, last)


def decode(
    target: Network, drafter: Network | None, state: DecodeState, config: RoundConfig, rounds_per_dispatch: int
) -> Iterator[Report]:
    """Reports of one dispatch after another until every row is done. The next dispatch is always queued before a report
    is read.
    """
    rounds = jnp.int32(rounds_per_dispatch)
    state, newest = decode_rounds(target, drafter, state, rounds, config=config)
    while True:
        pending = newest
        jax.tree.map(lambda x: x.copy_to_host_async(), pending)
        state, newest = decode_rounds(target, drafter, state, rounds, config=config)
        yield pending
        if np.asarray(pending.done).all():
            return
