"""Speculation never changes the text: tree, chain and plain decoding give the same tokens (cases.md B, C, D5).

Random pairs rarely agree at temperature 0. At a high temperature the noise decides for both, so coupled drafts are
accepted to every depth; that is why most runs here mix temperatures from 0 to 3.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode import runs
from decode.runs import BUDGET, HORIZON, PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import DENSE, DFLASH2, DRAFTER, HYBRID

from ddtree_jax.decode.loop import decode_rounds, module
from ddtree_jax.decode.round import decode_round, propose, tree_block
from ddtree_jax.decode.state import RoundConfig
from ddtree_jax.tree import DraftTree

CHAIN = RoundConfig(HORIZON, "chain", HORIZON)
TREE = RoundConfig(BUDGET, "best-first", HORIZON)
SPINE = RoundConfig(BUDGET, "spine", HORIZON)
COUPLED_CHAIN, COUPLED_TREE, COUPLED_SPINE = (dataclasses.replace(c, couple=True) for c in (CHAIN, TREE, SPINE))
CAPPED_TREE = dataclasses.replace(COUPLED_TREE, cap_block=True)

TEMPERATURES = (0.0, 0.4, 1.0, 3.0)
both = pytest.mark.parametrize(
    "config", [pytest.param(HYBRID, id="hybrid"), pytest.param(DENSE, id="dense", marks=pytest.mark.slow)]
)


def rows(values):
    return st.lists(values, min_size=3, max_size=3)


SAMPLING = st.fixed_dictionaries(
    dict(
        temperature=rows(st.sampled_from(TEMPERATURES)),
        top_k=rows(st.sampled_from((0, 0, 1, 2, 7, 50))),
        top_p=rows(st.sampled_from((1.0, 0.95, 0.5, 0.01))),
        min_p=rows(st.sampled_from((0.0, 0.02, 0.3, 1.0))),
        seed=rows(st.integers(0, 2**32 - 1)),
    )
)
LENGTHS, LIMITS, BUDGETS = rows(st.integers(1, 40)), rows(st.integers(1, 30)), rows(st.integers(0, BUDGET))


# ---- methods, trees, settings ----------------------------------------------------------------------------------------


def check_methods(config, round_configs, seed, lengths, limits, budgets, chosen, draft_config=DRAFTER):
    """All round configurations from the same prompts give plain decoding's tokens."""
    target, drafter = runs.target(seed % 3, config), runs.drafter(seed % 2, draft_config)
    prompts, sampling = runs.prompts(seed, lengths), runs.sampling(3, **chosen)
    state = runs.begin(target, drafter, prompts, sampling, limits=limits, budgets=budgets)
    plain = runs.plain_outputs(target, drafter, state)
    assert [len(row) for row in plain] == limits
    for round_config in round_configs:
        assert runs.outputs(runs.finish(target, drafter, runs.copy(state), round_config)) == plain, round_config


@settings(max_examples=12)
@given(st.integers(0, 1000), LENGTHS, LIMITS, BUDGETS, SAMPLING)
def test_every_method_gives_the_plain_tokens_of_a_hybrid(seed, lengths, limits, budgets, chosen):
    check_methods(HYBRID, (COUPLED_CHAIN, TREE, COUPLED_SPINE), seed, lengths, limits, budgets, chosen)


@settings(max_examples=12)
@given(st.integers(0, 1000), LENGTHS, LIMITS, BUDGETS, SAMPLING)
def test_every_method_gives_the_plain_tokens_of_a_dense_model(seed, lengths, limits, budgets, chosen):
    check_methods(DENSE, (CHAIN, COUPLED_TREE), seed, lengths, limits, budgets, chosen)


@settings(max_examples=8)
@given(st.integers(0, 1000), LENGTHS, LIMITS, BUDGETS, SAMPLING)
def test_every_method_gives_the_plain_tokens_with_a_selector(seed, lengths, limits, budgets, chosen):
    """DFlash2: the tree is grown from scores of neighbouring tokens."""
    check_methods(HYBRID, (CHAIN, COUPLED_SPINE), seed, lengths, limits, budgets, chosen, DFLASH2)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 1000), LENGTHS, LIMITS, BUDGETS, SAMPLING, st.sampled_from([HYBRID, DENSE]))
