"""The delta state after an accepted path: from the factors of the nodes in closed form, or by replaying the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.ops.delta import HIGHEST, repeat_heads, step


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaFactors:
    """Every node's update of the state: S_node = exp(g) S_parent + k u^T, with the node's own log-decay g."""

    k: Float[Array, "B N Hk dk"]
    u: Float[Array, "B N Hv dv"]
    g: Float[Array, "B N Hv"]


def commit_path(
    state: Float[Array, "B Hv dk dv"], factors: DeltaFactors, path: Int[Array, "B P"], count: Int[Array, " B"]
) -> Float[Array, "B Hv dk dv"]:
    """The state after the nodes path[:count], a path from the root, in closed form (algorithm.md 13).

    gamma_m S0 + sum_j exp(G_m - G_j) k_j u_j^T. `count` 0 keeps the state. What `path` holds from `count` on must be
    node numbers, and does not matter.
    """
    taken = (jnp.arange(path.shape[1]) < count[:, None])[..., None]
    k, u, g = (take_nodes(x, path) for x in (factors.k, factors.u, factors.g))
    onward = jax.lax.cumsum(jnp.where(taken, g, 0.0), axis=1, reverse=True)  # from node j to the path's end, j included
    after = jnp.concatenate([onward[:, 1:], jnp.zeros_like(onward[:, :1])], axis=1)
    weighted = jnp.where(taken, jnp.exp(after), 0.0)[..., None] * u
    written = jnp.einsum("bphk,bphv->bhkv", repeat_heads(k, u.shape[2]), weighted, precision=HIGHEST)
    return state * jnp.exp(onward[:, 0])[..., None, None] + written


def replay_path(
    state: Float[Array, "B Hv dk dv"],
    k: Float[Array, "B N Hk dk"],
    v: Float[Array, "B N Hv dv"],
    g: Float[Array, "B N Hv"],
    beta: Float[Array, "B N Hv"],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
) -> Float[Array, "B Hv dk dv"]:
    """The state after the nodes path[:count], token by token with `step`; `count` 0 keeps the state.

    The check on `commit_path`. Over 16 tokens both are within 1.2e-6 of float64; the closed form is twice as near where
    decay is slow (6e-7 against 1.2e-6, dk = dv = 128), and it passes over the state once, not once a token.
    """
    taken = (jnp.arange(path.shape[1]) < count[:, None])[..., None]
    k, v, g, beta = (take_nodes(x.astype(jnp.float32), path) for x in (k, v, g, beta))
    rows = (repeat_heads(k, v.shape[2]), v, jnp.where(taken, g, 0.0), jnp.where(taken, beta, 0.0))
    path_first = tuple(jnp.swapaxes(x, 0, 1) for x in rows)
    return jax.lax.scan(lambda s, row: (step(s, *row)[0], None), state, path_first)[0]


def take_nodes(x: Float[Array, "B N *rest"], path: Int[Array, "B P"]) -> Float[Array, "B P *rest"]:
    """The rows of the nodes on a path."""
    return jax.vmap(lambda rows, index: rows[index])(x, path)
