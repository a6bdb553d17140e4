"""A checkpoint's tensors -> the parameters of a module, strictly: every mismatch is reported, all at once."""

from __future__ import annotations

import logging
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert.checkpoint import Checkpoint, summary
from convert.recipes import Recipe, Shape, recipe
from ddtree_jax.errors import InputError
from ddtree_jax.models.network import Network, NetworkSpec

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")  # first match wins
SKIPPED = ("mtp.", "model.visual.", "visual.")  # families that text decoding does not need
LOG = logging.getLogger(__name__)


def load_network(checkpoint: Checkpoint, spec: NetworkSpec) -> Network:
    """Fill a network from a checkpoint.

    Weights are cast to the dtype the module declares for them (the model's, or float32 where Hugging Face computes in
    float32). Raises InputError listing all missing, unknown and misshaped tensors, and those that hold no floating
    point numbers; no parameter ever keeps an initial value.
    """
    _, state = spec.abstract()
    # jax orders a state's leaves by path, and the flat state has the same order: that of `Network.leaves`
    wanted = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    sources = _sources(checkpoint, tied="lm_head.weight" not in wanted)
    made = {name: recipe(name, leaf.shape, spec.config, sources) for name, leaf in wanted.items()}
    needed = {tensor: shape for recipe in made.values() for tensor, shape in recipe.tensors.items()}
    problems = _problems(checkpoint, needed, sources)
    if problems:
        raise InputError(f"{checkpoint.directory} does not fit {spec.module.__name__}: {problems}")
    if left_out := skipped(checkpoint):
        LOG.info("%s: tensors left out: %s", checkpoint.directory, dict(left_out))
    leaves = [_place(checkpoint, made[name], sources, leaf.dtype) for name, leaf in wanted.items()]
    return Network(tuple(leaves), spec)


def skipped(checkpoint: Checkpoint) -> Counter[str]:
    """How many tensors of each family are left out on purpose."""
    families = (next((f for f in SKIPPED if name.startswith(f)), None) for name in checkpoint.names())
    return Counter(family for family in families if family)


def _problems(checkpoint: Checkpoint, shapes: dict[str, Shape], sources: dict[str, str]) -> str:
    """Everything that keeps the tensors from being those that are needed, '' when nothing does."""
    both = shapes.keys() & sources.keys()
    wrong = [
        f"{name} is {list(checkpoint.shape(sources[name]))}, should be {list(shapes[name])}"
        for name in both
        if checkpoint.shape(sources[name]) != shapes[name]
    ]
    kinds = {name: checkpoint.dtype(sources[name]) for name in both}
    packed = [f"{name} is {kind}" for name, kind in kinds.items() if not jnp.issubdtype(kind, jnp.floating)]
    return (
        summary("missing", shapes.keys() - sources.keys())
        + summary("unknown", sources.keys() - shapes.keys())
        + summary("shape", wrong)
        + summary("not floating point", packed)
    ).removesuffix("; ")


def _sources(checkpoint: Checkpoint, tied: bool) -> dict[str, str]:
    """Module parameter name -> tensor name, with prefixes removed and skipped families left out."""
    sources: dict[str, str] = {}
    for name in checkpoint.names():
        if name.startswith(SKIPPED):
            continue
        short = next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name)
        if short in sources:
            raise InputError(f"{checkpoint.directory}: {name} and {sources[short]} are the same parameter")
        sources[short] = name
    if tied and "lm_head.weight" in sources and "embed_tokens.weight" in sources:
        _check_tied(checkpoint, sources.pop("lm_head.weight"), sources["embed_tokens.weight"])
    return sources


def _check_tied(checkpoint: Checkpoint, head: str, embedding: str) -> None:
    """A tied checkpoint may repeat its head, but not with other values: that would be a silent change of the model."""
    if checkpoint.shape(head) != checkpoint.shape(embedding) or not np.array_equal(
        checkpoint.read(head), checkpoint.read(embedding)
    ):
        raise InputError(
            f"{checkpoint.directory}: tie_word_embeddings is true, but {head} differs from {embedding}; "
            "set it to false in config.json, or remove the head"
        )


def _place(checkpoint: Checkpoint, made: Recipe, sources: dict[str, str], dtype: DTypeLike) -> jax.Array:
    tensor = made.build(*(checkpoint.read(sources[name]) for name in made.tensors))
    return jnp.asarray(np.array(tensor, dtype=dtype))  # np.array copies: a parameter outlives the mapped file