def test_every_method_gives_the_plain_tokens_many_times(seed, lengths, limits, budgets, chosen, config):
    every = (CHAIN, TREE, SPINE, COUPLED_CHAIN, COUPLED_TREE, COUPLED_SPINE, CAPPED_TREE)
    check_methods(config, every, seed, lengths, limits, budgets, chosen)


def test_paths_of_every_length_are_accepted_and_change_nothing():
    """The guard of this file: its runs do accept deep paths."""
    target, drafter = runs.target(), runs.drafter()
    sampling = runs.sampling(3, (1.0, 2.0, 3.0), seed=(5, 6, 7))
    state = runs.begin(target, drafter, runs.prompts(7, (3, 20, 11)), sampling)
    plain = runs.plain_outputs(target, drafter, state)
    report = runs.finish(target, drafter, state, COUPLED_SPINE)
    assert runs.outputs(report) == plain
    assert set(sum(runs.acceptance(report), [])) == set(range(1, HORIZON + 2))
    for row in runs.acceptance(report):
        assert sum(row) >= runs.MOST - 1 > sum(row[:-1])


@pytest.mark.parametrize("config", [DRAFTER, DFLASH2], ids=["dflash", "dflash2"])
def test_coupling_accepts_more(config):
    """At a high temperature a draft that sees the target's noise is right far more often than one that does not."""
    target, drafter = runs.target(), runs.drafter(1, config)
    state = runs.begin(target, drafter, runs.prompts(7, (3, 20, 11)), runs.sampling(3, 2.0, seed=(5, 6, 7)), limits=60)
    rounds = {c.couple: runs.finish(target, drafter, runs.copy(state), c).rounds for c in (SPINE, COUPLED_SPINE)}
    assert int(rounds[True].sum()) * 1.5 < int(rounds[False].sum())


# ---- rows, alternation, prompt lengths -------------------------------------------------------------------------------


def test_a_row_alone_is_the_row_in_a_batch():
    """Budgets 0, 3 and 7 side by side (B7); the seed belongs to the row, not to its place (D5)."""
    target, drafter = runs.target(1), runs.drafter()
    prompts, seeds, budgets, limits = runs.prompts(3, (1, 17, 40)), (8, 9, 8), (0, 3, 7), (30, 50, 40)
    temperatures = (1.0, 3.0, 0.0)
    sampling = runs.sampling(3, temperatures, top_k=9, seed=seeds)
    state = runs.begin(target, drafter, prompts, sampling, limits=limits, budgets=budgets)
    together = runs.finish(target, drafter, state, COUPLED_SPINE)
    for row in range(3):
        sampling = runs.sampling(1, temperatures[row], top_k=9, seed=seeds[row])
        state = runs.begin(target, drafter, [prompts[row]], sampling, limits=limits[row], budgets=budgets[row])
        alone = runs.finish(target, drafter, state, COUPLED_SPINE)
        assert runs.outputs(alone)[0] == runs.outputs(together)[row]
        assert runs.acceptance(alone)[0] == runs.acceptance(together)[row]
        assert int(alone.nodes[0]) == int(together.nodes[row])
    assert int(together.nodes[0]) == int(together.rounds[0]) == 29


