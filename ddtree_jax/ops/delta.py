"""What the delta-rule operations share: one token's step, decays along paths, the unit lower-triangular solve."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


def repeat_heads(x: Float[Array, "B N Hk dk"], heads: int) -> Float[Array, "B N Hv dk"]:
    """Key heads repeated to the value heads they serve, in float32: value head h uses key head h // (Hv // Hk)."""
    return jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2)


def step(
    state: Float[Array, "*batch dk dv"],
    k: Float[Array, "*batch dk"],
    v: Float[Array, "*batch dv"],
    g: Float[Array, "*batch"],
    beta: Float[Array, "*batch"],
) -> tuple[Float[Array, "*batch dk dv"], Float[Array, "*batch dv"]]:
    """The state after one token and the row u it wrote: S = exp(g) S + k u^T (reference_models.md 1.4)."""
    state = state * jnp.exp(g)[..., None, None]
    u = beta[..., None] * (v - read(state, k))
    return state + k[..., :, None] * u[..., None, :], u


def read(state: Float[Array, "*batch dk dv"], row: Float[Array, "*batch dk"]) -> Float[Array, "*batch dv"]:
    """S^T row."""
    return jnp.einsum("...kv,...k->...v", state, row, precision=HIGHEST)


def path_decays(
    g: Float[Array, "*batch heads N"], path: Bool[Array, "*#batch N N"]
) -> tuple[Float[Array, "*batch heads N 1"], Float[Array, "*batch heads N N"]]:
    """exp of the sum of g along a row's path: over all of it, and over what follows row j (0 where j is not on it).

    `path[i, j]`: row j is i or before it. The sums are taken directly: as differences of sums from the start they would
    lose the digits of a small g behind a large one (64 tokens of g down to -1000 cost 8e-4 in the output).
    """
    on_path = jnp.where(path[..., None, :, :], g[..., None, :], 0.0)
    before = (path & ~jnp.eye(path.shape[-1], dtype=bool)).astype(jnp.float32)
    after = jnp.einsum("...hin,...nj->...hij", on_path, before, precision=HIGHEST)
    decay = jnp.where(path[..., None, :, :], jnp.exp(after), 0.0)
    return jnp.exp(jnp.sum(on_path, axis=-1, keepdims=True)), decay


@jax.custom_vjp
def solve_unit_lower(
    strict: Float[Array, "*batch N N"], right: Float[Array, "*batch N M"]
) -> Float[Array, "*batch N M"]:
    """x of (I + strict) x = right, for a strictly lower-triangular matrix.

    By block inversion, matrix products only: XLA:CPU runs a batch of its triangular solves one after the other, four
    times slower for a whole model. Unlike a product of powers this never forms a number larger than the inverse has.
    """
    return _product(invert_unit_lower(strict), right)


def _solve_forward(strict, right):
    inverse = invert_unit_lower(strict)
    x = _product(inverse, right)
    return x, (inverse, x)


def _solve_backward(saved, cotangent):
    inverse, x = saved
    back = jnp.einsum("...ji,...jk->...ik", inverse, cotangent, precision=HIGHEST)
    return -jnp.einsum("...ik,...jk->...ij", back, x, precision=HIGHEST), back


solve_unit_lower.defvjp(_solve_forward, _solve_backward)


def invert_unit_lower(strict: Float[Array, "*batch N N"]) -> Float[Array, "*batch N N"]:
    """(I + strict)^-1, from the inverses of diagonal blocks of 1, 2, 4, ... rows.

    Two neighbours A and B with C below A join as inv([[A, 0], [C, B]]) = [[A', 0], [-B' C A', B']].
    """
    size = strict.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=strict.dtype), strict.shape)
    width = 1
    while width < size:
        block = index // width
        below = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        corner = jnp.where(below, strict, 0.0)
        inverse = inverse - (corner if width == 1 else _product(inverse, _product(corner, inverse)))
        width *= 2
    return inverse


def solve_by_depth(
    strict: Float[Array, "B Hv N N"], right: Float[Array, "B Hv N M"], depth: Int[Array, "B N"], max_depth: int
) -> Float[Array, "B Hv N M"]:
    """x of (I + strict) x = right where strict[i, j] is not 0 only for ancestors j of i.

    Forward substitution, all nodes of a depth at once; deeper nodes stay 0 until it is their turn (their partial sums
    would grow like binomials). A tree is shallow, so this is less work than inverting (N = 65, depth 7, on a CPU: half
    the time of block inversion, 1/75 of a batched triangular solve).
    """
    if right.shape[2] == 1:
        return right

    def level(d, x):
        return jnp.where((depth <= d)[:, None, :, None], right - _product(strict, x), 0.0)

    return jax.lax.fori_loop(1, max_depth + 1, level, jnp.where((depth == 0)[:, None, :, None], right, 0.0))


def _product(a, b):
    return jnp.einsum("...ij,...jk->...ik", a, b, precision=HIGHEST)
