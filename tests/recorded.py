"""Recorded truth: reading it, and comparing rounds with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from convert.replay import Round
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
