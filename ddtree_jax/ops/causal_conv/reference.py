"""Plain writing of the causal convolution: every row's K-tap window is built and multiplied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sequence(
    x: Float[Array, "B T C"], window: Float[Array, "B R C"], weight: Float[Array, "K C"]
) -> Float[Array, "B T C"]:
    """See `causal_conv.sequence`."""
    rows = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    windows = [rows[:, t : t + weight.shape[0]] for t in range(x.shape[1])]
    return convolve(jnp.stack(windows, axis=1), weight)


def tree(
    x: Float[Array, "B N C"],
    window: Float[Array, "B R C"],
    weight: Float[Array, "K C"],
    ancestors: Int[Array, "B N R"],
    depth: Int[Array, "B N"],
) -> Float[Array, "B N C"]:
    """See `causal_conv.tree`."""
    every_node = jax.vmap(node_window, in_axes=(None, None, 0, 0, 0))
    return convolve(jax.vmap(every_node)(x, window.astype(x.dtype), x, ancestors, depth), weight)


def node_window(
    x: Float[Array, "N C"],
    window: Float[Array, "R C"],
    own: Float[Array, "C"],
    ancestors: Int[Array, "R"],
    depth: Int[Array, ""],
) -> Float[Array, "K C"]:
    """One node's K rows, oldest first: what is left of the committed window, the ancestors, the node itself."""
    rows = window.shape[0]
    is_ancestor = jnp.arange(rows) >= rows - depth
    before = jnp.where(is_ancestor[:, None], x[ancestors[::-1]], jnp.roll(window, -depth, axis=0))
    return jnp.concatenate([before, own[None]])


def convolve(windows: Float[Array, "B T K C"], weight: Float[Array, "K C"]) -> Float[Array, "B T C"]:
    """silu of the taps' weighted sum, summed in float32."""
    total = jnp.einsum("btkc,kc->btc", windows.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
    return jax.nn.silu(total.astype(windows.dtype).astype(jnp.float32)).astype(windows.dtype)
