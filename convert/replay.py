"""Decoding round by round, with everything each round saw: for comparisons with recorded rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ddtree_jax.decode.loop import prefill, trace_round
from ddtree_jax.generation import Options, make_request
from ddtree_jax.loading import Model
from ddtree_jax.tree import DraftTree, Walk


@dataclass(frozen=True)
class Round:
    """One row's tree (root first, pads left out) and walk in one round.

    path: accepted nodes, the root's 0 first. draft_logits [L, V]: what the tree was built from.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    path: list[int]
    draft_logits: np.ndarray


def replay(model: Model, prompts: list[list[int]], **options: Any) -> tuple[list[list[Round]], list[list[int]]]:
    """Decode greedily with a drafter and the options of `generate`, one dispatch a round.

    Returns every prompt's rounds, and its output without the prompt.
    """
    request = make_request(model, prompts, Options(**options))
    rounds: list[list[Round]] = [[] for _ in prompts]
    with jax.default_matmul_precision("highest"):
        state, _ = prefill(model.target, model.drafter, request)
        while not (done := np.asarray(state.progress.done)).all():
            state, seen = trace_round(model.target, model.drafter, state, config=request.config)
            # of a large vocabulary the nodes' logits would be most of what is copied, and nothing here reads them
            parts = jax.device_get((seen.tree, seen.walk, seen.draft_logits))
            for row in np.flatnonzero(~done):
                rounds[row].append(_round_of(*jax.tree.map(lambda x, row=row: x[row], parts)))
    tokens, produced = np.asarray(state.progress.tokens), np.asarray(state.progress.produced)
    return rounds, [row[:n].tolist() for row, n in zip(tokens, produced, strict=True)]


def _round_of(tree: DraftTree, walk: Walk, draft_logits: np.ndarray) -> Round:
    """From one row's part of what a round saw."""
    nodes = (x[tree.valid].tolist() for x in (tree.token, tree.parent, tree.depth))
    return Round(*nodes, path=walk.path[: walk.count].tolist(), draft_logits=draft_logits)
