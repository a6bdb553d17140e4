"""Tensor parallelism: which axis of a parameter or a cache is split over a mesh; XLA moves what has to move.

A mesh has one axis. Heads, the inner width of feed-forwards, experts and the vocabulary are split; small parameters and
whatever a number of devices does not divide are on all of them. A network that is placed on a mesh carries it, and
everything jitted that takes the network runs there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError

AXIS = "model"

# Parameter -> the axis that is split, and what must be a multiple of the number of devices.
_RULES: tuple[tuple[str, int, Callable[[Any], int]], ...] = (
    (r"self_attn\.q_proj", 0, lambda c: c.attention.num_heads),
    (r"self_attn\.[kv]_proj", 0, lambda c: c.attention.num_kv_heads),
    (r"self_attn\.o_proj", 1, lambda c: c.attention.num_heads),
    (r"linear_attn\.in_proj_(qkv|z|b|a)\.", 0, lambda c: c.delta.num_key_heads),
    (r"linear_attn\.out_proj", 1, lambda c: c.delta.num_key_heads),
    (r"experts\.(gate_up_proj|down_proj)", 0, lambda c: c.moe.num_experts),
    (r"(mlp|shared_expert)\.(gate|up)_proj\.", 0, lambda c: 0),
    (r"(mlp|shared_expert)\.down_proj\.", 1, lambda c: 0),
    (r"^(embed_tokens|lm_head|fc)\.", 0, lambda c: 0),
)


def make_mesh(devices: int | Sequence[jax.Device]) -> Mesh:
    """A mesh of these devices, or of the first so many; InputError when there are not enough."""
    if isinstance(devices, int):
        there = jax.devices()
        if not 1 <= devices <= len(there):
            raise InputError(f"tensor_parallel is {devices}, but JAX has {len(there)} device(s)")
        devices = there[:devices]
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def partition(name: str, shape: tuple[int, ...], config: TargetConfig | DrafterConfig, devices: int) -> PartitionSpec:
    """How a parameter of this checkpoint name is split over so many devices."""
    for pattern, axis, unit in _RULES:
        if re.search(pattern, name):
            fits = shape[axis] % devices == 0 and unit(config) % devices == 0
            return PartitionSpec(*[None] * axis, AXIS) if fits else PartitionSpec()
    return PartitionSpec()


def shardings(
    shapes: dict[str, jax.ShapeDtypeStruct], config: TargetConfig | DrafterConfig, mesh: Mesh | None
) -> dict[str, Sharding]:
    """Where every parameter goes, by name; without a mesh, to the first device."""
    if mesh is None:
        return dict.fromkeys(shapes, SingleDeviceSharding(jax.devices()[0]))
    return {n: NamedSharding(mesh, partition(n, leaf.shape, config, mesh.size)) for n, leaf in shapes.items()}


def devices_traced_for() -> int:
    """Over how many devices the program that is being traced is split (see `on_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[AXIS] if AXIS in mesh.axis_names else 1


def split(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Inside a jitted function that runs on a mesh: `x` split along an axis if the devices divide it, else on all."""
    if (devices := devices_traced_for()) == 1:
        return x
    fits = x.shape[axis] % devices == 0
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * axis, AXIS) if fits else PartitionSpec())


def over_experts(
    function: Callable, rows: Shaped[Array, "M H"], sizes: Shaped[Array, " E"], weights: Any
) -> Shaped[Array, "M H"]:
    """function(rows, sizes, weights) of rows sorted by expert, on a mesh each device with its own experts' weights.

    weights: a pytree whose arrays all have the experts first. Rows are few (nodes times chosen experts) and weights are
    many: all devices have all rows, turned so that those of their own experts come first; a row's result is the sum
    over devices, of which one has it.
    """
    devices = devices_traced_for()
    if devices == 1 or sizes.shape[0] % devices:
        return function(rows, sizes, weights)

    def own(rows, sizes, weights):
        count = jax.tree.leaves(weights)[0].shape[0]
        first = jax.lax.axis_index(AXIS) * count
        begin = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0))
        mine = jax.lax.dynamic_slice_in_dim(sizes, first, count)
        made = function(jnp.roll(rows, -begin, axis=0), mine, weights)
        there = (jnp.arange(len(rows)) < jnp.sum(mine))[:, None]
        return jax.lax.psum(jnp.roll(jnp.where(there, made, 0), begin, axis=0), AXIS)

    whole, by_expert = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(own, in_specs=(whole, whole, by_expert), out_specs=whole)(rows, sizes, weights)


def replicate(tree: Any) -> Any:
    """Inside a jitted function that runs on a mesh: every array of a pytree whole on all devices, for the host."""
    if devices_traced_for() == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def on_mesh(mesh: Mesh | None) -> Any:
    """A context for tracing: constraints and shard_map inside mean this mesh."""
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def on_its_mesh(function: Callable) -> Callable:
    """Decorates what is jitted: traced on the mesh of its first argument, a `Network`."""

    @wraps(function)
    def traced(target, *args, **kwargs):
        with on_mesh(target.mesh):
            return function(target, *args, **kwargs)

    return traced
