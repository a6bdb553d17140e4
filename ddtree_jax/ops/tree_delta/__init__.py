"""The gated delta rule over a tree of nodes from one committed state, and the state after an accepted path."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.ops.dispatch import choose
from ddtree_jax.ops.tree_delta import reference, xla
from ddtree_jax.ops.tree_delta.commit import DeltaFactors, commit_path, replay_path

__all__ = ["DeltaFactors", "commit_path", "replay_path", "tree_delta"]


def _pallas(*arguments):
    from ddtree_jax.ops.tree_delta import pallas_triton  # importing Pallas takes time that a CPU need not spend

    return pallas_triton.solve(*arguments)


IMPLEMENTATIONS = {"solve": xla.solve, "levels": xla.levels, "scan": reference.scan, "pallas": _pallas}


def tree_delta(
    q: Float[Array, "B N Hk dk"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    g: Float[Array, "B N Hv"],
    beta: Float[Array, "B N Hv"],
    state: Float[Array, "B Hv dk dv"],
    parent: Int[Array, "B N"],
    depth: Int[Array, "B N"],
    *,
    max_depth: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N Hv dv"], DeltaFactors]:
    """Run every node's root-to-node path through the gated delta rule; the committed state is only read.

    Args:
      q, k: normalised queries (already scaled by dk**-0.5) and keys. Value head h uses key head h // (Hv // Hk).
      v, g, beta: values, log-decays <= 0, write strengths.
      state: the committed state, key axis first.
      parent: a node's parent, at a lower index; -1 for the root and for pads, each then a root of its own.
      depth: 0 where parent is -1, else the parent's + 1.
      max_depth: static, at least every depth.
      implementation: "solve" (default: a triangular solve, no state per node), "pallas" (the same in one kernel, the
        default on a GPU; elsewhere it is interpreted), "levels" (all nodes of a depth at once) or "scan" (node by node,
        the definition); the last two keep a state per node.

    Returns:
      float32 outputs, and the factors from which `commit_path` makes the state after a path.
      Source: algorithm.md 7 and 13.
    """
    q, k, v, g, beta, state = (x.astype(jnp.float32) for x in (q, k, v, g, beta, state))
    # A root alone has nothing to solve, and the kernel would be four launches more.
    solve = choose(IMPLEMENTATIONS, implementation, gpu="pallas" if q.shape[1] > 1 else None)
    out, u = solve(q, k, v, g, beta, state, parent, depth, max_depth)
    return out, DeltaFactors(k, u, g)
