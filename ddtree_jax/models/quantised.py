"""Weights that stay FP8, with a scale a block, and are dequantised inside products (reference_models.md 2.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

SUFFIX = "_scale_inv"  # the scales of parameter X are parameter X_scale_inv, as in Hugging Face files
STORED = jnp.float8_e4m3fn
Block = tuple[int, int]


@dataclass(frozen=True)
class Quantised:
    """Which parameters of a network stay FP8, by name, and how many rows and columns share a scale."""

    names: tuple[str, ...]
    block: Block


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The shape of a weight's scales: one a block, partial blocks included."""
    *experts, rows, columns = shape
    return (*experts, math.ceil(rows / block[0]), math.ceil(columns / block[1]))


def quantise(module: nnx.Module, kept: Quantised) -> None:
    """Give every kept parameter of a module its FP8 type, and scales beside it; what it held is lost."""
    for name in kept.names:
        *path, last = name.split(".")
        owner = _follow(module, path)
        shape = getattr(owner, last).shape
        setattr(owner, last, nnx.Param(jnp.zeros(shape, STORED)))
        setattr(owner, last + SUFFIX, nnx.Param(jnp.ones(scale_shape(shape, kept.block), jnp.float32)))
        owner.block = kept.block


def _follow(module: Any, path: Iterable[str]) -> Any:
    for step in path:
        module = module[int(step)] if step.isdigit() else getattr(module, step)
    return module


def operands(
    module: Any, name: str, x: Float[Array, "*batch i"]
) -> tuple[Float[Array, "*batch i"], Float[Array, "*E o i"]]:
    """x, and the weight `name` of a module for a product with it, dequantised to the dtype of x where it is FP8.

    Dequantisation waits for x. Otherwise compilers do it early, and hold the weights of all layers in the wide dtype at
    once: the barrier keeps it from being moved out of the decode loop, and when that has done its work and is gone, the
    zero keeps it from being scheduled at the start of a pass (XLA's CPU scheduler does that).
    """
    weight = getattr(module, name)[...]
    scale = getattr(module, name + SUFFIX, None)
    if scale is None:
        return x, weight
    x, weight, factors = jax.lax.optimization_barrier((x, weight, scale[...]))
    return x, dequantise(weight, factors + _zero_after(x), module.block, x.dtype)


def _zero_after(x: Float[Array, "*batch i"]) -> Float[Array, ""]:
    """0.0, of which a compiler knows only that it comes from x: no 32 bits have 64 ones among them."""
    bits = jax.lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
    return (jax.lax.population_count(bits) >> 6).astype(jnp.float32)


def dequantise(
    weight: Float[Array, "*E o i"], scale: Float[Array, "*E rows columns"], block: Block, dtype: DTypeLike
) -> Float[Array, "*E o i"]:
    """weight * scale, a product despite the scale's name, in float32, rounded to `dtype`."""
    *_, rows, columns = weight.shape
    by_row = jnp.repeat(scale, block[0], axis=-2)[..., :rows, :]
    factors = jnp.repeat(by_row, block[1], axis=-1)[..., :columns]
    return (weight.astype(jnp.float32) * factors).astype(dtype)
