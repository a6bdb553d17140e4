"""Decoding round by round, with what each round saw: for `compare-run` and tests against recorded rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ddtree_jax.decode.loop import prefill, trace_round
from ddtree_jax.decode.state import DecodeState
from ddtree_jax.generation import Options, make_request
from ddtree_jax.loading import Model


@dataclass(frozen=True)
class Round:
    """One row's tree (root first, pads left out) and walk in one round.

    path: accepted nodes, the root's 0 first. draft_logits [L, V]: the marginals the tree was built from, None where
    nothing is drafted and where a selector scores pairs of tokens. start: the root's position. scores [N]: of the
    nodes. choices: the target's token after each accepted node. logits [N, V]: the target's, None unless asked for.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    path: list[int]
    draft_logits: np.ndarray | None
    start: int = 0
    scores: np.ndarray | None = None
    choices: list[int] | None = None
    logits: np.ndarray | None = None


def replay(
    model: Model, prompts: list[list[int]], keep_logits: bool = False, **options: Any
) -> tuple[list[list[Round]], DecodeState]:
    """Decode greedily with the options of `generate`, one dispatch a round: every prompt's rounds, and the last state.

    keep_logits: with the target's logits, which of a large vocabulary are most of what is copied.
    """
    request = make_request(model, prompts, Options(**options))
    drafter = model.drafter if request.config.budget else None
    selects = drafter is not None and drafter.config.selector is not None
    rounds: list[list[Round]] = [[] for _ in prompts]
    with jax.default_matmul_precision("highest"):
        state, _ = prefill(model.target, drafter, request)
        while not (done := np.asarray(state.progress.done)).all():
            starts = np.asarray(state.length)
            state, seen = trace_round(model.target, drafter, state, config=request.config)
            seen = seen if keep_logits else replace(seen, logits=None)
            seen = jax.device_get(replace(seen, draft_logits=None) if selects else seen)
            for row in np.flatnonzero(~done):
                one = jax.tree.map(lambda x, row=row: x[row], seen)
                rounds[row].append(_round_of(one, int(starts[row])))
    return rounds, state


def outputs(state: DecodeState) -> list[list[int]]:
    """Every row's new tokens."""
    tokens, produced = np.asarray(state.progress.tokens), np.asarray(state.progress.produced)
    return [row[:n].tolist() for row, n in zip(tokens, produced, strict=True)]


def _round_of(seen: Any, start: int) -> Round:
    """From one row's part of what a round saw: a RoundTrace of NumPy arrays."""
    tree, walk, real = seen.tree, seen.walk, seen.tree.valid
    return Round(
        *(x[real].tolist() for x in (tree.token, tree.parent, tree.depth)),
        path=walk.path[: walk.count].tolist(),
        draft_logits=seen.draft_logits,
        start=start,
        scores=tree.score[real],
        choices=walk.tokens[: walk.count].tolist(),
        logits=None if seen.logits is None else seen.logits[real],
    )
