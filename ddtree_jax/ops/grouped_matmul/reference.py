"""Plain writing of the grouped product: every row takes its own matrix."""

from __future__ import annotations

import jax.numpy as jnp


def grouped_matmul(x, weight, sizes, largest):
    """See `ddtree_jax.ops.grouped_matmul.grouped_matmul`."""
    group = jnp.repeat(jnp.arange(weight.shape[0]), sizes, total_repeat_length=x.shape[0])
    return jnp.einsum("mi,moi->mo", x, weight[group], preferred_element_type=jnp.float32).astype(x.dtype)
