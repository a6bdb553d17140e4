"""A memory-mapped reader of safetensors files: eight bytes of header length, a JSON header, then the bytes of the
tensors.

Written out because the public reader copies every tensor and cannot give NumPy bfloat16 or float8.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from ddtree_jax.errors import InputError

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are byte offsets in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One safetensors file. Opening checks the header against the file's size; reading maps, and copies nothing."""

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER, size - 8):
                raise InputError(f"{path} is not a safetensors file or is truncated ({size} bytes)")
            try:
                header = json.loads(file.read(length))
            except ValueError:
                raise InputError(f"{path} has a broken safetensors header; copy the file again") from None
        header.pop("__metadata__", None)
        self.entries = {name: self._entry(name, info, 8 + length) for name, info in header.items()}
        needed = max((entry.end for entry in self.entries.values()), default=0)
        if needed > size:
            raise InputError(f"{path} is truncated: {needed} bytes are declared, {size} are there; copy the file again")

    def _entry(self, name: str, info: dict, base: int) -> TensorEntry:
        try:
            dtype = np.dtype(DTYPES[info["dtype"]])
            shape = tuple(int(n) for n in info["shape"])
            start, end = (base + int(n) for n in info["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{self.path}: tensor {name} has an entry that cannot be read: {info}") from None
        if end - start != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
            raise InputError(f"{self.path}: tensor {name} declares {end - start} bytes for shape {list(shape)}")
        return TensorEntry(dtype, shape, start, end)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only array over the mapped file."""
        entry = self.entries[name]
        if entry.end == entry.start:
            return np.zeros(entry.shape, entry.dtype)
        raw = np.memmap(self.path, np.uint8, "r", entry.start, (entry.end - entry.start,))
        return raw.view(entry.dtype).reshape(entry.shape)
