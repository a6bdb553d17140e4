"""The authors' own DDTree and DFlash runs on a trained Qwen3 pair, reproduced token by token and round by round.

They decoded eight prompts of 17 to 128 tokens one at a time; here all eight are one batch, so these are also tests that
rows do not see each other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import check_tree, read_arrays, read_prompts, rounds_needed

import ddtree_jax
from convert.replay import Round, replay
from ddtree_jax.decode.loop import prefill
from ddtree_jax.decode.state import DecodeState
from ddtree_jax.generation import Options, make_request
from ddtree_jax.models.network import Network
from ddtree_jax.tree import expand

NEW, BLOCK = 96, 8
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(golden):
    return golden("official_qwen3")


@pytest.fixture(scope="module")
def model(directory):
    return ddtree_jax.load(directory / "target", directory / "drafter", dtype="float32")


@pytest.fixture(scope="module")
def runs(directory):
    return read_prompts(directory)


@pytest.fixture(scope="module")
def arrays(directory):
    return read_arrays(directory / "arrays.npz")


def cut_slots(budget: int, start: int) -> int:
    """How many slots the authors' loop leaves a block that begins `start` tokens into the output.

    Their buffer ends 1 + budget tokens behind the text and a block ends with it. The last seven slots are read as
    drafts, so in a shorter block the root's own slot is one of them. That happens to budgets under 6 in the
    last few rounds.
    """
    return min(BLOCK, NEW + 1 + budget - start)


def starts(lengths: list[int]) -> list[int]:
    """How many output tokens were committed before each round."""
    return np.cumsum([0, *lengths])[:-1].tolist()


def recorded_run(run: dict, options: dict) -> tuple[list[int], list[int]]:
    """Prompt and output, and the acceptance lengths of the rounds it took, as far as blocks were whole."""
    if options["method"] == "ar":
        return run["ar"], [1] * (NEW - 1)
    if options["method"] == "dflash":
        return run["dflash"]["output"], rounds_needed(run["dflash"]["acceptance_lengths"], NEW)
    found, budget = run["ddtree"][str(options["tree_budget"])], options["tree_budget"]
    lengths = rounds_needed(found["acceptance_lengths"], NEW)
    return found["output"], lengths[: sum(cut_slots(budget, start) == BLOCK for start in starts(lengths))]


@pytest.mark.parametrize(
    "options",
    [
        dict(method="ar"),
        dict(method="ddtree", tree_budget=64),
        pytest.param(dict(method="dflash"), marks=slow),
        pytest.param(dict(method="ddtree", tree_budget=4), marks=slow),
        pytest.param(dict(method="ddtree", tree_budget=256), marks=slow),
    ],
    ids=["ar", "tree-64", "dflash", "tree-4", "tree-256"],
)
def test_generate(model, runs, options):
    results = ddtree_jax.generate(model, prompt_ids=[run["prompt"] for run in runs], max_new_tokens=NEW, **options)
    for number, (run, result) in enumerate(zip(runs, results, strict=True)):
        output, lengths = recorded_run(run, options)
        assert len(output) == len(run["prompt"]) + NEW
        assert result.output_ids == output, number
        assert result.acceptance_lengths[: len(lengths)] == lengths, number
        assert result.rounds == len(lengths) or options.get("tree_budget") == 4


@pytest.mark.parametrize("budget", [7, *(pytest.param(b, marks=slow) for b in (1, 4, 16, 32, 64, 256))])
def test_rounds(model, runs, arrays, budget):
    """Output, and every round's tree and accepted nodes; the drafter's logits where they were recorded."""
    options = dict(method="ddtree", tree_budget=budget)
    traces, state = replay(model, [run["prompt"] for run in runs], max_new_tokens=NEW, keep_logits=True, **options)
    exact = []
    for p, (run, rounds) in enumerate(zip(runs, traces, strict=True)):
        output, lengths = recorded_run(run, options)
        recorded = run["ddtree"][str(budget)]["rounds"]
        assert run["prompt"] + state.progress.tokens[p, :NEW].tolist() == output
        assert [len(one.path) for one in rounds[: len(lengths)]] == lengths
        assert len(rounds) == len(lengths) or budget < 6
        for r in range(len(lengths)):
            exact.append(check_round(rounds[r], recorded[r], arrays, f"p{p}_b{budget}_r{r}"))
    assert np.mean(exact) > 0.9  # of the trees, had no tie


def check_round(one: Round, recorded: dict, arrays: dict, name: str) -> bool:
    """One round of one prompt; returns whether the tree was comparable node by node."""
    if f"{name}_draft_logits" in arrays:
        np.testing.assert_allclose(one.draft_logits, arrays[f"{name}_draft_logits"], atol=1e-4, err_msg=name)
    tree = recorded["tree"]
    exact = check_tree(one, tree["node_token_ids"], tree["parents"][1:], tree["node_depths"], name)
    assert not exact or one.path == recorded["accepted_indices"], name
    return exact


@jax.jit(static_argnames="budget")
def tree_of_cut_block(target: Network, drafter: Network, state: DecodeState, slots, budget: int):
    """The tree from the first seven of `slots` slots, read from slot 0 on."""
    target, drafter = target.module(), drafter.module()
    ids = jnp.full((len(slots), BLOCK), drafter.config.mask_token_id).at[:, 0].set(state.root)
    hidden = drafter.draft(target.embed(ids), state.draft_caches, state.length, slots)
    return expand(target.logits(hidden[:, :-1]), state.root, budget=budget, row_horizon=jnp.minimum(slots, BLOCK - 1))


@slow
@pytest.mark.parametrize(("budget", "count"), [(1, 26), (4, 6)])
def test_blocks_cut_short(model, runs, budget, count):
    """The rounds left out above: from a block with fewer masks, read as the authors read it, comes their tree."""
    texts, slots, trees = [], [], []
    for run in runs:
        found = run["ddtree"][str(budget)]
        for r, start in enumerate(starts(found["acceptance_lengths"])):
            if cut_slots(budget, start) < BLOCK:
                texts.append(run["ar"][: len(run["prompt"]) + start])
                slots.append(cut_slots(budget, start))
                trees.append(found["rounds"][r]["tree"])
    assert len(texts) == count
    request = make_request(model, texts, Options(method="dflash", max_new_tokens=8))
    state, _ = prefill(model.target, model.drafter, request)
    drafted = tree_of_cut_block(model.target, model.drafter, state, jnp.array(slots), budget)
    for row, tree in enumerate(trees):
        assert drafted.token[row, 1:].tolist() == tree["node_token_ids"]
        assert drafted.parent[row].tolist() == tree["parents"]


@jax.jit
def forward(target: Network, ids):
    module = target.module()
    return module.logits(module(ids)[0])


def test_teacher_forced_logits(model, runs, arrays):
    """The first 48 positions of every text."""
    ids = jnp.array([run["ar"][:48] for run in runs], jnp.int32)
    logits = forward(model.target, ids)
    for p in range(len(runs)):
        np.testing.assert_allclose(logits[p], arrays[f"p{p}_logits"], atol=1e-4, err_msg=str(p))
