"""What the tests of ops share: random trees, delta-rule inputs, a loop in float64, a look into a trace.

All arrays are NumPy: a jitted function takes them, and slicing them compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class Tree(NamedTuple):
    """Parents and depths of B trees of N nodes, int32 [B, N]."""

    parent: np.ndarray
    depth: np.ndarray


def tree_of(parents: list[list[int]] | np.ndarray) -> Tree:
    """The tree with these parents."""
    parent = np.asarray(parents, np.int32)
    depth = np.zeros_like(parent)
    for b, i in np.argwhere(parent >= 0):
        depth[b, i] = depth[b, parent[b, i]] + 1
    return Tree(parent, depth)


def random_tree(rng: np.random.Generator, batch: int, nodes: int, pads: int = 0) -> Tree:
    """Every node under a random earlier one; the last `pads` nodes are pads, in row b `b` more."""
    parent = np.full((batch, nodes), -1, np.int32)
    for b in range(batch):
        for i in range(1, nodes - pads - b * (pads > 0)):
            parent[b, i] = rng.integers(max(0, i - 3), i)
    return tree_of(parent)


def path_to(tree: Tree, row: int, node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while tree.parent[row, path[0]] >= 0:
        path.insert(0, int(tree.parent[row, path[0]]))
    return path


class Rows(NamedTuple):
    """float32 q, k [B, N, Hk, dk], v [B, N, Hv, dv], g, beta [B, N, Hv], state [B, Hv, dk, dv]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray


def delta_rows(
    rng: np.random.Generator, batch: int, rows: int, key_heads: int, repeats: int, dk: int, dv: int, decay: str = "mild"
) -> Rows:
    """Unit keys, scaled unit queries, beta in 0..1; g near -1 (mild), down to -1000 (fast), or both (mixed)."""
    heads = key_heads * repeats
    q, k = (_unit(rng.standard_normal((batch, rows, key_heads, dk))) for _ in range(2))
    v, state = rng.standard_normal((batch, rows, heads, dv)), rng.standard_normal((batch, heads, dk, dv))
    g, beta = -rng.exponential(1.0, (batch, rows, heads)), rng.random((batch, rows, heads))
    fast = -1000.0 * rng.random(g.shape)
    if decay != "mild":
        g = np.where(rng.random(g.shape) < 0.5, 1e-3 * g, fast) if decay == "mixed" else fast
    return Rows(*(x.astype(np.float32) for x in (q * dk**-0.5, k, v, g, beta, state)))


def delta_loop(rows: Rows, tree: Tree) -> tuple[np.ndarray, np.ndarray]:
    """The delta rule node by node in float64: every node's output [B, N, Hv, dv] and its state [B, N, Hv, dk, dv]."""
    q, k, v, g, beta, start = (np.asarray(x, np.float64) for x in rows)
    repeats = v.shape[2] // k.shape[2]
    out, states = np.zeros_like(v), np.zeros((*v.shape[:3], *start.shape[2:]))
    for b, i, h in np.ndindex(*v.shape[:3]):
        parent = int(tree.parent[b, i])
        state = (start[b, h] if parent < 0 else states[b, parent, h]) * np.exp(g[b, i, h])
        key, query = k[b, i, h // repeats], q[b, i, h // repeats]
        states[b, i, h] = state + np.outer(key, beta[b, i, h] * (v[b, i, h] - state.T @ key))
        out[b, i, h] = states[b, i, h].T @ query
    return out, states


def chain(batch: int, nodes: int) -> Tree:
    """B chains: a sequence as a tree."""
    return tree_of(np.tile(np.arange(-1, nodes - 1), (batch, 1)))


def distance(found: Any, expected: np.ndarray) -> float:
    """Largest absolute difference, taken in float64."""
    assert found.shape == expected.shape
    return float(np.max(np.abs(np.asarray(found, np.float64) - expected), initial=0.0))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a traced function, those of inner functions and loops included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in equation.params.values():
            for candidate in inner if isinstance(inner, (list, tuple)) else (inner,):
                if hasattr(candidate, "eqns") or hasattr(candidate, "jaxpr"):
                    yield from equations(candidate)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
