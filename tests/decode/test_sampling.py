"""Filters against their plain definitions, noise that belongs to a position, and the distribution of what is emitted
(cases.md D1, D2, D5).
"""

import dataclasses
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode import runs
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny import DENSE, DRAFTER, scaled

from ddtree_jax.config import AttentionConfig, BlockRule, RopeConfig
from ddtree_jax.decode import round as round_module
from ddtree_jax.decode.loop import module
from ddtree_jax.decode.round import chooser, decode_round
from ddtree_jax.decode.sampling import allowed, couple, gumbel, pick, smallest_kept, sortable
from ddtree_jax.decode.state import DecodeState, RoundConfig, empty_progress
from ddtree_jax.models import Drafter, Target
from ddtree_jax.tree import marginal_branches

ROWS, VOCAB = 8, 13
INF = np.float32(np.inf)

# ---- filters ---------------------------------------------------------------------------------------------------------

jitted_allowed, jitted_pick, jitted_couple = jax.jit(allowed), jax.jit(pick), jax.jit(couple)


def softmax(x):
    weight = np.exp(x - x.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def plain_allowed(logits, top_k, top_p, min_p):
    """Top-k, top-p, min-p of one row as Hugging Face's warpers define them, except that ties at a border all stay.

    Also returns how far top_p is from the nearest sum of probabilities.
    """
    keep = np.ones(len(logits), bool)
    if top_k:
        keep &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    p = softmax(np.where(keep, logits, -np.inf))
    order = np.argsort(-p, kind="stable")
    total = np.cumsum(p[order])
    if top_p < 1:
        keep &= p >= p[order[np.argmax(total >= top_p)]]
    p = softmax(np.where(keep, logits, -np.inf))
    return keep & (p >= np.float32(min_p) * p.max()), np.abs(total[:-1] - top_p).min()


@st.composite
def filter_cases(draw, values):
    logits = draw(hnp.arrays(np.float64, (ROWS, VOCAB), elements=values))
    rows = {"min_size": ROWS, "max_size": ROWS}
    return (
        logits,
        draw(st.lists(st.integers(0, VOCAB + 3), **rows)),
        draw(st.lists(st.floats(0.01, 1.0), **rows)),
        draw(st.lists(st.sampled_from((0.0, 0.01, 0.1, 0.5, 0.9)), **rows)),
    )


@settings(max_examples=150)
@given(st.one_of(filter_cases(st.floats(-8, 8)), filter_cases(st.integers(-2, 2).map(float))))
def test_filters_equal_their_definition(case):
    """On any logits, and on ones with many ties."""
    logits, top_k, top_p, min_p = case
    logits = logits.astype(np.float32) + np.float32(0.0)  # no -0.0
    got = jitted_allowed(jnp.asarray(logits), runs.sampling(ROWS, 1.0, top_k, top_p, min_p))
    for row in range(ROWS):
        expected, margin = plain_allowed(logits[row].astype(np.float64), top_k[row], np.float32(top_p[row]), min_p[row])
        if margin > 1e-6:  # else float32 and float64 may differ
            np.testing.assert_array_equal(got[row], expected, err_msg=f"row {row} of {case}")
        assert got[row][np.argmax(logits[row])]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (dict(), [0, 1, 2, 3, 4]),
        (dict(top_k=1), [1]),
        (dict(top_k=2), [0, 1, 4]),  # a tie for the second place
        (dict(top_k=99), [0, 1, 2, 3, 4]),
        (dict(top_p=0.39), [1]),
        (dict(top_p=0.41), [0, 1, 4]),
        (dict(top_p=0.81), [0, 1, 2, 4]),
        (dict(top_p=1e-6), [1]),
        (dict(min_p=0.49), [0, 1, 4]),
        (dict(min_p=0.51), [1]),
        (dict(min_p=1.0), [1]),
        (dict(top_k=2, top_p=0.51), [0, 1, 4]),
        (dict(top_k=1, top_p=0.99), [1]),  # of what top-k left, all the probability is in the first
        (dict(top_k=2, top_p=0.49), [1]),  # 0.4 of 0.8
    ],
)
def test_filters_by_eye(filters, kept):
    """Probabilities 0.2, 0.4, 0.15, 0.05, 0.2."""
    logits = np.log(np.array([[0.2, 0.4, 0.15, 0.05, 0.2]], np.float32))
    got = allowed(jnp.asarray(logits), runs.sampling(1, 1.0, **filters))
    assert np.flatnonzero(got[0]).tolist() == kept


