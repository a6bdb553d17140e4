"""How each parameter is made from the tensors of a checkpoint: which, in which shapes, and what is done with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Int

from ddtree_jax.config import DeltaConfig, DrafterConfig, TargetConfig
from ddtree_jax.models.quantised import Block

Shape = tuple[int, ...]


def as_stored(tensor: np.ndarray) -> np.ndarray:
    """The `build` of most recipes: nothing is changed."""
    return tensor


@dataclass(frozen=True)
class Recipe:
    """A parameter is its tensors, each changed by `build`, one after the other.

    tensors: names (without prefix) and shapes on disk, in that order.
    """

    tensors: Mapping[str, Shape]
    build: Callable[[np.ndarray], np.ndarray] = as_stored

    def assemble(self, parts: Iterable[np.ndarray], shape: Shape, dtype: np.dtype) -> np.ndarray:
        """The parameter from its tensors, of which one at a time is needed.

        A single tensor that has the dtype already is not copied: the result may be a view of the mapped file.
        """
        if len(self.tensors) == 1:
            (part,) = parts
            return np.asarray(np.ascontiguousarray(self.build(part)), dtype).reshape(shape)
        result = np.empty(shape, dtype)
        for row, part in zip(result.reshape(len(self.tensors), -1), parts, strict=True):
            row[:] = self.build(part).reshape(-1)
        return result

    def keeps_blocks(self, shape: Shape, block: Block) -> bool:
        """Whether the blocks of the tensors are those of the parameter: no row moves, none ends short at a seam."""
        seams = (part[-2] for part in self.tensors.values() if part[-2:] != shape[-2:])
        return self.build is as_stored and not any(rows % block[0] for rows in seams)


def recipe(name: str, shape: Shape, config: TargetConfig | DrafterConfig, stored: Collection[str]) -> Recipe:
    """The recipe of parameter `name`, given the checkpoint's tensor names where files differ in their layout."""
    if name.endswith("conv1d.weight"):
        return Recipe({name: (shape[1], 1, shape[0])}, lambda w: w[:, 0, :].T)  # [C, 1, K] -> [K, C]
    if packed := re.fullmatch(r"(.*\.linear_attn\.)in_proj_(qkv|z|b|a)\.weight", name):
        if isinstance(config, TargetConfig) and config.packed_delta and config.delta is not None:
            return _packed_delta(packed[1], packed[2], shape[1], config.delta)
    if experts := re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", name):
        if name not in stored:
            return _stacked_experts(experts[1], experts[2], shape)
    if name == "draft_ids":
        return Recipe({"d2t": shape}, vocabulary_map)
    return Recipe({name: shape})


def vocabulary_map(offsets: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Token ids of a reduced draft vocabulary, from what has to be added to each of its indices (spec 5.6)."""
    return np.arange(len(offsets)) + offsets


def _stacked_experts(prefix: str, kind: str, shape: Shape) -> Recipe:
    """One tensor an expert (Qwen3-MoE and Qwen3-Next on the hub) -> [E, out, in]; gate rows before up rows."""
    count, rows, columns = shape
    if kind == "down_proj":
        tensors = {f"{prefix}{e}.down_proj.weight": (rows, columns) for e in range(count)}
        return Recipe(tensors)
    halves = [(e, half) for e in range(count) for half in ("gate_proj", "up_proj")]
    tensors = {f"{prefix}{e}.{half}.weight": (rows // 2, columns) for e, half in halves}
    return Recipe(tensors)


def _packed_delta(prefix: str, part: str, hidden: int, delta: DeltaConfig) -> Recipe:
    """Qwen3-Next groups rows by key head: q, k, v, z of one key head, then of the next; likewise b and a (spec 1.5)."""
    repeats = delta.num_value_heads // delta.num_key_heads
    if part in "ba":
        sizes = {"b": repeats, "a": repeats}
        tensors = {f"{prefix}in_proj_ba.weight": (2 * delta.num_value_heads, hidden)}
    else:
        sizes = dict(q=delta.key_dim, k=delta.key_dim, v=repeats * delta.value_dim, z=repeats * delta.value_dim)
        tensors = {f"{prefix}in_proj_qkvz.weight": (delta.channels + delta.value_width, hidden)}
    return Recipe(tensors, partial(unpack, heads=delta.num_key_heads, sizes=sizes, wanted=part))


def unpack(packed: np.ndarray, heads: int, sizes: Mapping[str, int], wanted: str) -> np.ndarray:
    """The rows of the kinds in `wanted`, one kind after the other, from rows grouped by head.

    packed: [heads * sum(sizes), hidden]; every head has its kinds in the order of `sizes`.
    """
    grouped = packed.reshape(heads, sum(sizes.values()), -1)
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    parts = [grouped[:, starts[kind] : starts[kind] + sizes[kind]] for kind in wanted]
    return np.concatenate([part.reshape(-1, packed.shape[-1]) for part in parts])
