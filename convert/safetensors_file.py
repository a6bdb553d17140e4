"""A memory-mapped reader of safetensors files: eight bytes of header length, a JSON header, then the tensors' bytes.

Written out because the public reader copies every tensor and cannot give NumPy bfloat16 or float8.
"""

from __future__ import annotations

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
MAX_HEADER = 100 << 20
MAX_AXES = 64  # NumPy's limit
LFS_POINTER = b"version "  # how the text file begins that Git leaves in place of a large file it has not fetched


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are byte offsets in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One safetensors file. Opening checks the header against the file's size; reading maps, and copies nothing.

    Raises InputError for a file that cannot be read, a broken header, entries that contradict their shape or each
    other, and a file shorter or longer than its header says.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            kind, size = path.stat().st_mode, path.stat().st_size
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # a pipe would block; a directory says so itself
                raise InputError(f"{path} is not a regular file")
            header, base = self._header(size)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        self._base = base
        self.entries = {name: self._entry(name, info, base) for name, info in header.items() if name != "__metadata__"}
        self._check_layout(base, size)

    def _header(self, size: int) -> tuple[dict[str, Any], int]:
        """The JSON header, and the offset at which the tensors begin."""
        with self.path.open("rb") as file:
            prefix = file.read(8)
            if prefix == LFS_POINTER:
                raise InputError(f"{self.path} is a Git LFS pointer, not the file itself; fetch it with git lfs pull")
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER, size - 8):
                raise InputError(f"{self.path} is not a safetensors file or is truncated ({size} bytes)")
            text = file.read(length)
        try:
            header = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise InputError(f"{self.path} has a broken safetensors header; copy the file again")
        return header, 8 + length

    def _entry(self, name: str, info: Any, base: int) -> TensorEntry:
        try:
            dtype = np.dtype(DTYPES[info["dtype"]])
            shape = _shape(info["shape"])
            start, end = (base + _count(n) for n in info["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{self.path}: tensor {name[:99]} has an entry that cannot be read: {str(info)[:200]}"
            ) from None
        if end - start != dtype.itemsize * math.prod(shape):
            raise InputError(
                f"{self.path}: tensor {name} has {end - start} bytes for {dtype} of shape {list(shape)}; "
                "copy the file again"
            )
        return TensorEntry(dtype, shape, start, end)

    def _check_layout(self, base: int, size: int) -> None:
        """The tensors fill the file: no hole, no overlap, no byte too few or too many."""
        end = base
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.start, entry.end)):
            if entry.start != end:
                raise InputError(f"{self.path}: the tensors in its header overlap or leave holes; copy the file again")
            end = entry.end
        if end != size:
            what = "is truncated" if end > size else "is longer than its header says"
            raise InputError(f"{self.path} {what}: {end} bytes are declared, {size} are there; copy the file again")

    def header_bytes(self) -> bytes:
        """The header as it lies in the file, with its length."""
        with self.path.open("rb") as file:
            return file.read(self._base)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only array over the mapped file."""
        entry = self.entries[name]
        if entry.end == entry.start:
            return np.zeros(entry.shape, entry.dtype)
        raw = np.memmap(self.path, np.uint8, "r", entry.start, (entry.end - entry.start,))
        return raw.view(entry.dtype).reshape(entry.shape)


def _shape(value: Any) -> tuple[int, ...]:
    """A shape that NumPy can have; ValueError for any other."""
    if type(value) is not list or len(value) > MAX_AXES:
        raise ValueError(value)
    shape = tuple(_count(n) for n in value)
    if 0 in shape and math.prod(n for n in shape if n) >= 2**59:  # NumPy multiplies the other axes and overflows
        raise ValueError(value)
    return shape


def _count(value: Any) -> int:
    """A size or an offset; ValueError for anything but a whole number from 0 up to the largest file."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for one with a name twice."""
    if len(result := dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return result
