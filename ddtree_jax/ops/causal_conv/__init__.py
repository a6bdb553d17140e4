"""Depthwise causal convolution with SiLU over a sequence or over a tree, and the rolling window of its inputs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.ops.causal_conv import reference, xla
from ddtree_jax.ops.dispatch import choose

IMPLEMENTATIONS = {"xla": xla, "reference": reference}


def sequence(
    x: Float[Array, "B T C"],
    window: Float[Array, "B R C"],
    weight: Float[Array, "K C"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T C"]:
    """silu(sum_j weight[j] * row[t - K + 1 + j]) for every token t; rows before token 0 come from `window`.

    Args: `x` the rows before the convolution, any real dtype; `window` the K-1 rows before them, oldest first;
    `weight[K-1]` multiplies the current row. Returns x's dtype; products are summed in float32.
    Raises ValueError for an unknown implementation. Source: reference_models.md 1.4.
    """
    return choose(IMPLEMENTATIONS, implementation).sequence(x, window, weight)


def tree(
    x: Float[Array, "B N C"],
    window: Float[Array, "B R C"],
    weight: Float[Array, "K C"],
    ancestors: Int[Array, "B N R"],
    depth: Int[Array, "B N"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B N C"]:
    """The convolution of every tree node over its own row and the rows of its K-1 nearest ancestors.

    Args: `ancestors[b, i, t]` is the (t+1)-th ancestor of node i, nearest first: `ancestor_ids(parent, K)[..., 1:]`;
    what it holds beyond the root is not read, those taps reach into `window` (the committed rows). A pad node
    (depth 0) is a root of its own. With N = 1 the node is the root, at depth 0.
    Returns x's dtype. Source: algorithm.md 7 (Conv).
    """
    return choose(IMPLEMENTATIONS, implementation).tree(x, window, weight, ancestors, depth)


def next_window(
    window: Float[Array, "B R C"], x: Float[Array, "B T C"], count: Int[Array, "B"]
) -> Float[Array, "B R C"]:
    """The last K-1 rows of [window ; x[:count]], each sequence with its own `count` in 0..T. Source: algorithm.md 7."""
    rows = window.shape[1]
    place = count[:, None] - rows + jnp.arange(rows)  # in x; negative: still in the old window
    old = jnp.take_along_axis(window, jnp.clip(place + rows, 0, rows - 1)[..., None], axis=1)
    new = jnp.take_along_axis(x, jnp.clip(place, 0, x.shape[1] - 1)[..., None], axis=1)
    return jnp.where(place[..., None] < 0, old, new.astype(window.dtype))
