"""A recording of what PyTorch computed (`reference.py` writes it), read and checked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_jax.config import TargetConfig
from ddtree_jax.errors import InputError

LAYERED = re.compile(r"(hidden|mixer|mlp)_(\d+)")
DTYPES = ("float32", "bfloat16")  # in which PyTorch may have run


@dataclass(frozen=True)
class Recording:
    """ids [T]; logits [T, V]; layered: hidden_II, mixer_II, mlp_II [T, H]; greedy, margin [G]; meta: its origin."""

    ids: np.ndarray
    logits: np.ndarray
    layered: dict[str, np.ndarray]
    greedy: np.ndarray
    margin: np.ndarray
    meta: dict[str, Any]

    @property
    def dtype(self) -> str:
        """The dtype PyTorch ran in."""
        return self.meta.get("dtype", "float32")

    def inputs(self, num_layers: int) -> dict[int, np.ndarray]:
        """What went into each layer, by layer number, of those whose output is there too."""
        names = {i: f"hidden_{i:02d}" for i in range(num_layers + 1)}
        return {
            i: self.layered[names[i]]
            for i in range(num_layers)
            if names[i] in self.layered and names[i + 1] in self.layered
        }

    def check_against(self, config: TargetConfig) -> None:
        """Raise InputError, every reason listed, unless this can be a recording of such a model."""
        tokens, vocab = self.logits.shape
        expected = (tokens, config.hidden_size)
        beyond = config.num_layers + 1
        problems = [
            (self.ids.shape == (tokens,), f"{self.ids.shape} token ids for {tokens} rows of logits"),
            (vocab == config.vocab_size, f"vocabulary {vocab}, the checkpoint has {config.vocab_size}"),
            (self.num_layers == config.num_layers, f"{self.num_layers} layers, the checkpoint has {config.num_layers}"),
            *((x.shape == expected, f"{n} is {x.shape}, should be {expected}") for n, x in self.layered.items()),
            *((_layer(n) < beyond, f"{n} is of no layer") for n in self.layered),
        ]
        if wrong := [text for ok, text in problems if not ok]:
            raise InputError("the recording is not of this checkpoint: " + "; ".join(wrong[:6]))

    @property
    def num_layers(self) -> int:
        """The number of the last hidden state, which is that of the layers."""
        return max((_layer(name) for name in self.layered if name.startswith("hidden")), default=0)


def _layer(name: str) -> int:
    return int(name.rpartition("_")[2])


def read_recording(path: str | Path) -> Recording:
    """Read the file; InputError when it is none or lacks something."""
    arrays = read_npz(path)
    if missing := sorted({"input_ids", "logits"} - arrays.keys()):
        raise InputError(f"{path} lacks {', '.join(missing)}; write it with python -m convert reference")
    logits, ids = arrays["logits"], arrays["input_ids"]
    if logits.ndim != 2:
        raise InputError(f"{path}: logits should be [tokens, vocabulary], found shape {logits.shape}")
    if 0 in logits.shape:
        raise InputError(f"{path}: logits are of no tokens, shape {logits.shape}")
    layered = {name: x for name, x in arrays.items() if LAYERED.fullmatch(name)}
    greedy = arrays.get("greedy", np.zeros(0, np.int32))
    margin = arrays.get("greedy_margin", np.full(greedy.shape, np.inf, np.float32))
    for name, x in ({"logits": logits, "greedy_margin": margin} | layered).items():
        if x.dtype.kind != "f":
            raise InputError(f"{path}: {name} should be floating point numbers, found {x.dtype}")
    _check_tokens(path, "input_ids", ids, logits.shape[1])
    _check_tokens(path, "greedy", greedy, logits.shape[1])
    if margin.shape != greedy.shape:
        raise InputError(f"{path}: greedy_margin is {margin.shape}, greedy {greedy.shape}")
    return Recording(ids, logits, layered, greedy, margin, _read_meta(path, arrays))


def _check_tokens(path: str | Path, name: str, ids: np.ndarray, vocab: int) -> None:
    """Raise InputError unless these are token ids [T] of the vocabulary."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{path}: {name} should be a list of whole numbers, found {ids.dtype} of shape {ids.shape}")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
        raise InputError(f"{path}: {name} should be token ids from 0 to {vocab - 1}, found {ids.min()} to {ids.max()}")


def _read_meta(path: str | Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Where the recording comes from; {} where it does not say."""
    try:
        meta = json.loads(str(arrays.get("meta", "{}")))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: meta is no JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("dtype", "float32") not in DTYPES:
        raise InputError(f"{path}: meta should be a JSON object, with a dtype of {' or '.join(DTYPES)} if any")
    return meta


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. No pickle is ever loaded."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except Exception as error:  # damaged files make zip, deflate and array readers fail in a dozen ways
        raise InputError(f"{path} cannot be read as an .npz file: {' '.join(str(error).split())}") from None
    if strange := sorted(name for name, x in arrays.items() if not isinstance(x, np.ndarray)):
        raise InputError(f"{path} cannot be read as an .npz file: {', '.join(map(repr, strange[:3]))} is no .npy file")
    return arrays
