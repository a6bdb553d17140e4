"""What a pass has to read and compute at least, from the configuration: for the floor and for the roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.timing import timed
from ddtree_jax.config import FULL, TargetConfig
from ddtree_jax.models.network import NetworkSpec


@dataclass(frozen=True)
class Work:
    """Bytes moved and floating-point operations, both the least that a pass needs."""

    nbytes: float
    operations: float


def target_pass(spec: NetworkSpec, rows: int, context: int) -> Work:
    """One pass of a target over `rows` tokens after `context` committed ones: its weights, caches and products."""
    config: TargetConfig = spec.config
    attention = config.attention
    full = config.layer_types.count(FULL)
    seen = context + rows / 2
    operations = 2 * rows * active_parameters(spec) + 4 * rows * full * attention.num_heads * attention.head_dim * seen
    nbytes = weight_bytes(spec, rows)
    nbytes += 2 * full * attention.num_kv_heads * attention.head_dim * (context + rows) * spec.dtype.itemsize
    if config.delta:
        state = config.delta.num_value_heads * config.delta.key_dim * config.delta.value_dim
        linear = config.num_layers - full
        nbytes, operations = nbytes + 4 * linear * state, operations + 8 * rows * linear * state
    return Work(nbytes, operations)


def weight_bytes(spec: NetworkSpec, rows: int) -> float:
    """Bytes of the weights that a pass over `rows` tokens reads; of experts as many as random tokens reach on average,
    of an embedding that is not also the head only the rows looked up.
    """
    return sum(
        math.prod(x.shape) * x.dtype.itemsize * _share(spec.config, name, rows) for name, x in spec.parameters().items()
    )


def active_parameters(spec: NetworkSpec) -> float:
    """Numbers that one token is multiplied with."""
    matrices = {name: x for name, x in spec.parameters().items() if len(x.shape) > 1}
    return sum(math.prod(x.shape) * _share(spec.config, name, 1) for name, x in matrices.items())


def _share(config: TargetConfig, name: str, rows: int) -> float:
    """How much of a parameter is read."""
    if name.startswith("embed_tokens") and not config.tie_word_embeddings:
        return min(rows / config.vocab_size, 1.0)
    if ".experts." in name and config.moe is not None:
        return 1 - (1 - config.moe.top_k / config.moe.num_experts) ** rows
    return 1.0


def copy_bandwidth(nbytes: int, turns: int) -> float:
    """Bytes a second, read and written, of copying an array of `nbytes` (and adding 1, or nothing would be copied)."""
    source = jnp.arange(nbytes // 4, dtype=jnp.uint32)
    call = jax.jit(lambda x: x + 1)
    return 2 * nbytes / timed(lambda: call(source), turns).seconds


def peak_operations(size: int, dtype: str, turns: int) -> float:
    """Floating-point operations a second of a square matrix product."""
    left, right = (jax.random.normal(jax.random.key(seed), (size, size), jnp.dtype(dtype)) for seed in (0, 1))
    call = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
    return 2 * size**3 / timed(lambda: call(left, right), turns).seconds
