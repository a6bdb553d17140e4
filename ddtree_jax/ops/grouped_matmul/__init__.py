"""Each row times the matrix of its own group: what a mixture of experts computes."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ddtree_jax.ops.dispatch import choose
from ddtree_jax.ops.grouped_matmul import reference, xla

IMPLEMENTATIONS = {"xla": xla.grouped_matmul, "reference": reference.grouped_matmul}


def grouped_matmul(
    x: Float[Array, "M i"],
    weight: Float[Array, "E o i"],
    sizes: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M o"]:
    """y[m] = weight[group of m] @ x[m], accumulated in float32, in x's dtype.

    Args:
      x: rows sorted by group: the first sizes[0] belong to group 0, the next sizes[1] to group 1, and so on.
      weight: one [out, in] matrix a group, in the stored layout.
      sizes: int32 rows of every group, 0 allowed; they sum to M.
      implementation: "xla" (default: `jax.lax.ragged_dot_general`) or "reference" (a gathered matrix a row).
    """
    return choose(IMPLEMENTATIONS, implementation)(x, weight, sizes)
