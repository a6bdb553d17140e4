"""`benchmark.py operations`: every writing of an operation, on shapes of Qwen3.5-0.8B with a short context."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import show, timed
from ddtree_jax.ops.tree_attention import IMPLEMENTATIONS as ATTENTIONS
from ddtree_jax.ops.tree_attention import tree_attention
from ddtree_jax.ops.tree_delta import IMPLEMENTATIONS as DELTAS
from ddtree_jax.ops.tree_delta import tree_delta


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--repeats", type=int, default=30, metavar="N", help="calls (default %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Tree attention and the tree delta rule for 1, 17 and 65 nodes."""
    rows = {}
    for nodes in (1, 17, 65):
        for name in compiled(ATTENTIONS):
            rows[f"tree_attention {name}, N={nodes}"] = time_attention(name, nodes, arguments.repeats)
        for name in compiled(DELTAS):
            rows[f"tree_delta {name}, N={nodes}"] = time_delta(name, nodes, arguments.repeats)
    show(rows, arguments.json)


def compiled(writings: Iterable[str]) -> list[str]:
    """The writings that are compiled here: a kernel for GPUs is only interpreted elsewhere."""
    return [name for name in writings if name != "pallas" or jax.default_backend() == "gpu"]


def time_attention(name: str, nodes: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one writing: 8 query heads, 2 kv heads of 256, 512 slots of context, a star."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q, k, v = (jax.random.normal(next(keys), (1, nodes, heads, 256)) for heads in (8, 2, 2))
    cache = [jax.random.normal(next(keys), (1, 2, 512, 256)) for _ in range(2)]
    call = jax.jit(lambda *xs: tree_attention(*xs, implementation=name))
    inputs = (q, *cache, k, v, jnp.array([500]), star_mask(nodes))
    return milliseconds(lambda: call(*inputs), repeats)


def time_delta(name: str, nodes: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one writing: 16 heads of 128, a tree whose node i has parent (i-1) // 2."""
    parent = (np.arange(nodes)[None] - 1) // 2
    depth = np.floor(np.log2(np.arange(nodes) + 1)).astype(np.int32)[None]
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q, k, v = (jax.random.normal(next(keys), (1, nodes, 16, 128)) / 128**0.5 for _ in range(3))
    g, beta = -jnp.ones((1, nodes, 16)), jnp.full((1, nodes, 16), 0.5)
    state = jax.random.normal(next(keys), (1, 16, 128, 128))
    call = jax.jit(lambda *xs: tree_delta(*xs, max_depth=7, implementation=name))
    inputs = (q, k, v, g, beta, state, jnp.array(parent, jnp.int32), jnp.array(depth))
    return milliseconds(lambda: call(*inputs), repeats)


def star_mask(nodes: int) -> jax.Array:
    """Root and itself."""
    return (jnp.eye(nodes, dtype=bool) | (jnp.arange(nodes) == 0))[None]


def milliseconds(call, repeats: int) -> dict[str, float]:
    """A row of the table."""
    timing = timed(call, repeats)
    return {"median_ms": round(1000 * timing.seconds, 3), "min_ms": round(1000 * timing.fastest, 3)}