@pytest.mark.parametrize("seed", [0, 1])
def test_tree_rounds_and_plain_rounds_alternate(seed):
    """Each dispatch is one round of a random kind with random budgets, 0 among them (B6)."""
    target, drafter = runs.target(), runs.drafter()
    prompts, sampling = runs.prompts(11 + seed, (6, 25, 2)), runs.sampling(3, (0.0, 1.0, 3.0), seed=seed)
    random = np.random.default_rng(seed)
    state = runs.begin(target, drafter, prompts, sampling, limits=64)
    plain = runs.plain_outputs(target, drafter, state)
    while not np.asarray(state.progress.done).all():
        budgets = random.integers(0, BUDGET + 1, 3) * random.integers(0, 2, 3)
        state = runs.with_progress(state, row_budget=jnp.asarray(budgets, jnp.int32))
        config = (PLAIN, COUPLED_SPINE, TREE)[random.integers(3)]
        state, report = decode_rounds(target, drafter, state, jnp.int32(1), config=config)
    assert runs.outputs(report) == plain
    text = [prompt + row for prompt, row in zip(prompts, plain, strict=True)]
    again = runs.begin(target, drafter, [row[:-1] for row in text], sampling)
    for row, tokens in enumerate(text):  # plain rounds keep the drafter's context too
        got, expected = (runs.kept_slots(s.draft_caches, row, len(tokens) - 1) for s in (state, again))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4)  # decoding against prefill, reference_models.md 3.4


def test_prompts_of_every_length_around_a_verify_step():
    """1 .. K+3 tokens for trees of K nodes: none is taken for a tree (B8)."""
    target, drafter = runs.target(2), runs.drafter()
    for first in range(1, BUDGET + 4, 3):
        prompts = runs.prompts(first, range(first, first + 3))
        sampling = runs.sampling(3, (3.0, 0.0, 1.0), seed=first)
        state = runs.begin(target, drafter, prompts, sampling, limits=12)
        plain = runs.plain_outputs(target, drafter, state)
        assert runs.outputs(runs.finish(target, drafter, state, COUPLED_SPINE)) == plain


# ---- the spine and its chain -----------------------------------------------------------------------------------------


def test_a_spine_without_branches_is_the_chain():
    """200 tokens in the same rounds (C3): a spine tree of budget L is the chain, whatever its packed size."""
    target, drafter = runs.target(), runs.drafter()
    sampling = runs.sampling(3, (0.0, 1.0, 3.0), seed=4)
    state = runs.begin(target, drafter, runs.prompts(4, (5, 9, 31)), sampling, budgets=HORIZON)
    chain = runs.finish(target, drafter, runs.copy(state), COUPLED_CHAIN)
    spine = runs.finish(target, drafter, state, COUPLED_SPINE)
    assert runs.outputs(spine) == runs.outputs(chain)
    assert runs.acceptance(spine) == runs.acceptance(chain)
    assert {len(row) for row in runs.outputs(spine)} == {200}
    assert max(runs.acceptance(chain)[2]) == HORIZON + 1


def test_a_spine_tree_accepts_at_least_its_chain():
    """In every round, from the same state (C4)."""
    target, drafter = runs.target(1), runs.drafter()
    state = runs.begin(target, drafter, runs.prompts(5, (5, 9, 31)), runs.sampling(3, (0.0, 1.0, 3.0), seed=2))
    gained = 0
    for number in range(40):
        _, chain = decode_rounds(target, drafter, runs.copy(state), jnp.int32(1), config=COUPLED_CHAIN)
        state, spine = decode_rounds(target, drafter, state, jnp.int32(1), config=COUPLED_SPINE)
        difference = np.asarray(spine.accepted[:, number] - chain.accepted[:, number])
        assert (difference >= 0).all()
        gained += difference.sum()
    assert gained > 10


# ---- the logits of nodes ---------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=["config"], donate_argnames=["state"])
def donated_round(target, drafter, state, config):
    """A round that gives away its state, as in the device loop, and still shows what it saw."""
    return decode_round(module(target), module(drafter), state, config)


@jax.jit
def plain_logits(target, ids):
    network = target.module()
    return network.logits(network(ids)[0])


@partial(jax.jit, static_argnames=["max_depth"])
def tree_logits(target, tree, state, max_depth):
    network = target.module()
    block = tree_block(tree, state.length, max_depth)
    return network.logits(network.verify(tree.token, state.caches, block)[0])


