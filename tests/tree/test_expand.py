"""The builder against the reference's heap (algorithm.md section 5), and the properties that follow from its order."""

import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.tree import expand, marginals

ROWS = 4
FIELDS = ("token", "parent", "depth", "score", "valid")


# ---- the oracle: plain Python, one row, rank paths ----------------------------------------------------------------


def heap_paths(logp, budget, *, seed=(), number=np.float32):
    """(rank path, score) of the best `budget` prefixes as the reference's heap pops them, `seed` taken first.

    The heap's key is (-log-probability, rank path). Scores accumulate along the path in the precision `number`.
    """
    table = [[number(value) for value in position] for position in logp]
    found, heap = [], []

    def offer(path, above):
        """Puts a path on the heap; `above` is its parent's score."""
        if path[-1] < len(table[0]) and len(path) <= len(table):
            score = above + table[len(path) - 1][path[-1]]
            if score > -math.inf:
                heapq.heappush(heap, (-score, path, above))

    def take(path, score, above):
        found.append((path, score))
        offer((*path[:-1], path[-1] + 1), above)
        offer((*path, 0), score)

    offer((0,), number(0))
    for path in seed:  # the top-1 chain, whose next node is always on the heap
        entry = next(entry for entry in heap if entry[1] == path)
        heap.remove(entry)
        heapq.heapify(heap)
        take(path, -entry[0], entry[2])
    while heap and len(found) < budget:
        score, path, above = heapq.heappop(heap)
        take(path, -score, above)
    return found


def chain_paths(logp, budget):
    alive = np.cumprod(logp[:, 0] > -math.inf).sum()
    return [(0,) * depth for depth in range(1, min(budget, alive) + 1)]


def oracle(logp, budget, kind, number=np.float32):
    seed = chain_paths(logp, budget) if kind == "spine" else ()
    return heap_paths(logp, budget, seed=seed, number=number)


# ---- reading a built tree -----------------------------------------------------------------------------------------


def row_of(tree, row):
    return {name: np.asarray(getattr(tree, name)[row]) for name in FIELDS}


def paths_of(tree, token):
    """Rank paths of the nodes of a row, the root's empty one first; fails where a node hangs on no earlier node."""
    rank = [{int(token): rank for rank, token in enumerate(position)} for position in token]
    paths = [()]
    nodes = zip(*(tree[name][tree["valid"]].tolist() for name in ("token", "parent", "depth")), strict=True)
    for node, (token, parent, depth) in enumerate(nodes):
        if node > 0:
            assert 0 <= parent < node and depth == len(paths[parent]) + 1
            paths.append((*paths[parent], rank[depth - 1][token]))
    return paths


def assert_well_formed(tree, paths, root):
    """Ancestor-closed by `paths_of`; here: root, pads, siblings by rank, no node twice."""
    count = len(paths)
    assert (tree["token"][0], tree["parent"][0], tree["depth"][0], tree["score"][0]) == (root, -1, 0, 0.0)
    assert tree["valid"][:count].all() and not tree["valid"][count:].any()
    for name, pad in (("token", 0), ("parent", -1), ("depth", 0), ("score", -np.inf)):
        assert (tree[name][count:] == pad).all(), name
    place = {path: node for node, path in enumerate(paths)}
    assert len(place) == count
    for path in paths[1:]:
        assert path[-1] == 0 or place[(*path[:-1], path[-1] - 1)] < place[path]


def assert_same_tree(tree, paths, expected, kind, budget, logp, ties_decided):
    """Equal scores always; equal nodes in equal order, but for ties with the last one that rounding made."""
    scores = tree["score"][1 : len(paths)]
    np.testing.assert_array_equal(scores, np.array([score for _, score in expected], np.float32))
    last = -math.inf if ties_decided or not expected else expected[-1][1]
    chain = set(chain_paths(logp, budget)) if kind == "spine" else set()
    decided = sum(score > last or path in chain for path, score in expected)
    assert paths[1 : 1 + decided] == [path for path, _ in expected[:decided]]
    rest = list(zip(-scores[decided:], paths[1 + decided :], strict=True))
    assert rest == sorted(rest)


# ---- random marginals ---------------------------------------------------------------------------------------------


