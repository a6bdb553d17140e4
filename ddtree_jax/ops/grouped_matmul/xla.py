"""The grouped product in the form that reads the fewest matrices; none is ever transposed or copied on a GPU.

`jax.lax.ragged_dot` would be the obvious writing, but is dense on CPUs and GPUs (see the package's docstring).
"""

from __future__ import annotations

import jax.numpy as jnp

from ddtree_jax.ops.grouped_matmul import reference


def grouped_matmul(x, weight, sizes, largest):
    """See `ddtree_jax.ops.grouped_matmul.grouped_matmul`."""
    few = x.shape[0] <= weight.shape[0]
    return reference.grouped_matmul(x, weight, sizes, largest) if few else _padded(x, weight, sizes, largest)


def _padded(x, weight, sizes, largest):
    """One batched product: every group is padded to the rows that the largest can have."""
    rows = x.shape[0]
    start = jnp.cumsum(sizes) - sizes
    slots = start[:, None] + jnp.arange(largest)  # a slot that its group does not fill holds another group's row
    y = jnp.einsum("eci,eoi->eco", x[jnp.minimum(slots, rows - 1)], weight, preferred_element_type=jnp.float32)
    group = jnp.repeat(jnp.arange(len(weight)), sizes, total_repeat_length=rows)
    return y.astype(x.dtype)[group, jnp.arange(rows) - start[group]]
