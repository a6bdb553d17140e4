"""Every name of a Pallas backend that the kernels use, so that another backend, or a version's change, is met here.

The kernels are written for the Triton backend (Ampere to Hopper), which JAX 0.11 deprecated and 0.12 still has. On
anything but a GPU they are interpreted, which is for tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.ops.dispatch import platform

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton

BlockSpec, cdiv, ds, program_id, next_power_of_2 = pl.BlockSpec, pl.cdiv, pl.ds, pl.program_id, pl.next_power_of_2
LEAST_SIDE = 16  # of a matrix product


def on_gpu() -> bool:
    """Whether kernels are compiled; else they are interpreted."""
    return platform() == "gpu"


def call(
    kernel: Callable[..., None],
    *arguments: jax.Array,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    stages: int = 1,
) -> Sequence[jax.Array]:
    """Run a kernel on every point of the grid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made = pl.pallas_call(
            kernel,
            name=name,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            out_shape=list(out_shape),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=not on_gpu(),
        )
        return made(*arguments)


def with_gradient_of(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, differentiated as `plain`: a kernel has no derivative of its own."""
    made = jax.custom_vjp(kernel)
    made.defvjp(lambda *x: (kernel(*x), x), lambda x, cotangent: jax.vjp(plain, *x)[1](cotangent))
    return made


def load(ref: Any, index: tuple[Any, ...], mask: jax.Array) -> jax.Array:
    """ref[index], zero where the mask is False (those entries are not read)."""
    return triton.load(ref.at[index], mask=mask, other=0)


def store(ref: Any, index: tuple[Any, ...], value: jax.Array, mask: jax.Array) -> None:
    """ref[index] = value where the mask is True."""
    triton.store(ref.at[index], value, mask=mask)


def barrier() -> None:
    """What the threads of a program wrote before is seen by all of them after. The interpreter has one thread."""
    if on_gpu():
        triton.debug_barrier()


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b with a float32 result; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def side(size: int) -> int:
    """The least power of two that holds `size` and that a matrix product can have as a side."""
    return max(LEAST_SIDE, pl.next_power_of_2(size))