def test_forbidden_tokens_stay_forbidden():
    """A token of logit -inf, whether the filters would have room for it or not."""
    logits = jnp.tile(jnp.array([[0.0, -INF, 1.0, -INF]]), (50, 1))
    for filters in (dict(top_k=3, top_p=0.999), dict()):
        chosen = pick(logits, runs.sampling(50, 1.0, **filters, seed=range(50)), position(50))
        assert set(chosen.tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("weight", "target", "threshold"),
    [
        ([1, 1, 1, 1], 1, 9),
        ([1, 1, 1, 1], 2, 7),
        ([1, 1, 1, 1], 3, 7),  # the two 7s come together
        ([1, 1, 1, 1], 4, 2),
        ([1, 1, 1, 1], 5, 0),  # no key has that much
        ([0.5, 0.0, 0.25, 0.25], 0.25, 7),  # 9 weighs nothing
        ([0.5, 0.0, 0.25, 0.25], 0.51, 2),
    ],
)
def test_smallest_kept(weight, target, threshold):
    order = jnp.array([[2, 9, 7, 7]], jnp.uint32)
    found = smallest_kept(order, jnp.array([weight], jnp.float32), jnp.array([target], jnp.float32))
    assert found.tolist() == [threshold]


def test_sortable_keys_keep_the_order():
    values = np.array([-INF, -3e38, -2.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 2.0, 3e38, INF], np.float32)
    keys = np.asarray(sortable(jnp.asarray(values[None])))[0]
    assert keys.dtype == np.uint32
    assert (np.diff(keys.astype(np.int64)) > 0).all()


# ---- temperature, noise ----------------------------------------------------------------------------------------------


def position(rows, value=5):
    return jnp.full(rows, value, jnp.int32)


def random_logits(seed, rows=ROWS):
    return jax.random.normal(jax.random.key(seed), (rows, VOCAB)) * 3


def test_rows_at_temperature_zero_are_greedy_among_others():
    logits = random_logits(0)
    temperature = np.array([0, 1, 0, 2, 0, 0.5, 0, 5])
    chosen = np.stack(
        [jitted_pick(logits, runs.sampling(ROWS, temperature, seed=s), position(ROWS)) for s in range(20)]
    )
    best = np.argmax(logits, axis=1)
    differs = (chosen != best).any(axis=0)
    assert differs.tolist() == (temperature > 0).tolist()
    static = dataclasses.replace(runs.sampling(ROWS), greedy=True, filtered=False)
    assert pick(logits, static, position(ROWS)).tolist() == best.tolist()


def test_ties_at_temperature_zero_go_to_the_lower_id():
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0]])
    for greedy in (True, False):
        sampling = dataclasses.replace(runs.sampling(1), greedy=greedy, filtered=not greedy)
        assert pick(logits, sampling, position(1)).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-37, 2e-38])
def test_a_tiny_temperature_is_greedy(temperature):
    """logits / T must not overflow into a tie."""
    logits = 4 * random_logits(1)
    chosen = jitted_pick(logits, runs.sampling(ROWS, temperature, seed=range(ROWS)), position(ROWS))
    assert chosen.tolist() == np.argmax(logits, axis=1).tolist()
    steps = jitted_couple(logits[:, None], runs.sampling(ROWS, temperature, seed=range(ROWS)), position(ROWS))
    assert np.argmax(steps[:, 0], axis=1).tolist() == np.argmax(logits, axis=1).tolist()


def test_filters_that_nobody_uses_change_nothing():
    logits, sampling = random_logits(2), runs.sampling(ROWS, 1.0, seed=range(ROWS))
    without = dataclasses.replace(sampling, filtered=False)
    assert pick(logits, sampling, position(ROWS)).tolist() == pick(logits, without, position(ROWS)).tolist()


def test_noise_belongs_to_seed_and_position():
    keys = runs.sampling(4, seed=(0, 0, 1, 2**32 - 1)).key
    noise = np.asarray(gumbel(keys, jnp.array([7, 7, 7, 7]), 50))
    np.testing.assert_array_equal(noise[0], noise[1])
    assert len({row.tobytes() for row in noise}) == 3
    places = np.asarray(gumbel(keys[jnp.array([0, 0, 0])], jnp.array([7, 8, 0]), 50))
    np.testing.assert_array_equal(places[0], noise[0])
    assert len({row.tobytes() for row in places}) == 3


