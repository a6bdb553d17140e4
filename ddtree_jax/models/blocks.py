"""What passes between the layers and the decode loop: caches, the rows a verify step makes, and the shape of a block of
tokens.

Verify reads the caches and returns rows; only commit writes, once the accepted path is known. So a rejected node never
touches a cache, and a donated cache is updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.ops import causal_conv
from ddtree_jax.ops.tree_delta import DeltaFactors, commit_path
from ddtree_jax.parallel import split


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys (after norm and rotation) and values of committed positions; slot s holds position s. Slots at and past the
    length are garbage.
    """

    k: Float[Array, "B nk S D"]
    v: Float[Array, "B nk S D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaCache:
    """Recurrent state of a Gated DeltaNet layer (float32, key axis first) and the last K-1 rows that entered its
    convolution.
    """

    state: Float[Array, "B Hv dk dv"]
    window: Float[Array, "B taps C"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVRows:
    """Key and value rows of a block's tokens, not yet in a cache."""

    k: Float[Array, "B N nk D"]
    v: Float[Array, "B N nk D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRows:
    """What a delta layer keeps of every node: its row before the convolution, and the factors of its state update."""

    conv: Float[Array, "B N C"]
    factors: DeltaFactors


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceBlock:
    """T consecutive tokens after `length` committed ones, right-padded: row b has `count[b]` real tokens."""

    position: Int[Array, "B T"]
    length: Int[Array, " B"]
    mask: Bool[Array, "B T T"]
    count: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeBlock:
    """N tree nodes after `length` committed tokens, parents before children.

    position: length + depth, whatever slot a node has.
    mask[b, i, j]: j is i or an ancestor of i.
    ancestors[b, i, t]: t-th ancestor of i (0 is i itself), -1 beyond the root.
    """

    position: Int[Array, "B N"]
    length: Int[Array, " B"]
    mask: Bool[Array, "B N N"]
    parent: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    ancestors: Int[Array, "B N levels"]
    max_depth: int = field(metadata=dict(static=True))


Cache = KVCache | DeltaCache
Rows = KVRows | DeltaRows


def empty_kv(shape: tuple[int, int, int, int], dtype: jnp.dtype) -> KVCache:
    """Keys and values of zeros [B, nk, S, D], on a mesh split by heads."""
    return KVCache(split(jnp.zeros(shape, dtype), 1), split(jnp.zeros(shape, dtype), 1))


def sequence_block(length: Int[Array, " B"], count: Int[Array, " B"], size: int) -> SequenceBlock:
    """A block of `size` consecutive tokens of which the first `count` are real."""
    steps = jnp.arange(size)
    mask = jnp.broadcast_to(steps[:, None] >= steps[None, :], (length.shape[0], size, size))
    return SequenceBlock(length[:, None] + steps, length, mask, count)


def extend(cache: Cache, made: KVRows | DeltaCache | None, length: Int[Array, " B"]) -> Cache:
    """A layer's cache after a sequence: an attention layer made rows to write, a delta layer its new cache.

    None: `cache` is up to date.
    """
    if made is None:
        return cache
    if isinstance(made, DeltaCache):
        return made
    assert isinstance(cache, KVCache)
    return write_rows(cache, made, length)


def write_rows(cache: KVCache, rows: KVRows, start: Int[Array, " B"]) -> KVCache:
    """Write N rows a sequence at slots start[b]..start[b]+N-1. The caller guarantees room: start + N <= S."""
    return KVCache(_write(cache.k, rows.k, start), _write(cache.v, rows.v, start))


def _write(cache: Float[Array, "B nk S D"], rows: Float[Array, "B N nk D"], start: Int[Array, " B"]):
    rows = rows.transpose(0, 2, 1, 3).astype(cache.dtype)
    for b in range(cache.shape[0]):
        cache = jax.lax.dynamic_update_slice(cache, rows[b : b + 1], (b, 0, start[b], 0))
    return cache


def take_path(x: Float[Array, "B N *rest"], path: Int[Array, "B P"]) -> Float[Array, "B P *rest"]:
    """The rows of the nodes on a path, in path order."""
    return jnp.take_along_axis(x, path.reshape(*path.shape, *([1] * (x.ndim - 2))), axis=1)


def commit(
    cache: Cache, rows: Rows, path: Int[Array, "B P"], count: Int[Array, " B"], length: Int[Array, " B"]
) -> Cache:
    """The cache after the first `count[b]` nodes of the path are accepted (algorithm.md sections 6 and 7)."""
    if isinstance(cache, KVCache):
        assert isinstance(rows, KVRows)
        return write_rows(cache, KVRows(take_path(rows.k, path), take_path(rows.v, path)), length)
    assert isinstance(rows, DeltaRows)
    window = causal_conv.next_window(cache.window, take_path(rows.conv, path), count)
    return DeltaCache(commit_path(cache.state, rows.factors, path, count), window)
