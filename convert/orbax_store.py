"""Arrays by name in an Orbax checkpoint (OCDBT, zarr3), added a batch at a time. The only file that knows Orbax.

Orbax's ordinary `save` takes the whole tree at once. Its partial saves do not: each adds arrays to an unfinished
checkpoint in a directory of its own, renamed into place once it is on disk, and `finalize` merges the indexes of all
(never the data) into one checkpoint that any Orbax program reads as a whole. So memory is bounded by a batch, a killed
run keeps what it had finished, and nothing of Orbax's format has to be written by hand. The alternatives are worse: a
checkpoint a parameter is no single checkpoint, and TensorStore alone would need Orbax's metadata written by hand.
Partial saves are in `experimental` and may move: hence one file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint.experimental import v1 as ocp

from ddtree_jax.errors import InputError

CHUNK = 64 << 20  # bytes of a stored chunk: what a reader needs at once
DATA_FILE = 64 << 20  # bytes of a file at most: several are written, and forced to the disk, side by side
UNFINISHED = ".partial_save"  # what Orbax adds to the name of a checkpoint that is not finished


def _context() -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly compress, and it takes ten times as long
    context.array.saving.storage_options.chunk_byte_size = CHUNK
    context.array.saving.ocdbt_target_data_file_size = DATA_FILE
    context.memory.deepcopy_host_arrays = False  # nobody changes the arrays while they are written
    return context


def finished_saves(path: Path) -> set[str]:
    """The names of the directories that finished saves have left in an unfinished checkpoint."""
    unfinished = path.with_name(path.name + UNFINISHED)
    return {child.name for child in unfinished.iterdir()} if unfinished.is_dir() else set()


def keep_saves(path: Path, kept: set[str]) -> None:
    """Remove what all other saves have left, finished or not."""
    unfinished = path.with_name(path.name + UNFINISHED)
    if not kept:
        shutil.rmtree(unfinished, ignore_errors=True)
    for name in finished_saves(path) - kept:
        shutil.rmtree(unfinished / name)
    for started in path.parent.glob(f"{path.name}{UNFINISHED}?*"):
        shutil.rmtree(started)


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> Callable[[], Any]:
    """Start to add arrays to an unfinished checkpoint; returns what waits until they are there, and may be changed."""
    with _context():
        return ocp.partial.save_async(os.fspath(path), dict(arrays)).result


def finish(path: Path) -> None:
    """Make one checkpoint of all saves."""
    with _context():
        ocp.partial.finalize(os.fspath(path))


def load(
    path: Path, arrays: Mapping[str, jax.ShapeDtypeStruct], places: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
    """A whole checkpoint, cast, each array where `places` says. Raises InputError for what is missing or misshaped."""
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in arrays.items()}
    return _load(path, wanted, _context())


def read(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Some arrays of a checkpoint, for the host; of `arrays` only shapes and dtypes matter."""
    context = _context()
    context.pytree.loading.partial_load = True
    return _load(path, dict(arrays), context)


def _load(path: Path, wanted: dict[str, Any], context: ocp.Context) -> dict[str, Any]:
    try:
        with context:
            return ocp.load(os.path.abspath(path), wanted)
    except Exception as error:  # Orbax and TensorStore raise of everything, and all of it means the same
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{path} is damaged: {reason[0][:300]}; convert the checkpoint again") from error