def test_noise_has_its_distribution():
    """Gumbel: mean 0.5772, variance pi^2 / 6."""
    noise = np.asarray(gumbel(runs.sampling(400, seed=range(400)).key, position(400), 500))
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02


def test_all_nodes_of_a_depth_see_the_same_noise():
    """Six nodes with the same logits: at one depth all choose alike, at another depth something else."""
    logits = jnp.tile(random_logits(3, 1), (ROWS, 6, 1)) / 10
    choose = chooser(logits, runs.sampling(ROWS, 1.0, seed=range(ROWS)), jnp.arange(ROWS))
    chosen = np.array([[choose(jnp.full(ROWS, node), jnp.int32(depth)) for node in range(6)] for depth in range(3)])
    assert (chosen == chosen[:, :1]).all()
    assert (chosen[0] != chosen[1]).any() and (chosen[1] != chosen[2]).any()


def test_the_walk_and_the_first_token_share_positions():
    """After a node of depth d the choice is for position length + d + 1, as `pick` makes it."""
    logits = random_logits(4)[:, None]
    sampling, length = runs.sampling(ROWS, 1.0, seed=range(ROWS)), jnp.arange(ROWS)
    choose = chooser(logits, sampling, length)
    for depth in (0, 3):
        got = choose(jnp.zeros(ROWS, jnp.int32), jnp.int32(depth))
        assert got.tolist() == pick(logits[:, 0], sampling, length + depth + 1).tolist()


def test_coupled_scores_see_the_noise_of_the_target():
    """A drafter with the target's own logits then has the target's choices on top, at every depth."""
    logits = jnp.stack([random_logits(seed) for seed in range(5)], axis=1)
    temperature = (0, 1, 1, 2, 0.5, 3, 0, 1)
    sampling, length = runs.sampling(ROWS, temperature, seed=range(ROWS)), jnp.arange(ROWS)
    best = np.argmax(jitted_couple(logits, sampling, length), axis=2)
    for depth in range(5):
        assert best[:, depth].tolist() == jitted_pick(logits[:, depth], sampling, length + depth + 1).tolist()
    assert (best != np.argmax(logits, axis=2)).any()


# ---- distributions ---------------------------------------------------------------------------------------------------


def check_chi_square(counts, probability):
    """Pearson's test against exact probabilities; places that expect fewer than 8 are counted together."""
    expected = probability * counts.sum()
    rare = expected < 8
    assert counts[probability == 0].sum() == 0
    pooled = lambda x: np.append(x[~rare], x[rare].sum())  # noqa: E731
    observed, expected = pooled(counts), np.maximum(pooled(expected), 1e-9)
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    # Wilson and Hilferty's normal approximation; 4.5 is a chance of 3 in a million.
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert z < 4.5, f"chi-square {statistic:.1f} with {degrees} degrees of freedom"


@pytest.mark.parametrize(
    "chosen", [dict(temperature=1.0), dict(temperature=0.7, top_k=6), dict(temperature=2.0, top_p=0.8, min_p=0.05)]
)
def test_picks_follow_the_filtered_distribution(chosen):
    """20,000 seeds."""
    logits = random_logits(5, 1) / 2
    scaled = np.asarray(logits[0], np.float64) / chosen["temperature"]
    keep, _ = plain_allowed(scaled, chosen.get("top_k", 0), chosen.get("top_p", 1.0), chosen.get("min_p", 0.0))
    sampling = runs.sampling(1, **chosen)
    keys = jax.random.split(jax.random.key(6), 20_000)
    draw = jax.jit(jax.vmap(lambda key: pick(logits, dataclasses.replace(sampling, key=key[None]), position(1))[0]))
    counts = np.bincount(draw(keys), minlength=VOCAB)
    check_chi_square(counts, softmax(np.where(keep, scaled, -np.inf)))


# The whole loop: a model of one layer with 8 tokens, rounds of the real code under vmap, a row a run.

