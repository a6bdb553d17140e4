"""Each row times the matrix of its own group: what a mixture of experts computes.

What XLA makes of it for an H200, compiled without one (jax 0.11.2, bfloat16; 256 matrices of 1024 x 2048, 1.07 GB in
all; 8 rows a token). Useful work is 4.2 MFLOP a row; bytes are what the program's operations read and write:

    tokens `jax.lax.ragged_dot_general`             ours
         1    9 GFLOP   3.2 GB   1.1 GB temporary    0.05 GFLOP    8 matrices (0.03 GB)   nothing temporary
        17  146 GFLOP   3.5 GB   1.2 GB              0.9  GFLOP  136 matrices (0.6 GB)    nothing
        65  559 GFLOP   4.3 GB   1.6 GB               70  GFLOP   1.3 GB                  0.1 GB
      1024 8813 GFLOP  20.5 GB   9.7 GB             1100  GFLOP   4.4 GB                  1.6 GB

`ragged_dot_general` is dense: rows are masked and copied for every group, all matrices are transposed into a copy, and
every row meets every matrix. On a CPU it is too, and 7 to 22 times as slow as ours.
"""

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
    largest: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "M o"]:
    """y[m] = weight[group of m] @ x[m], accumulated in float32, in x's dtype.

    Args:
      x: rows sorted by group: the first sizes[0] belong to group 0, the next sizes[1] to group 1, and so on.
      weight: one [out, in] matrix a group, in the stored layout.
      sizes: int32 rows of every group, 0 allowed; they sum to M.
      largest: no group has more rows (default: M). What a group has beyond is wrong.
      implementation: "xla" (default: up to E rows each reads its matrix, more are one batched product of groups padded
        to `largest`) or "reference" (always a matrix a row).
    """
    largest = x.shape[0] if largest is None else largest
    return choose(IMPLEMENTATIONS, implementation)(x, weight, sizes, largest)
