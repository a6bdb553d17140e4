"""Softmax attention of a block of rows to the committed cache and, by a mask, to each other.

One operation serves prefill (causal mask), verify (ancestor mask) and the drafter (block mask, sliding windows).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.ops.dispatch import choose
from ddtree_jax.ops.tree_attention import reference, xla


def _pallas(*arguments):
    from ddtree_jax.ops.tree_attention import pallas_triton  # importing Pallas takes time that a CPU need not spend

    return pallas_triton.tree_attention(*arguments)


IMPLEMENTATIONS = {"xla": xla.tree_attention, "reference": reference.tree_attention, "pallas": _pallas}


def tree_attention(
    q: Float[Array, "B N nh D"],
    k_cache: Float[Array, "B nk S D"],
    v_cache: Float[Array, "B nk S D"],
    k_nodes: Float[Array, "B N nk D"],
    v_nodes: Float[Array, "B N nk D"],
    length: Int[Array, "B"] | Int[Array, "B N"],
    mask: Bool[Array, "B N N"],
    *,
    context_start: Int[Array, "B N"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N nh D"]:
    """One softmax over the visible cache slots and the visible nodes.

    Args:
      q, k_nodes, v_nodes: the rows of the block, RoPE already applied. Query head h uses kv head h // (nh // nk).
      k_cache, v_cache: the committed rows, read only; what lies outside the visible slots must be finite. S may be 0.
      length: node i sees the cache slots context_start <= s < length.
      mask: node i sees node j where mask[b, i, j]; the caller includes j = i.
      context_start: first visible slot, 0 when None (a sliding window's lower end).
      scale: factor on the scores, D**-0.5 when None.
      implementation: "xla" (default), "reference" or "pallas" (the default on a GPU; elsewhere it is interpreted).

    Returns:
      The dtype of q. Scores and softmax are float32; probabilities are cast to the values' dtype (as HF does).
      A row that sees nothing is zero. Source: algorithm.md 6, reference_models.md 1.3.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    length = jnp.broadcast_to(length[:, None] if length.ndim == 1 else length, q.shape[:2])
    attend = choose(IMPLEMENTATIONS, implementation, gpu="pallas")
    return attend(q, k_cache, v_cache, k_nodes, v_nodes, length, mask, context_start, scale)
