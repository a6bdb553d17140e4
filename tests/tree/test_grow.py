"""Trees from scores that depend on the token before, against a heap over paths (algorithm.md sections 5 and 12)."""

import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.tree import Branches, expand, grow, marginals

ROWS = 3
ROOTS = jnp.arange(ROWS, dtype=jnp.int32) + 1000
FIELDS = ("token", "parent", "depth", "score", "valid")


class Table:
    """One row's scores on the host: what follows a rank path, step by step."""

    def __init__(self, branches: Branches, row: int):
        self.logp, self.token, self.group = (np.asarray(x[row]) for x in branches)

    def children(self, group: int, depth: int):
        """(rank, log-probability, group after it) of all that may follow at a depth."""
        if depth < len(self.logp):
            values = zip(self.logp[depth, group], self.group[depth, group].tolist(), strict=True)
            yield from ((rank, logp, after) for rank, (logp, after) in enumerate(values) if logp > -math.inf)


def heap_paths(table: Table, budget: int, spine: bool):
    """(rank path, fp32 score) of the best prefixes as a heap with all children pops them, the top-1 chain first."""
    found, heap = [], []

    def take(path, score, group):
        if path:
            found.append((path, score))
        for rank, logp, after in table.children(group, len(path)):
            child = (*path, rank)
            on_chain = spine and child == (0,) * len(child)
            heapq.heappush(heap, (not on_chain, -(score + logp), child, after))

    take((), np.float32(0), 0)
    while heap and len(found) < budget:
        _, negative, path, group = heapq.heappop(heap)
        take(path, -negative, group)
    return found


def paths_of(tree, table: Table, row: int):
    """Rank paths and scores of a row's nodes; fails where a node hangs on no earlier node or follows none."""
    one = {name: np.asarray(getattr(tree, name)[row]) for name in FIELDS}
    count = int(one["valid"].sum())
    assert one["valid"][:count].all() and (one["token"][count:] == 0).all() and (one["parent"][count:] == -1).all()
    assert (one["token"][0], one["parent"][0], one["depth"][0]) == (1000 + row, -1, 0)
    paths, groups = [()], [0]
    for node in range(1, count):
        parent, depth = one["parent"][node], one["depth"][node]
        assert 0 <= parent < node and depth == len(paths[parent]) + 1
        (rank,) = np.flatnonzero(table.token[depth - 1, groups[parent]] == one["token"][node])
        paths.append((*paths[parent], int(rank)))
        groups.append(int(table.group[depth - 1, groups[parent], rank]))
    assert len(set(paths)) == count
    return paths[1:], one["score"][1:count]


STYLES = ("smooth", "eighths", "flat", "holes", "certain")


