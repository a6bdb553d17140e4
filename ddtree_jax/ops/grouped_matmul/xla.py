"""The grouped product as one ragged matmul in the stored layout, so that no expert's matrix is transposed or copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ROWS_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


def grouped_matmul(x, weight, sizes):
    """See `ddtree_jax.ops.grouped_matmul.grouped_matmul`."""
    y = jax.lax.ragged_dot_general(x, weight, sizes, ROWS_BY_GROUP, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)
