"""The k largest entries of every row, without sorting a whole vocabulary."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ddtree_jax.ops.dispatch import choose
from ddtree_jax.ops.top_k import reference, xla

IMPLEMENTATIONS = {"xla": xla.top_k, "reference": reference.top_k}


def top_k(
    x: Float[Array, "R V"], k: int, *, implementation: str | None = None
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Values (x's dtype) and int32 indices of the k largest entries of each row, as `jax.lax.top_k` gives them.

    Descending; equal values with the lower index first (zeros of either sign are equal); -inf is a value like any
    other; a row with a NaN has no order. `k` is static.
    Raises ValueError unless 0 <= k <= V. Source: jax_notes.md 4.6 and 5.
    """
    if not 0 <= k <= x.shape[1]:
        raise ValueError(f"k = {k} is outside 0..{x.shape[1]}")
    return choose(IMPLEMENTATIONS, implementation)(x, k)
