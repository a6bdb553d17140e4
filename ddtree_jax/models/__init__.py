"""The networks as Flax NNX modules: no loops over tokens, no sampling, and nothing that knows of files."""

from ddtree_jax.models.drafter import Drafter
from ddtree_jax.models.target import Target

__all__ = ["Drafter", "Target"]
