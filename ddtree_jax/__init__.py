"""Exact speculative decoding of Qwen hybrids with draft trees, as one jitted device loop.

The public API is `load`, `generate` and `stream`; `Model`, `Result`, `Piece` are what they give, `InputError` is what
they raise for a
user's mistake. Importing the package is cheap: jax is imported with the first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_jax.generation import Piece, Result, generate, stream
    from ddtree_jax.loading import Model, load

from ddtree_jax.errors import InputError

__version__ = "0.1.0"
__all__ = ["InputError", "Model", "Piece", "Result", "generate", "load", "stream"]

_HOME = {"Model": "loading", "load": "loading", "Piece": "generation", "Result": "generation"} | dict.fromkeys(
    ("generate", "stream"), "generation"
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"ddtree_jax.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ddtree_jax' has no attribute {name!r}")
