"""Recorded truth: reading it, and running the library round by round beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from ddtree_jax.decode.loop import prefill, trace_round
from ddtree_jax.decode.round import RoundTrace
from ddtree_jax.decode.state import DecodeState
from ddtree_jax.generation import Options, make_request
from ddtree_jax.loading import Model
from ddtree_jax.models.network import Network


def arrays_beside(directory: Path) -> dict[str, np.ndarray]:
    """The arrays recorded for a checkpoint: NAME.npz beside the directory NAME."""
    return read_arrays(directory.with_name(directory.name + ".npz"))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file."""
    with np.load(path) as file:
        return dict(file)


def read_prompts(directory: Path) -> list[dict[str, Any]]:
    """The recorded runs, one entry a prompt."""
    return json.loads((directory / "runs.json").read_text())["prompts"]


def named_parameters(network: Network) -> dict[str, jax.Array]:
    """Parameters by their checkpoint names."""
    _, state = network.spec.abstract()
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    return dict(zip(names, network.leaves, strict=True))


class Round(NamedTuple):
    """What one row saw in one round: the nodes of its tree (root first, pads left out), and where the walk went.

    path: accepted nodes. choices: the target's token after each of them, as the walk found it.
    """

    start: int
    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    logits: np.ndarray
    draft_logits: np.ndarray | None
    path: np.ndarray
    choices: np.ndarray


def trace(model: Model, prompts: list[list[int]], **options: Any) -> tuple[list[list[Round]], DecodeState]:
    """Decode greedily with the options of `generate`, one dispatch a round: every row's rounds, and the last state."""
    request = make_request(model, prompts, Options(**options))
    drafter = model.drafter if request.config.budget else None
    state, _ = prefill(model.target, drafter, request)
    rounds: list[list[Round]] = [[] for _ in prompts]
    while not (done := np.asarray(state.progress.done)).all():
        starts = np.asarray(state.length)
        state, seen = trace_round(model.target, drafter, state, config=request.config)
        seen = jax.tree.map(np.asarray, seen)
        for row in np.flatnonzero(~done):
            rounds[row].append(_read_round(seen, row, int(starts[row])))
    return rounds, state


def _read_round(seen: RoundTrace, row: int, start: int) -> Round:
    tree, walk = seen.tree, seen.walk
    real, kept = tree.valid[row], walk.count[row]
    return Round(
        start,
        tree.token[row][real],
        tree.parent[row][real],
        tree.depth[row][real],
        tree.score[row][real],
        seen.logits[row][real],
        None if seen.draft_logits is None else seen.draft_logits[row],
        walk.path[row][:kept],
        walk.tokens[row][:kept],
    )


def rounds_needed(lengths: list[int], new_tokens: int) -> list[int]:
    """Acceptance lengths of the rounds that produce `new_tokens`, the first of which comes from prefill.

    The recorded loops may run one round more.
    """
    produced = 1 + np.cumsum([0, *lengths])
    return lengths[: int(np.argmax(produced >= new_tokens))]


def scores_of(draft_logits: np.ndarray, tokens: list[int], parents: list[int], depths: list[int]) -> np.ndarray:
    """Log-probability of every path of a tree, root first, in float64. The lists leave the root out; parent 0 is it."""
    x = draft_logits.astype(np.float64)
    logp = x - np.log(np.sum(np.exp(x - x.max(-1, keepdims=True)), -1, keepdims=True)) - x.max(-1, keepdims=True)
    scores = [0.0]
    for token, parent, depth in zip(tokens, parents, depths, strict=True):
        scores.append(scores[parent] + logp[depth - 1, token])
    return np.array(scores)


def has_ties(scores: np.ndarray, gap: float = 1e-6) -> bool:
    """Whether two neighbours in the order of the scores are so close that their order is not defined."""
    return bool(np.any(-np.diff(np.sort(scores)[::-1]) <= gap))


def check_tree(one: Round, tokens: list[int], parents: list[int], depths: list[int], name: str) -> bool:
    """A tree against the recorded one (root left out, parent 0 is the root): the same scores, and the same nodes.

    Where scores tie the nodes may differ; then only the scores are compared and the result is False.
    """
    expected = scores_of(one.draft_logits, tokens, parents, depths)
    np.testing.assert_allclose(np.sort(one.scores), np.sort(expected), atol=2e-5, err_msg=name)
    if has_ties(expected):
        return False
    np.testing.assert_array_equal(one.tokens[1:], tokens, err_msg=name)
    np.testing.assert_array_equal(one.parents[1:], parents, err_msg=name)
    np.testing.assert_array_equal(one.depths[1:], depths, err_msg=name)
    return True
