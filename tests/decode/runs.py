"""Runs of the decode loop for tests. All have the same shapes, so that a network compiles once per RoundConfig and the
programs serve every file: at most 200 new tokens, prompts in one chunk, every sampling setting a value of its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from tiny import DRAFTER, HYBRID, tiny_drafter, tiny_target

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.decode.loop import Report, Request, decode_rounds, prefill
from ddtree_jax.decode.sampling import Sampling
from ddtree_jax.decode.state import DecodeState, RoundConfig
from ddtree_jax.models.blocks import KVCache
from ddtree_jax.models.network import Network
from ddtree_jax.tree import DraftTree

HORIZON = DRAFTER.horizon
BUDGET = 12
MOST = 200  # every state has room for so many tokens; `limits` may allow fewer
PLAIN = RoundConfig(0, "chain", 0)


def with_leaves(network: Network, name: str, change: Callable[[jax.Array], jax.Array]) -> Network:
    """The network with every parameter whose path contains `name` changed."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(network.spec.abstract()[1])]
    assert any(name in path for path in paths)
    leaves = tuple(change(x) if name in path else x for path, x in zip(paths, network.leaves, strict=True))
    return dataclasses.replace(network, leaves=leaves)


@cache
def target(seed: int = 0, config: TargetConfig = HYBRID) -> Network:
    """A random target. Initial biases make a delta layer forget within a token; here the heads remember 1 to 100."""
    network = tiny_target(seed, config)
    if config.delta is None:
        return network
    return with_leaves(network, "dt_bias", lambda bias: jnp.linspace(-6.0, 1.0, bias.size))


@cache
def drafter(seed: int = 1, config: DrafterConfig = DRAFTER) -> Network:
    """A random drafter."""
    return tiny_drafter(seed, config)


def sampling(rows: int, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0) -> Sampling:
    """Settings, one for all rows or one a row; static parts are those that allow everything."""

    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(value, rows), dtype)

    keys = jnp.stack([jax.random.key(int(s)) for s in np.broadcast_to(seed, rows)])
    floats = (column(value, jnp.float32) for value in (top_p, min_p))
    return Sampling(keys, column(temperature, jnp.float32), column(top_k, jnp.int32), *floats, False, True)


def prompts(seed: int, lengths: Sequence[int], vocab: int = HYBRID.vocab_size) -> list[list[int]]:
    """Random prompts of these lengths, made without JAX: it would compile something for every length."""
    return [np.random.default_rng((seed, row)).integers(vocab, size=n).tolist() for row, n in enumerate(lengths)]


def begin(
    target: Network,
    drafter: Network | None,
    prompts: list[list[int]],
    settings: Sampling,
    *,
    limits: int | Sequence[int] = MOST,
    budgets: int | Sequence[int] = BUDGET,
    stop_id: int = -1,
) -> DecodeState:
    """The state after the prompts; the first token of every row is already produced."""
    rows = len(prompts)
    budgets = np.broadcast_to(budgets, rows).tolist()
    # The configuration only says how much room there has to be behind the prompt: the most any of ours needs.
    room = RoundConfig(BUDGET, "best-first", HORIZON)
    state, _ = prefill(target, drafter, Request(prompts, [MOST] * rows, budgets, (stop_id,), settings, room))
    return with_progress(state, limit=jnp.asarray(np.broadcast_to(limits, rows), jnp.int32))


def with_progress(state: DecodeState, **changes: jax.Array) -> DecodeState:
    """The state with some fields of its progress replaced; `done` follows the limit."""
    progress = dataclasses.replace(state.progress, **changes)
    done = progress.done | (progress.produced >= progress.limit)
    return dataclasses.replace(state, progress=dataclasses.replace(progress, done=done))


def copy(state: DecodeState) -> DecodeState:
    """The same state in buffers of its own: rounds donate theirs."""
    return jax.tree.map(jnp.copy, state)


def finish(target: Network, drafter: Network | None, state: DecodeState, config: RoundConfig) -> Report:
    """Rounds until every row is done."""
    _, report = decode_rounds(target, drafter, state, jnp.int32(10 * MOST), config=config)
    assert np.asarray(report.done).all()
    return report


def outputs(report: Report) -> list[list[int]]:
    """Every row's tokens."""
    return [row[:n].tolist() for row, n in zip(np.asarray(report.tokens), np.asarray(report.produced), strict=True)]


def acceptance(report: Report) -> list[list[int]]:
    """Every row's acceptance lengths, a number a round."""
    return [row[:n].tolist() for row, n in zip(np.asarray(report.accepted), np.asarray(report.rounds), strict=True)]


def plain_outputs(target: Network, drafter: Network, state: DecodeState) -> list[list[int]]:
    """The tokens of plain decoding from a state, which is kept: what every other way has to give."""
    return outputs(finish(target, drafter, copy(state), PLAIN))


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    """The nodes from the root down to `node`."""
    path = [node]
    while (above := int(tree.parent[row, path[0]])) >= 0:
        path.insert(0, above)
    return path


def kept_slots(caches, row: int, length: int) -> list[np.ndarray]:
    """One row's caches as far as they count: slots before `length`, delta states, windows."""
    arrays = []
    for layer in caches:
        if isinstance(layer, KVCache):
            arrays += [np.asarray(x[row, :, :length]) for x in (layer.k, layer.v)]
        else:
            arrays += [np.asarray(layer.state[row]), np.asarray(layer.window[row])]
    return arrays
