"""A Hugging Face checkpoint directory: its JSON files and its tensors, single file or shards, FP8 dequantised."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from convert import fp8
from convert.safetensors_file import SafetensorsFile, TensorEntry
from ddtree_jax.config import quantised_block
from ddtree_jax.errors import InputError
from ddtree_jax.files import read_object, read_object_if_there

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Directory:
    """A directory with a config.json: what a Hugging Face checkpoint and a converted one have in common.

    Raises InputError for a directory that is not there, and for files that are links to somewhere else.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        # os.path, not pathlib: pathlib raises for names that are too long and for directories that may not be searched
        if not os.path.isdir(self.directory):
            raise InputError(f"{self.directory} is not a directory; give a local Hugging Face checkpoint directory")
        if not os.path.exists(self.directory / "config.json"):
            raise InputError(f"{self.directory} has no config.json; give a Hugging Face checkpoint directory")
        self.config = read_object(self.file("config.json"))

    def file(self, name: str) -> Path:
        """The path of a file of the directory, there or not; InputError for a name or a link that leaves it.

        Links inside the Hugging Face hub's cache, from `snapshots/REVISION` to `blobs`, are followed.
        """
        if "\0" in name:
            raise InputError(f"{self.directory}: {name!r} is no name of a file")
        path, home = self.directory / name, Path(os.path.realpath(self.directory))
        real = Path(os.path.realpath(path))  # unlike Path.resolve it raises neither for loops nor for long names
        hub = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
        if not any(real.is_relative_to(place) for place in (home, *hub)):
            raise InputError(f"{path} leaves the directory (it is {real}); only files inside it are read")
        return path

    def json(self, name: str) -> dict[str, Any]:
        """Another JSON file of the directory, or {} when it is not there."""
        return read_object_if_there(self.file(name))


class Checkpoint(Directory):
    """An opened checkpoint: `config`, and tensors by name.

    Every file is checked when it is opened, before anything is computed. Raises InputError for whatever is missing,
    truncated or contradictory. FP8 weights (with their scales) are one float32 tensor each; `problems` lists those that
    cannot be.
    """

    def __init__(self, directory: str | Path):
        super().__init__(directory)
        self.block = quantised_block(self.config)
        self._files = self._open()
        self._scales = fp8.scale_names(self._entries())
        self._hidden = frozenset(self._scales.values())

    def _open(self) -> dict[str, SafetensorsFile]:
        """Tensor name -> the file that holds it. A single file wins over an index, as in Hugging Face."""
        if os.path.exists(self.file(SINGLE)):
            file = SafetensorsFile(self.directory / SINGLE)
            return dict.fromkeys(file.entries, file)
        if not os.path.exists(self.file(INDEX)):
            raise InputError(f"{self.directory} has neither {SINGLE} nor {INDEX}; only safetensors files are read")
        return self._open_shards(read_weight_map(self.directory / INDEX))

    def _open_shards(self, weight_map: dict[str, str]) -> dict[str, SafetensorsFile]:
        missing = sorted(name for name in set(weight_map.values()) if not os.path.exists(self.file(name)))
        if missing:
            raise InputError(f"{self.directory} lacks {len(missing)} shard(s) named in its index: {', '.join(missing)}")
        shards = {name: SafetensorsFile(self.directory / name) for name in sorted(set(weight_map.values()))}
        absent = [name for name, shard in weight_map.items() if name not in shards[shard].entries]
        unlisted = [name for shard in shards.values() for name in shard.entries if name not in weight_map]
        if absent or unlisted:
            problems = summary("not in their shard", absent) + summary("not in the index", unlisted)
            raise InputError(f"{self.directory / INDEX} does not match its shards: {problems.removesuffix('; ')}")
        return {name: shards[shard] for name, shard in weight_map.items()}

    def _entries(self) -> dict[str, TensorEntry]:
        return {name: file.entries[name] for name, file in self._files.items()}

    def problems(self) -> Iterable[tuple[str, str]]:
        """Kind and tensor of what keeps FP8 weights from being read."""
        return fp8.problems(self._entries(), self.block, self.stored)

    def names(self) -> Collection[str]:
        """All tensor names but those of scales, which belong to their tensors."""
        return [name for name in self._files if name not in self._hidden]

    def quantised(self) -> Collection[str]:
        """The names of the tensors that are FP8 in the file."""
        return self._scales.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        """The dtype in which a tensor is read."""
        return np.dtype(np.float32) if name in self._scales else self._files[name].entries[name].dtype

    def read(self, name: str) -> np.ndarray:
        """A tensor: memory-mapped, or dequantised."""
        if name not in self._scales:
            return self.stored(name)
        assert self.block is not None, "plan() refuses scales without a block size"
        return fp8.dequantise(self.stored(name), self.scales(name), self.block)

    def stored(self, name: str) -> np.ndarray:
        """A tensor as it lies in the file, memory-mapped."""
        return self._files[name].read(name)

    def scales(self, name: str) -> np.ndarray:
        """The scales of an FP8 tensor."""
        return self.stored(self._scales[name])

    def files(self) -> list[SafetensorsFile]:
        """The files with tensors, by name."""
        return sorted(set(self._files.values()), key=lambda file: file.path)


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> shard, from an index file."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{path} should hold a weight_map from tensor names to file names")
    return weight_map


def summary(what: str, names: Iterable[str], show: int = 6) -> str:
    """'what: a, b, ... (n in all); ' or '' when there are none."""
    names = sorted(names)
    if not names:
        return ""
    more = f", ... ({len(names)} in all)" if len(names) > show else ""
    return f"{what}: {', '.join(names[:show])}{more}; "
