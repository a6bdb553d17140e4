"""Trees that the authors' own code built from recorded drafter logits (shared golden/README.md) are built again.

A few of them are in tests/data/official_trees.npz, so the test runs without the shared material.
"""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.tree import expand

BUILD = jax.jit(expand, static_argnames="budget")
FIXTURE = Path(__file__).parents[1] / "data" / "official_trees.npz"


class Recorded(NamedTuple):
    """One recorded tree. Nodes without the root; parents count the root as 0, so node j of the lists is j + 1."""

    name: str
    logits: np.ndarray
    root: int
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    logw: list[float] | None


def from_fixture() -> list[Recorded]:
    with np.load(FIXTURE) as file:
        arrays = dict(file)
    names = [key.removesuffix("_logits") for key in arrays if key.endswith("_logits")]
    return [Recorded(name, *(arrays.get(f"{name}_{field}") for field in Recorded._fields[1:])) for name in names]


def draft_logits(directory: Path):
    """(prompt, budget, round, logits) of everything recorded in a directory."""
    with np.load(directory / "arrays.npz") as arrays:
        for key in arrays.files:
            if key.endswith("_draft_logits"):
                prompt, budget, number = (int(part[1:]) for part in key.split("_")[:3])
                yield prompt, budget, number, arrays[key]


def from_official(directory: Path) -> list[Recorded]:
    prompts = json.loads((directory / "runs.json").read_text())["prompts"]
    found = []
    for prompt, budget, number, logits in draft_logits(directory):
        run = prompts[prompt]["ddtree"][str(budget)]
        tree = run["rounds"][number]["tree"]
        root = run["output"][len(prompts[prompt]["prompt"]) + sum(run["acceptance_lengths"][:number])]
        nodes = tree["node_token_ids"], tree["parents"][1:], tree["node_depths"]
        found.append(Recorded(f"qwen3 p{prompt} b{budget} r{number}", logits, root, *nodes, None))
    return found


def from_hybrid(directory: Path) -> list[Recorded]:
    prompts = json.loads((directory / "runs.json").read_text())["prompts"]
    found = []
    for prompt, budget, number, logits in draft_logits(directory):
        tree = prompts[prompt]["ddtree"][str(budget)]["rounds"][number]
        nodes = (tree[key] for key in ("root", "tokens", "parents", "depths", "logw"))
        found.append(Recorded(f"hybrid p{prompt} b{budget} r{number}", logits, *nodes))
    return found


def check(recorded: list[Recorded]) -> None:
    """Rebuilds every tree: tokens, parents and depths exactly, in order."""
    for one in recorded:
        root = jnp.array([int(one.root)], jnp.int32)
        tree = BUILD(jnp.asarray(one.logits)[None], root, budget=len(one.tokens))
        assert tree.valid.all(), one.name
        np.testing.assert_array_equal(tree.token[0], [one.root, *one.tokens], err_msg=one.name)
        np.testing.assert_array_equal(tree.parent[0], [-1, *one.parents], err_msg=one.name)
        np.testing.assert_array_equal(tree.depth[0], [0, *one.depths], err_msg=one.name)
        if one.logw is not None:
            np.testing.assert_allclose(tree.score[0], [0.0, *one.logw], atol=1e-4, err_msg=one.name)


def test_committed_trees():
    recorded = from_fixture()
    assert len(recorded) == 9 and {len(one.tokens) for one in recorded} == {16, 64}
    check(recorded)


@pytest.mark.parametrize(
    ("directory", "read", "count"),
    [("official_qwen3", from_official, 24), ("official_style_hybrid", from_hybrid, 9)],
    ids=["qwen3", "hybrid"],
)
def test_all_recorded_trees(shared, directory, read, count):
    recorded = read(shared / "golden" / directory)
    assert len(recorded) == count
    check(recorded)
