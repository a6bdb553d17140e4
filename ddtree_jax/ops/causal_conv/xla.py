"""Fast writing of the causal convolution: K shifted multiply-adds, and one row gather for a tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sequence(
    x: Float[Array, "B T C"], window: Float[Array, "B R C"], weight: Float[Array, "K C"]
) -> Float[Array, "B T C"]:
    """See `causal_conv.sequence`."""
    length = x.shape[1]
    rows = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    return weighted_silu([rows[:, j : j + length] for j in range(weight.shape[0])], weight)


def tree(
    x: Float[Array, "B N C"],
    window: Float[Array, "B R C"],
    weight: Float[Array, "K C"],
    ancestors: Int[Array, "B N R"],
    depth: Int[Array, "B N"],
) -> Float[Array, "B N C"]:
    """See `causal_conv.tree`."""
    if x.shape[1] == 1:  # only the root: no gather
        return sequence(x, window, weight)
    taps = window.shape[1]
    rows = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    back = jnp.arange(1, taps + 1)
    place = jnp.where(back <= depth[..., None], taps + ancestors, taps + depth[..., None] - back)
    near = jax.vmap(lambda row, index: row[index])(rows, place)  # [B, N, K-1, C], nearest first
    return weighted_silu([near[:, :, taps - 1 - j] for j in range(taps)] + [x], weight)


def weighted_silu(rows: list[Float[Array, "B T C"]], weight: Float[Array, "K C"]) -> Float[Array, "B T C"]:
    """silu(sum_j weight[j] * rows[j]): summed in float32, rounded to the rows' dtype before silu, as HF does."""
    dtype = rows[-1].dtype
    terms = [row.astype(jnp.float32) * weight[j].astype(jnp.float32) for j, row in enumerate(rows)]
    total = sum(terms[1:], terms[0])
    return jax.nn.silu(total.astype(dtype).astype(jnp.float32)).astype(dtype)
