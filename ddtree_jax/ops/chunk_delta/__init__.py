"""The gated delta rule over a sequence, from an initial state: prefill and training."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from ddtree_jax.ops.chunk_delta import reference, xla
from ddtree_jax.ops.dispatch import choose

IMPLEMENTATIONS = {"xla": xla.chunk_delta, "reference": reference.chunk_delta}


def chunk_delta(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv dk dv"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Run the gated delta rule over T tokens (reference_models.md 1.4).

    Args:
      q, k: normalised queries (already scaled by dk**-0.5) and keys. Value head h uses key head h // (Hv // Hk).
      v: values.
      g: log-decays, <= 0. beta: write strengths in 0..1. A row with g = 0 and beta = 0 leaves the state as it was
        (padding).
      state: the state before the first token, key axis first.
      implementation: "reference" (token by token) or "xla" (chunks of 64, the default).

    Returns:
      float32 outputs of every token, and the float32 state after the last.
    """
    q, k, v, g, beta, state = (x.astype(jnp.float32) for x in (q, k, v, g, beta, state))
    return choose(IMPLEMENTATIONS, implementation)(q, k, v, g, beta, state)