def draw_logits(style, seed, rows, depths, vocabulary):
    """Random logits. "certain" makes log-probabilities exact multiples of 1/8, so that every tie is a real one."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.1, 1.0, 3.0, 8.0], size=(rows, depths, 1))
    logits = rng.normal(size=(rows, depths, vocabulary)) * scale
    if style == "bf16":
        return np.asarray(jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32))
    if style == "eighths":
        logits = np.round(logits * 8) / 8
    if style == "flat":
        logits = np.zeros_like(logits)
    if style == "holes":
        logits[rng.random(logits.shape) < 0.4] = -np.inf
    if style == "certain":
        # One token has all the mass that fp32 can see: its log-probability is 0, the others keep their logits.
        logits = -24 - np.abs(np.round(logits * 8) / 8)
        np.put_along_axis(logits, rng.integers(vocabulary, size=(rows, depths, 1)), 0.0, axis=2)
    return logits.astype(np.float32)


STYLES = ("smooth", "bf16", "eighths", "flat", "holes", "certain")
ROOTS = jnp.arange(ROWS, dtype=jnp.int32) + 100


@functools.cache
def builder(budget, kind):
    return jax.jit(functools.partial(expand, budget=budget, kind=kind))


@functools.cache
def built(budget, kind, top_k=None):
    """Tree and marginals from one program, so that both see the same log-probabilities to the last bit."""

    def run(logits):
        ranks = min(top_k or budget, logits.shape[2])
        return expand(logits, ROOTS, budget=budget, kind=kind, top_k=top_k), marginals(logits, ranks)

    return jax.jit(run)


def check_against_heap(logits, budget, kind, style, top_k=None):
    tree, (logp, token) = built(budget, kind, top_k)(jnp.asarray(logits))
    for row in range(ROWS):
        one, table = row_of(tree, row), np.asarray(logp[row])
        paths = paths_of(one, np.asarray(token[row]))
        expected = oracle(table, budget, kind)
        assert len(paths) == 1 + len(expected)
        assert_well_formed(one, paths, 100 + row)
        assert_same_tree(one, paths, expected, kind, budget, table, ties_decided=style in ("certain", "flat"))
        exact = sorted(score for _, score in oracle(table, budget, kind, number=np.float64))
        np.testing.assert_allclose(np.sort(one["score"][1 : len(paths)]), exact, rtol=1e-5, atol=1e-5)


SHAPES = [(7, 256, 1), (1, 3, 2), (3, 3, 50), (7, 256, 4), (7, 256, 16), (15, 300, 64), (4, 30, 300)]


@pytest.mark.parametrize("kind", ["best-first", "spine"])
@pytest.mark.parametrize(("depths", "vocabulary", "budget"), SHAPES)
def test_the_tree_is_the_heaps(depths, vocabulary, budget, kind):
    @settings(max_examples=12)
    @given(st.sampled_from(STYLES), st.integers(0, 2**32 - 1))
    def check(style, seed):
        check_against_heap(draw_logits(style, seed, ROWS, depths, vocabulary), budget, kind, style)

    check()


@pytest.mark.parametrize("kind", ["best-first", "spine"])
@pytest.mark.parametrize("style", STYLES)
def test_the_tree_is_the_heaps_at_the_largest_budget(style, kind):
    check_against_heap(draw_logits(style, 5, ROWS, 15, 300), 1024, kind, style)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.integers(1, 15),
    st.integers(3, 300),
    st.integers(1, 1024),
    st.sampled_from(["best-first", "spine"]),
    st.sampled_from(STYLES),
    st.integers(0, 2**32 - 1),
)
def test_the_tree_is_the_heaps_for_any_shape(depths, vocabulary, budget, kind, style, seed):
    check_against_heap(draw_logits(style, seed, ROWS, depths, vocabulary), budget, kind, style)


def test_top_k_limits_the_tokens_of_a_position():
    for style in STYLES:
        check_against_heap(draw_logits(style, 11, ROWS, 7, 256), 16, "best-first", style, top_k=2)


# ---- what the order promises --------------------------------------------------------------------------------------


def assert_prefix(small, large, budget):
    for name in FIELDS:
        np.testing.assert_allclose(getattr(small, name), getattr(large, name)[:, : 1 + budget], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["best-first", "spine"])
@pytest.mark.parametrize("budget", [3, 16])
def test_every_prefix_is_the_tree_of_the_smaller_budget(budget, kind):
    for style in ("smooth", "flat", "holes", "certain"):
        logits = jnp.asarray(draw_logits(style, 3, ROWS, 7, 256))
        assert_prefix(builder(budget, kind)(logits, ROOTS), builder(64, kind)(logits, ROOTS), budget)


@pytest.mark.parametrize("kind", ["best-first", "star"])
def test_row_budget_cuts_each_row_for_itself(kind):
    logits = jnp.asarray(draw_logits("smooth", 4, ROWS, 7, 256))
    allowed = [0, 3, 20, 99]
    cut = builder(20, kind)(logits, ROOTS, row_budget=jnp.array(allowed))
    full = builder(20, kind)(logits, ROOTS)
    for row, count in enumerate(allowed):
        one, whole = row_of(cut, row), row_of(full, row)
        assert one["valid"].sum() == 1 + min(count, 20)
        for name, pad in (("token", 0), ("parent", -1), ("depth", 0), ("score", -np.inf), ("valid", False)):
            np.testing.assert_allclose(one[name][: 1 + count], whole[name][: 1 + count], rtol=1e-6, err_msg=name)
            assert (one[name][1 + count :] == pad).all()


@pytest.mark.parametrize("kind", ["best-first", "spine", "chain"])
def test_row_horizon_is_the_tree_of_fewer_positions(kind):
    logits = jnp.asarray(draw_logits("smooth", 6, ROWS, 7, 256))
    horizon = [0, 2, 7, 9]
    tree = builder(16, kind)(logits, ROOTS, row_horizon=jnp.array(horizon))
    for row, depths in enumerate(horizon):
        shorter = builder(16, kind)(logits[:, :depths], ROOTS)
        for name in FIELDS:
            np.testing.assert_allclose(getattr(tree, name)[row], getattr(shorter, name)[row], rtol=1e-6, err_msg=name)


def test_rows_do_not_see_each_other():
    logits = jnp.asarray(draw_logits("bf16", 8, ROWS, 7, 256))
    together = builder(16, "best-first")(logits, ROOTS)
    alone = builder(16, "best-first")(logits[2:3], ROOTS[2:3])
    for name in FIELDS:
        np.testing.assert_allclose(getattr(together, name)[2], getattr(alone, name)[0], rtol=1e-6, err_msg=name)


# ---- special trees, by eye ----------------------------------------------------------------------------------------

# Three positions, four tokens, probabilities as they stand.
TABLE = jnp.log(jnp.array([[[0.6, 0.3, 0.1, 0.0], [0.2, 0.5, 0.3, 0.0], [0.0, 0.0, 0.1, 0.9]]]))
ROOT = jnp.array([7], jnp.int32)


def assert_nodes(tree, token, parent, depth, probability):
    """Row 0, the root included; pads filled up."""
    missing = tree.token.shape[1] - len(token)
    np.testing.assert_array_equal(tree.token[0], token + [0] * missing)
    np.testing.assert_array_equal(tree.parent[0], parent + [-1] * missing)
    np.testing.assert_array_equal(tree.depth[0], depth + [0] * missing)
    np.testing.assert_allclose(np.exp(tree.score[0]), probability + [0.0] * missing, rtol=1e-5)
    np.testing.assert_array_equal(tree.valid[0], [True] * len(token) + [False] * missing)


def test_best_first_by_eye():
    tree = builder(6, "best-first")(TABLE, ROOT)
    # .6, then .6*.5 = .3 and .3, then .6*.5*.9 = .27, then .6*.3 = .18 and .18*.9 = .162
    assert_nodes(
        tree,
        [7, 0, 1, 1, 3, 2, 3],
        [-1, 0, 1, 0, 2, 1, 5],
        [0, 1, 2, 1, 3, 2, 3],
        [1, 0.6, 0.3, 0.3, 0.27, 0.18, 0.162],
    )


def test_spine_by_eye():
    tree = builder(5, "spine")(TABLE, ROOT)
    assert_nodes(tree, [7, 0, 1, 3, 1, 2], [-1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 1, 2], [1, 0.6, 0.3, 0.27, 0.3, 0.18])


def test_chain_by_eye():
    assert_nodes(builder(2, "chain")(TABLE, ROOT), [7, 0, 1], [-1, 0, 1], [0, 1, 2], [1, 0.6, 0.3])
    longer = builder(5, "chain")(TABLE, ROOT)
    assert_nodes(longer, [7, 0, 1, 3], [-1, 0, 1, 2], [0, 1, 2, 3], [1, 0.6, 0.3, 0.27])


def test_star_by_eye():
    assert_nodes(builder(2, "star")(TABLE, ROOT), [7, 0, 1], [-1, 0, 0], [0, 1, 1], [1, 0.6, 0.3])
    # Token 3 has probability 0 at this depth and is not drafted.
    assert_nodes(builder(5, "star")(TABLE, ROOT), [7, 0, 1, 2], [-1, 0, 0, 0], [0, 1, 1, 1], [1, 0.6, 0.3, 0.1])


@pytest.mark.parametrize("kind", ["best-first", "spine", "chain", "star"])
def test_budget_zero_is_the_root_alone(kind):
    assert_nodes(expand(TABLE, ROOT, budget=0, kind=kind), [7], [-1], [0], [1.0])


def test_no_positions_leave_the_root_and_pads():
    assert_nodes(expand(TABLE[:, :0], ROOT, budget=3), [7], [-1], [0], [1.0])


def test_the_whole_tree_when_the_budget_is_larger():
    tree = builder(30, "best-first")(TABLE, ROOT)
    assert tree.valid.sum() == 1 + 3 + 3 * 3 + 3 * 3 * 2


def test_the_spine_contains_the_chain_whatever_the_marginals():
    for style in STYLES:
        logits = jnp.asarray(draw_logits(style, 9, ROWS, 7, 256))
        chain, spine = builder(7, "chain")(logits, ROOTS), builder(16, "spine")(logits, ROOTS)
        for name in FIELDS:
            np.testing.assert_allclose(getattr(chain, name), getattr(spine, name)[:, :8], rtol=1e-6, err_msg=name)


def test_a_position_without_numbers_ends_the_tree_there():
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        broken = TABLE.at[0, 1].set(bad) if bad == -jnp.inf else TABLE.at[0, 1, 2].set(bad)
        tree = builder(6, "best-first")(broken, ROOT)
        assert_nodes(tree, [7, 0, 1, 2], [-1, 0, 0, 0], [0, 1, 1, 1], [1, 0.6, 0.3, 0.1])


def test_bf16_logits_are_read_as_the_numbers_they_are():
    logits = jnp.asarray(draw_logits("smooth", 12, ROWS, 7, 256)).astype(jnp.bfloat16)
    low, high = (builder(16, "best-first")(form, ROOTS) for form in (logits, logits.astype(jnp.float32)))
    assert low.score.dtype == jnp.float32
    for name in FIELDS:
        np.testing.assert_allclose(getattr(low, name), getattr(high, name), rtol=1e-6, err_msg=name)


def test_of_equal_logits_the_lower_token_comes_first():
    tree = builder(3, "star")(jnp.zeros((1, 1, 5)), ROOT)
    np.testing.assert_array_equal(tree.token[0], [7, 0, 1, 2])


def test_dtypes():
    tree = builder(6, "best-first")(TABLE, ROOT)
    assert [getattr(tree, name).dtype for name in FIELDS] == ["int32", "int32", "int32", "float32", "bool"]


def test_marginals_are_log_probabilities_over_the_whole_vocabulary():
    logits = draw_logits("smooth", 1, 2, 3, 50)
    logp, token = marginals(jnp.asarray(logits), 4)
    wide = logits.astype(np.float64)
    full = wide - np.log(np.exp(wide).sum(axis=2, keepdims=True))
    np.testing.assert_array_equal(token, np.argsort(-logits, axis=2, kind="stable")[..., :4])
    np.testing.assert_allclose(logp, np.take_along_axis(full, np.asarray(token), axis=2), rtol=1e-5, atol=1e-6)


def test_a_certain_token_has_log_probability_zero_at_most():
    logp, _ = marginals(jnp.array([[[100.0, 0.0, -50.0]]]), 1)
    assert logp.item() == 0.0


@pytest.mark.parametrize(
    "wrong", [{"kind": "bushy"}, {"budget": -1}, {"top_k": -2}], ids=lambda wrong: next(iter(wrong))
)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match="unknown tree kind|must not be negative"):
        expand(TABLE, ROOT, **({"budget": 4} | wrong))
