"""A network as a flat pytree: what jitted functions take, so that a call flattens a tuple and never walks a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ddtree_jax import parallel
from ddtree_jax.models.quantised import Quantised, quantise


@dataclass(frozen=True)
class NetworkSpec:
    """What a network is, apart from its weights: module class, configuration, dtype, and which weights stay FP8.

    Hashable, so it is jit's static key.
    """

    module: type[Any]
    config: Any
    dtype: jnp.dtype
    fp8: Quantised | None = None

    def abstract(self) -> tuple[nnx.GraphDef, nnx.State]:
        """Structure and abstract parameters; nothing is allocated, and each spec is traced once a process."""
        return _abstract(self)

    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape and dtype of all parameters, in the order of `Network.leaves`."""
        _, state = self.abstract()
        # jax orders a state's leaves by path, and the flat state has the same order: that of `Network.leaves`
        return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}

    def bind(self, leaves: tuple[jax.Array, ...]) -> nnx.Module:
        """The module with these leaves as parameters, in the order of `jax.tree.leaves` of the abstract state."""
        graph, state = self.abstract()
        return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


@cache
def _abstract(spec: NetworkSpec) -> tuple[nnx.GraphDef, nnx.State]:
    def build() -> nnx.Module:
        module = spec.module(spec.config, rngs=nnx.Rngs(0), dtype=spec.dtype)
        if spec.fp8:
            quantise(module, spec.fp8)
        return module

    return nnx.split(nnx.eval_shape(build))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Network:
    """Weights of one network with its spec; a pytree. `module()` is meant for use inside jit.

    mesh: the devices over which the weights are split, or None: they are on one.
    """

    leaves: tuple[jax.Array, ...]
    spec: NetworkSpec = field(metadata=dict(static=True))
    mesh: Mesh | None = field(default=None, metadata=dict(static=True))

    def module(self) -> Any:
        """The NNX module over these leaves (a view: calls read, nothing is mutated)."""
        return self.spec.bind(self.leaves)

    @property
    def config(self) -> Any:
        """The network's configuration."""
        return self.spec.config

    @property
    def num_parameters(self) -> int:
        """How many numbers the weights hold."""
        return sum(leaf.size for leaf in self.leaves)

    def place(self, mesh: Mesh) -> Network:
        """The network split over a mesh."""
        places = parallel.shardings(self.spec.parameters(), self.spec.config, mesh).values()
        leaves = tuple(jax.device_put(x, place) for x, place in zip(self.leaves, places, strict=True))
        return Network(leaves, self.spec, mesh)

    @classmethod
    def of(cls, module: Any) -> Network:
        """Flatten a live Target or Drafter (training, tests)."""
        spec = NetworkSpec(type(module), module.config, module.dtype)
        return cls(tuple(jax.tree.leaves(nnx.split(module)[1])), spec)
