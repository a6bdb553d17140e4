"""Recorded runs on a trained Qwen3.5 hybrid pair, reproduced token by token, round by round and node by node.

The recording followed the rules of the authors' code, with the target's choices read from uncached forwards; here six
prompts of 1 to 130 tokens are one batch.
"""

from __future__ import annotations

import numpy as np
import pytest
from recorded import check_tree, read_arrays, read_prompts, rounds_needed

import ddtree_jax
from convert.replay import Round, replay

NEW = 64
ATOL = 5e-4
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(golden):
    return golden("official_style_hybrid")


@pytest.fixture(scope="module")
def model(directory):
    return ddtree_jax.load(directory / "target", directory / "drafter", dtype="float32")


@pytest.fixture(scope="module")
def runs(directory):
    return read_prompts(directory)


@pytest.fixture(scope="module")
def arrays(directory):
    return read_arrays(directory / "arrays.npz")


def recorded_lengths(run: dict, options: dict) -> list[int]:
    """Acceptance lengths of the rounds that the output took."""
    if options["method"] == "ar":
        return [1] * (NEW - 1)
    found = run["dflash"] if options["method"] == "dflash" else run["ddtree"][str(options["tree_budget"])]
    return rounds_needed(found["acceptance_lengths"], NEW)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(method="ar"), marks=slow),
        pytest.param(dict(method="dflash"), marks=slow),
        dict(method="ddtree", tree_budget=16),
        pytest.param(dict(method="ddtree", tree_budget=4), marks=slow),
    ],
    ids=["ar", "dflash", "tree-16", "tree-4"],
)
def test_generate(model, runs, options):
    results = ddtree_jax.generate(model, prompt_ids=[run["prompt"] for run in runs], max_new_tokens=NEW, **options)
    for number, (run, result) in enumerate(zip(runs, results, strict=True)):
        assert len(run["autoregressive"]) == len(run["prompt"]) + NEW
        assert result.output_ids == run["autoregressive"], number
        assert result.acceptance_lengths == recorded_lengths(run, options), number


@pytest.mark.parametrize("budget", [16, *(pytest.param(b, marks=slow) for b in (1, 4, 7, 32))])
def test_rounds(model, runs, arrays, budget):
    """Output and every round; all logits where they were recorded."""
    prompts = [run["prompt"] for run in runs]
    traces, state = replay(model, prompts, keep_logits=True, method="ddtree", tree_budget=budget, max_new_tokens=NEW)
    exact = []
    for p, (run, rounds) in enumerate(zip(runs, traces, strict=True)):
        found = run["ddtree"][str(budget)]
        assert run["prompt"] + state.progress.tokens[p, :NEW].tolist() == run["autoregressive"]
        assert [len(one.path) for one in rounds] == rounds_needed(found["acceptance_lengths"], NEW)
        for r, one in enumerate(rounds):
            exact.append(check_round(one, found["rounds"][r], arrays, f"p{p}_b{budget}_r{r}"))
    assert np.mean(exact) > 0.9  # of the trees, had no tie


def check_round(one: Round, recorded: dict, arrays: dict, name: str) -> bool:
    """Start, root, tree, scores, accepted nodes, next token; returns whether the tree was comparable node by node."""
    ends = one.start, int(one.tokens[0]), int(one.choices[-1])
    assert ends == (recorded["start"], recorded["root"], recorded["next"]), name
    np.testing.assert_allclose(np.sort(one.scores[1:]), np.sort(recorded["logw"]), atol=ATOL, err_msg=name)
    exact = check_tree(one, recorded["tokens"], recorded["parents"], recorded["depths"], name)
    assert not exact or one.path == recorded["accepted"], name
    if f"{name}_node_logits" in arrays:
        assert exact, name
        np.testing.assert_allclose(one.logits, arrays[f"{name}_node_logits"], atol=ATOL, err_msg=name)
        np.testing.assert_allclose(one.draft_logits, arrays[f"{name}_draft_logits"], atol=ATOL, err_msg=name)
    return exact
