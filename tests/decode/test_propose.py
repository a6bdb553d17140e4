"""What a round drafts from: the drafter's own embedding, and the scores a tree is grown from."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode import runs
from decode.runs import HORIZON
from tiny import DFLASH2, DRAFTER

from ddtree_jax.decode import round as round_module
from ddtree_jax.decode.sampling import couple
from ddtree_jax.decode.state import RoundConfig

TREE = RoundConfig(12, "best-first", HORIZON)
TEMPERATURES = (0.0, 0.5, 2.0)


@pytest.mark.parametrize("coupled", [False, True])
def test_pair_scores_are_divided_by_the_temperature_only_where_logits_are(coupled):
    """Coupled, a row's logits are logits / T + noise, so its pair scores count 1 / T too; otherwise both are plain."""
    drafter = runs.drafter(1, DFLASH2).module()
    state = runs.begin(runs.target(), None, runs.prompts(1, (3, 5, 7)), runs.sampling(3, TEMPERATURES, seed=(1, 2, 3)))
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, HORIZON, 13)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(3, HORIZON, 48)), jnp.float32)
    ours = round_module.branches(drafter, logits, hidden, state, dataclasses.replace(TREE, couple=coupled))
    scores = couple(logits, state.sampling, state.length) if coupled else logits
    scale = jnp.array([1.0, 2.0, 0.5] if coupled else [1.0] * 3)
    expected = drafter.candidate_selector(scores, hidden, state.root, scale)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    others = drafter.candidate_selector(scores, hidden, state.root, jnp.full(3, 3.0))
    assert np.abs(np.asarray(ours.logp) - np.asarray(others.logp)).max() > 0.1  # the scale matters here


def test_a_block_is_embedded_by_the_drafters_own_table():
    """Where it has one: with another table, another draft; the target's does not matter."""
    config = dataclasses.replace(DRAFTER, own_embedding=True)
    drafter, target = runs.drafter(1, config), runs.target()
    state = runs.begin(target, None, runs.prompts(1, (3, 5, 7)), runs.sampling(3))
    caches = drafter.module().init_caches(3, 64)
    state = dataclasses.replace(state, draft_caches=caches, length=jnp.zeros(3, jnp.int32))

    @jax.jit
    def drafted(target, drafter):
        return round_module.propose(target.module(), drafter.module(), state, TREE)[1]

    ours = drafted(target, drafter)
    with mock.patch.object(type(target.module()), "embed", side_effect=AssertionError("the target's table is used")):
        jax.clear_caches()
        np.testing.assert_allclose(drafted(target, drafter), ours, atol=1e-5)
    changed = runs.with_leaves(drafter, "embed_tokens", lambda table: -table)
    assert np.abs(np.asarray(drafted(target, changed)) - np.asarray(ours)).max() > 0.1
