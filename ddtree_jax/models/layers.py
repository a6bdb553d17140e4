"""The small layers that every network here shares. Modules and parameters are named as in Hugging Face checkpoints."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ddtree_jax.config import Llama3Scaling, RopeConfig, YarnScaling
from ddtree_jax.models.quantised import operands
from ddtree_jax.ops.dispatch import platform

INIT_STD = 0.02


def linear(
    x: Float[Array, "*batch i"], weight: Float[Array, "o i"], out_dtype: DTypeLike | None = None
) -> Float[Array, "*batch o"]:
    """x @ weight.T in the stored layout, accumulated in float32, in `out_dtype` (default: the dtype of x).

    On a CPU a bfloat16 product of a single row is ten times slower than one of two rows, so a lone row is doubled
    there.
    """
    rows = x.reshape(-1, x.shape[-1])
    lone = rows.shape[0] == 1 and weight.dtype == jnp.bfloat16 and platform() == "cpu"
    rows = jnp.concatenate([rows, rows]) if lone else rows
    y = jnp.einsum("ti,oi->to", rows, weight, preferred_element_type=jnp.float32)
    y = y[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], weight.shape[0])
    return y.astype(out_dtype or x.dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param:
    """A parameter drawn from N(0, 0.02), for training and tests; loading replaces it."""
    return nnx.Param(INIT_STD * jax.random.normal(rngs.params(), shape, dtype))


class Linear(nnx.Module):
    """A linear map without bias; the weight is [out, in] as on disk, which is also the faster layout on a CPU, in the
    network's dtype or FP8 (`quantised.py`).
    """

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = normal(rngs, (outputs, inputs), dtype)

    def __call__(self, x: Float[Array, "*batch i"], out_dtype: DTypeLike | None = None) -> Float[Array, "*batch o"]:
        return linear(*operands(self, "weight", x), out_dtype)


class Embedding(nnx.Module):
    """Token embedding, also the output head of a model with tied embeddings."""

    def __init__(self, vocab: int, hidden: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = normal(rngs, (vocab, hidden), dtype)

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch H"]:
        return self.weight[...][ids]


def normalise(x: Float[Array, "*batch d"], eps: float) -> Float[Array, "*batch d"]:
    """x / rms(x) in float32 (the result is float32 whatever x is)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (reference_models.md 1.1).

    zero_centred: scale by 1 + weight in float32, then cast (Qwen3.5). Otherwise cast first, then scale by weight
      (Qwen3, drafters).
    """

    def __init__(self, size: int, *, eps: float, zero_centred: bool, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros(size, dtype) if zero_centred else jnp.ones(size, dtype))
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        if self.zero_centred:
            return (normalise(x, self.eps) * (1.0 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return self.weight[...] * normalise(x, self.eps).astype(x.dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.gate_proj = Linear(hidden, inner, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(hidden, inner, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(inner, hidden, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_angles(position: Int[Array, "B N"], rope: RopeConfig, dtype: DTypeLike) -> Float[Array, "2 B N half"]:
    """cos and sin of every rotation, computed in float32 and cast to the activation dtype (reference_models.md 1.2)."""
    frequencies, amplitude = rope_frequencies(rope)
    angle = position[..., None].astype(jnp.float32) * frequencies
    return (amplitude * jnp.stack([jnp.cos(angle), jnp.sin(angle)])).astype(dtype)


def rope_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """float32 radians a position of every rotated pair, [rotary_dim / 2], and the factor on cos and sin (spec 1.2)."""
    pair = np.arange(0, rope.rotary_dim, 2)
    frequencies = (rope.theta ** -(pair / rope.rotary_dim)).astype(np.float32)
    match rope.scaling:
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(frequencies, rope, rope.scaling), rope.scaling.attention_factor
    return frequencies, 1.0


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Pairs that turn often within the original context stay, slow ones are divided by the factor, a ramp between."""
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / width, 0.0, 1.0)
    return (frequencies * (kept + (1.0 - kept) / scaling.factor)).astype(np.float32)


def _yarn(frequencies: np.ndarray, rope: RopeConfig, scaling: YarnScaling) -> np.ndarray:
    """Pairs are interpolated by a ramp over their index between the two betas (turns within the original context)."""

    def pair_of(turns: float) -> float:
        ratio = scaling.original_positions / (2 * np.pi * turns)
        return rope.rotary_dim * np.log(ratio) / (2 * np.log(rope.theta))

    low = max(np.floor(pair_of(scaling.beta_fast)), 0)
    high = min(np.ceil(pair_of(scaling.beta_slow)), rope.rotary_dim - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low if high > low else 0.001), 0.0, 1.0)
    return (frequencies / scaling.factor * ramp + frequencies * (1.0 - ramp)).astype(np.float32)


def rotate(x: Float[Array, "B N h D"], angles: Float[Array, "2 B N half"]) -> Float[Array, "B N h D"]:
    """Rotate the first 2*half dimensions of every head (two halves, not pairs); the others pass through untouched."""
    cos, sin = angles[:, :, :, None, :]
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