@cache
def some_rounds(config):
    """(state before, trace) of a few donated rounds of one run, and the texts of all its rows."""
    target, drafter, prompts = runs.target(0, config), runs.drafter(), runs.prompts(6, (2, 30, 13))
    state = runs.begin(target, drafter, prompts, runs.sampling(3, (0.0, 1.0, 3.0), seed=1), budgets=(12, 12, 9))
    rounds = []
    for _ in range(5):
        before = runs.copy(state)
        state, trace = donated_round(target, drafter, state, COUPLED_TREE)
        rounds.append((before, jax.tree.map(np.asarray, trace)))
    text = [p + np.asarray(t).tolist() for p, t in zip(prompts, state.progress.tokens, strict=True)]
    return rounds, text


@both
def test_a_nodes_logits_are_those_of_its_path(config):
    """C1, and C2: in a jitted function with donated buffers, over several rounds."""
    rounds, text = some_rounds(config)
    for before, trace in rounds:
        nodes = np.argwhere(trace.tree.valid)
        ids = np.zeros((39, 64), np.int32)
        ends = []
        for line, (row, node) in zip(ids, nodes, strict=False):
            path = [int(trace.tree.token[row, i]) for i in runs.path_to(trace.tree, row, node)]
            sequence = text[row][: int(before.length[row])] + path
            line[: len(sequence)] = sequence
            ends.append(len(sequence) - 1)
        assert len(nodes) == 13 + 13 + 10
        expected = np.asarray(plain_logits(runs.target(0, config), jnp.asarray(ids)))
        for line, (row, node) in enumerate(nodes):
            np.testing.assert_allclose(trace.logits[row, node], expected[line, ends[line]], atol=2e-4)
    assert max(int(trace.walk.count.max()) for _, trace in rounds) >= 3


def shuffled(random, parent):
    """A random order in which parents still come before their children; pads anywhere."""
    order = [0]
    while len(order) < len(parent):
        ready = [i for i in range(len(parent)) if i not in order and (parent[i] < 0 or parent[i] in order)]
        order.append(int(random.choice(ready)))
    return np.array(order)


@both
def test_the_order_of_siblings_changes_no_logits(config):
    """C5."""
    rounds, _ = some_rounds(config)
    random = np.random.default_rng(0)
    for before, trace in rounds[1:]:
        order = np.stack([shuffled(random, parent) for parent in trace.tree.parent])
        place = np.argsort(order, axis=1)
        moved = jax.tree.map(lambda x, order=order: np.take_along_axis(x, order, axis=1), trace.tree)
        parent = np.where(moved.parent < 0, -1, np.take_along_axis(place, np.maximum(moved.parent, 0), axis=1))
        tree = DraftTree(moved.token, parent.astype(np.int32), moved.depth, moved.score, moved.valid)
        logits = tree_logits(runs.target(0, config), jax.tree.map(jnp.asarray, tree), before, COUPLED_TREE.max_depth)
        expected = np.take_along_axis(trace.logits, order[..., None], axis=1)
        np.testing.assert_allclose(logits, expected, atol=5e-5)


# ---- the draft -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, HORIZON, 40])
def test_the_block_has_its_length_whatever_the_budget(budget):
    """C9: the horizon belongs to the drafter."""
    target, drafter = runs.target(), runs.drafter()
    state = runs.begin(target, drafter, runs.prompts(1, (3, 3, 3)), runs.sampling(3))
    config = RoundConfig(budget, "best-first", HORIZON)
    tree, logits = jax.eval_shape(lambda state: propose(module(target), module(drafter), state, config), state)
    assert logits.shape == (3, HORIZON, 13)
    assert tree.token.shape == (3, budget + 1)


def test_the_draft_depends_on_the_root():
    """C10: slot 0 holds the root, not a mask."""
    rounds, _ = some_rounds(HYBRID)
    before, trace = rounds[2]
    other = dataclasses.replace(runs.copy(before), root=(before.root + 1) % 13)
    _, changed = donated_round(runs.target(), runs.drafter(), other, COUPLED_TREE)
    difference = np.abs(np.asarray(changed.draft_logits) - trace.draft_logits).max(axis=(1, 2))
    assert (difference > 0.1).all()
