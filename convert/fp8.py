"""FP8 weights with a scale a block: W = fp8 * scale_inv, a product despite the name (reference_models.md 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, Num

from convert.safetensors_file import TensorEntry
from ddtree_jax.models.quantised import SUFFIX, Block, scale_shape

STORED = np.dtype(ml_dtypes.float8_e4m3fn)
LONE_SCALE = "scale without a tensor"
WIDE = np.arange(256, dtype=np.uint8).view(STORED).astype(np.float32)  # by bits: three times as fast as a cast


def dequantise(
    weight: Num[np.ndarray, "*E out in"], scale: Float[np.ndarray, "*E rows columns"], block: Block
) -> Float[np.ndarray, "*E out in"]:
    """The float32 weight. Blocks at the lower and right edge may be partial; one row of blocks is widened at a time."""
    result = np.empty(weight.shape, np.float32)
    columns = weight.shape[-1]
    for *expert, row in np.ndindex(scale.shape[:-1]):
        rows = (*expert, slice(row * block[0], (row + 1) * block[0]))
        factors = np.repeat(scale[(*expert, row)].astype(np.float32), block[1])[:columns]
        np.multiply(WIDE[weight[rows].view(np.uint8)], factors, out=result[rows])
    return result


def scale_names(entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Weight name -> the name of its scales, for all weights that have some."""
    pairs = ((name.removesuffix(SUFFIX), name) for name in entries if name.endswith(SUFFIX))
    return {weight: scale for weight, scale in pairs if weight in entries}


def problems(
    entries: Mapping[str, TensorEntry], block: Block | None, read: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, str]]:
    """Kind and tensor of all that keeps FP8 weights from being read: weights without scales, scales without weights,
    scales that do not fit or are no scales. read: gives the values of scales.
    """
    scales = scale_names(entries)
    paired = set(scales.values())
    for name, entry in entries.items():
        if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) not in entries:
            yield LONE_SCALE, name
        elif name in scales:
            if trouble := _trouble(entry, entries[scales[name]], block) or _odd_values(read(scales[name])):
                yield "scale", f"{scales[name]} {trouble}"
        elif entry.dtype.name.startswith("float8") and name not in paired:
            yield "fp8 without a scale", name


def _odd_values(scale: np.ndarray) -> str:
    """What is wrong with the values of scales, '' when nothing is."""
    values = scale.astype(np.float32)
    odd = values[~((values >= 0) & (values < np.inf))]  # a block of zeros may have the scale 0
    return f"has {odd.size} values that are negative or not finite, the first is {odd[0]}" if odd.size else ""


def _trouble(weight: TensorEntry, scale: TensorEntry, block: Block | None) -> str:
    """What is wrong with a weight's scales, '' when nothing is."""
    if weight.dtype != STORED:
        return f"belongs to a tensor of {weight.dtype}, not {STORED}"
    if block is None:
        return "is there, but config.json has no quantization_config"
    if scale.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"is {scale.dtype}"
    if len(weight.shape) < 2 or scale.shape != scale_shape(weight.shape, block):
        return f"is {list(scale.shape)} for a tensor of {list(weight.shape)} in blocks of {list(block)}"
    return ""