def draw_branches(style: str, seed: int, depths: int, groups: int, ranks: int) -> Branches:
    """Random scores. "holes" leaves some tokens without any that may follow; "eighths" and "flat" tie."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, depths, groups, ranks)
    logp = -np.abs(rng.normal(size=shape)) * rng.choice([0.1, 1.0, 4.0], size=(ROWS, depths, groups, 1))
    if style == "eighths":
        logp = np.round(logp * 8) / 8
    if style == "flat":
        logp = np.full(shape, -0.5)
    if style == "holes":
        logp = np.where(rng.random((*shape[:3], 1)) < 0.3, -np.inf, np.where(rng.random(shape) < 0.2, -np.inf, logp))
    if style == "certain":
        logp = np.where(rng.random(shape) < 0.3, 0.0, np.round(logp))
    logp = -np.sort(-logp, axis=-1).astype(np.float32)
    token = rng.permuted(np.broadcast_to(np.arange(3 * ranks), (*shape[:3], 3 * ranks)), axis=-1)[..., :ranks]
    group = rng.integers(groups, size=shape)
    return Branches(jnp.asarray(logp), jnp.asarray(token, jnp.int32), jnp.asarray(group, jnp.int32))


@functools.cache
def builder(budget: int, kind: str):
    return jax.jit(functools.partial(grow, budget=budget, kind=kind))


def check(branches: Branches, budget: int, kind: str) -> None:
    tree = builder(budget, kind)(branches, ROOTS)
    for row in range(ROWS):
        table = Table(branches, row)
        expected = heap_paths(table, budget, kind == "spine")
        paths, scores = paths_of(tree, table, row)
        assert paths == [path for path, _ in expected]
        np.testing.assert_array_equal(scores, np.array([score for _, score in expected], np.float32))


SHAPES = [(7, 4, 4, 1), (1, 3, 3, 2), (3, 2, 5, 40), (7, 16, 16, 16), (15, 8, 8, 64), (4, 5, 3, 300)]


@pytest.mark.parametrize("kind", ["best-first", "spine"])
@pytest.mark.parametrize(("depths", "groups", "ranks", "budget"), SHAPES)
def test_the_tree_is_the_heaps(depths, groups, ranks, budget, kind):
    @settings(max_examples=10)
    @given(st.sampled_from(STYLES), st.integers(0, 2**32 - 1))
    def check_one(style, seed):
        check(draw_branches(style, seed, depths, groups, ranks), budget, kind)

    check_one()


def test_the_largest_budget():
    check(draw_branches("smooth", 1, 7, 16, 16), 1024, "best-first")


@pytest.mark.parametrize("style", STYLES)
def test_chain_takes_the_best_after_the_one_it_took(style):
    branches = draw_branches(style, 3, 7, 5, 4)
    tree = builder(7, "chain")(branches, ROOTS)
    for row in range(ROWS):
        paths, _ = paths_of(tree, Table(branches, row), row)
        spine = [path for path, _ in heap_paths(Table(branches, row), 7, spine=True) if set(path) == {0}]
        assert paths == spine


def test_star_is_what_follows_the_root():
    branches = draw_branches("smooth", 4, 7, 5, 4)
    tree = builder(6, "star")(branches, ROOTS)
    np.testing.assert_array_equal(tree.token[:, 1:5], branches.token[:, 0, 0])
    assert np.asarray(tree.valid).tolist() == [[True] * 5 + [False] * 2] * ROWS


def test_row_budget_and_row_horizon():
    branches = draw_branches("smooth", 5, 7, 4, 4)
    whole = builder(20, "best-first")(branches, ROOTS)
    cut = builder(20, "best-first")(branches, ROOTS, row_budget=jnp.array([0, 3, 99]))
    for row, count in enumerate([0, 3, 20]):
        assert np.asarray(cut.valid[row]).sum() == 1 + count
        np.testing.assert_array_equal(cut.token[row, : 1 + count], whole.token[row, : 1 + count])
    low = builder(20, "best-first")(branches, ROOTS, row_horizon=jnp.array([0, 2, 9]))
    assert np.asarray(low.depth).max(axis=1).tolist() == [0, 2, int(whole.depth[2].max())]
    shorter = builder(20, "best-first")(Branches(*(x[:, :2] for x in branches)), ROOTS)
    np.testing.assert_array_equal(low.token[1], shorter.token[1])


@pytest.mark.parametrize("kind", ["best-first", "spine"])
def test_marginals_are_groups_that_do_not_differ(kind):
    """Scores that are the same after every token build the tree of the marginals."""
    logits = jnp.asarray(np.random.default_rng(6).normal(size=(ROWS, 5, 40)) * 2, jnp.float32)
    logp, token = marginals(logits, 8)
    same = Branches(*(jnp.repeat(x[:, :, None], 8, axis=2) for x in (logp, token)), jnp.zeros((ROWS, 5, 8, 8), int))
    same = same._replace(group=jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), same.token.shape))
    ours = builder(32, kind)(same, ROOTS)
    expected = expand(logits, ROOTS, budget=32, kind=kind, top_k=8)
    for name in FIELDS:
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-6, err_msg=name)


def test_by_eye():
    """After 5 the likely token is 7, after 6 it is 8: the second best path turns away from the top-1 chain."""
    logp = np.log([[[[0.6, 0.4], [0.5, 0.5]], [[0.5, 0.5], [0.9, 0.1]]]])
    token = [[[[5, 6], [0, 0]], [[7, 9], [8, 7]]]]
    group = [[[[0, 1], [0, 0]], [[0, 0], [0, 0]]]]
    branches = Branches(*(jnp.asarray(x, t) for x, t in ((logp, jnp.float32), (token, jnp.int32), (group, jnp.int32))))
    root = jnp.array([3], jnp.int32)
    best = grow(branches, root, budget=4)
    assert best.token[0].tolist() == [3, 5, 6, 8, 7] and best.parent[0].tolist() == [-1, 0, 0, 2, 1]
    np.testing.assert_allclose(np.exp(best.score[0]), [1, 0.6, 0.4, 0.36, 0.3], rtol=1e-6)
    spine = grow(branches, root, budget=3, kind="spine")
    assert spine.token[0].tolist() == [3, 5, 7, 6] and spine.parent[0].tolist() == [-1, 0, 1, 0]


@pytest.mark.parametrize("wrong", [dict(kind="bush", budget=3), dict(budget=-1)])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ValueError):
        grow(draw_branches("flat", 0, 2, 2, 2), ROOTS, **wrong)