SMALL = dataclasses.replace(
    DENSE,
    vocab_size=8,
    hidden_size=16,
    intermediate_size=16,
    layer_types=DENSE.layer_types[:2],
    attention=AttentionConfig(2, 1, 8, RopeConfig(1e4, 8), False),
    tie_word_embeddings=False,
)
SMALL_DRAFTER = dataclasses.replace(
    DRAFTER,
    vocab_size=8,
    hidden_size=16,
    intermediate_size=16,
    attention=SMALL.attention,
    rules=(BlockRule.BIDIRECTIONAL,),
    windows=(None,),
    block_size=4,
    mask_token_id=7,
    target_layer_ids=(0,),
)
PROMPT, TEMPERATURE, RUNS = [3, 1, 4], 0.8, 20_000
SMALL_TREE = RoundConfig(16, "best-first", 3)


@cache
def small_pair():
    target = scaled(Target(SMALL, rngs=nnx.Rngs(0)), 12.0)
    return target, scaled(Drafter(SMALL_DRAFTER, rngs=nnx.Rngs(1)), 12.0)


@cache
def exact_distribution():
    """Probability of every three first tokens, [8, 8, 8], from plain forward passes."""
    network = small_pair()[0].module()
    prefixes = np.array(PROMPT + [0, 0]) * np.ones((64, 1), np.int32)
    prefixes[:, 3:] = np.stack(np.divmod(np.arange(64), 8), axis=1)
    logits = jax.jit(lambda ids: network.logits(network(ids)[0]))(jnp.asarray(prefixes, jnp.int32))
    p = softmax(np.asarray(logits, np.float64) / TEMPERATURE).reshape(8, 8, 5, 8)
    return p[0, 0, 2][:, None, None] * p[:, 0, 3][:, :, None] * p[:, :, 4]


def first_tokens(pair, key, budget, table):
    """The first three tokens of one run with a tree of `budget` nodes; drafts come from `table` [1, L, V] if given."""
    target, drafter = map(module, pair)
    state = DecodeState(
        target.init_caches(1, 16),
        drafter.init_caches(1, 16),
        jnp.zeros(1, jnp.int32),
        jnp.zeros(1, jnp.int32),
        empty_progress(jnp.array([8]), budget[None], jnp.array([-1]), 8),
        dataclasses.replace(runs.sampling(1, TEMPERATURE), key=key[None], filtered=False),
    )
    state = prefilled(target, drafter, state)
    with mock.patch.object(round_module, "marginal_branches", with_table(table)):
        for _ in range(2):
            state, _ = decode_round(target, drafter, state, SMALL_TREE)
    return state.progress.tokens[0, :3]


def prefilled(target, drafter, state):
    """The state after PROMPT and the first token, as `loop.prefill` makes it."""
    ids, count = jnp.array([PROMPT]), jnp.array([len(PROMPT)])
    hidden, features, made = target.sequence(ids, state.caches, state.length, count, drafter.config.target_layer_ids)
    token = pick(target.logits(hidden[:, -1]), state.sampling, count)
    tokens = state.progress.tokens.at[:, 0].set(token)
    return dataclasses.replace(
        state,
        caches=target.extend(state.caches, made, state.length),
        draft_caches=round_module.extend_context(drafter, state.draft_caches, features, state.length),
        length=count,
        root=token,
        progress=dataclasses.replace(state.progress, tokens=tokens, produced=jnp.ones(1, jnp.int32)),
    )


def with_table(table):
    """`marginal_branches` of fixed draft logits."""
    return marginal_branches if table is None else lambda _, ranks: marginal_branches(table, ranks)


@jax.jit
def run_many(pair, keys, budget, table):
    return jax.lax.map(lambda key: first_tokens(pair, key, budget, table), keys, batch_size=2000)


def count_first_tokens(budget, table=None):
    """How often every three tokens came out, [512]."""
    keys = jax.random.split(jax.random.key(10 + budget), RUNS)
    tokens = np.asarray(run_many(small_pair(), keys, jnp.int32(budget), table))
    return np.bincount(tokens @ np.array([64, 8, 1]), minlength=512)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 1, 4, 16])
def test_emitted_tokens_follow_the_target(budget):
    """Chi-square of the first three tokens over 20,000 runs (D1)."""
    check_chi_square(count_first_tokens(budget), exact_distribution().ravel())


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 4, 16])
def test_a_wrong_draft_does_not_bend_the_distribution(budget):
    """A draft that puts the least likely token first and is sure of it (D2)."""
    first = exact_distribution().sum(axis=(1, 2))
    table = np.log(first)
    table[np.argmin(first)] = 3.0
    table = jnp.asarray(np.tile(table, (1, 3, 1)), jnp.float32)
    check_chi_square(count_first_tokens(budget, table), exact_distribution().ravel())
