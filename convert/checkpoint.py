"""A Hugging Face checkpoint directory: its JSON files and its tensors, single file or shards."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from convert.safetensors_file import SafetensorsFile
from ddtree_jax.errors import InputError
from ddtree_jax.files import read_object, read_object_if_there

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """An opened directory: `config`, and tensors by name.

    Every file is checked when it is opened, before anything is computed. Raises InputError for whatever is missing,
    truncated or contradictory.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        # os.path, not pathlib: pathlib raises for names that are too long and for directories that may not be searched
        if not os.path.isdir(self.directory):
            raise InputError(f"{self.directory} is not a directory; give a local Hugging Face checkpoint directory")
        if not os.path.exists(self.directory / "config.json"):
            raise InputError(f"{self.directory} has no config.json; give a Hugging Face checkpoint directory")
        self.config = read_object(self.directory / "config.json")
        self._files = self._open()

    def _open(self) -> dict[str, SafetensorsFile]:
        """Tensor name -> the file that holds it. A single file wins over an index, as in Hugging Face."""
        if (self.directory / SINGLE).exists():
            file = SafetensorsFile(self.directory / SINGLE)
            return dict.fromkeys(file.entries, file)
        if not (self.directory / INDEX).exists():
            raise InputError(f"{self.directory} has neither {SINGLE} nor {INDEX}; only safetensors files are read")
        return self._open_shards(read_weight_map(self.directory / INDEX))

    def _open_shards(self, weight_map: dict[str, str]) -> dict[str, SafetensorsFile]:
        missing = sorted(name for name in set(weight_map.values()) if not (self.directory / name).exists())
        if missing:
            raise InputError(f"{self.directory} lacks {len(missing)} shard(s) named in its index: {', '.join(missing)}")
        shards = {name: SafetensorsFile(self.directory / name) for name in sorted(set(weight_map.values()))}
        absent = [name for name, shard in weight_map.items() if name not in shards[shard].entries]
        unlisted = [name for shard in shards.values() for name in shard.entries if name not in weight_map]
        if absent or unlisted:
            problems = summary("not in their shard", absent) + summary("not in the index", unlisted)
            raise InputError(f"{self.directory / INDEX} does not match its shards: {problems.removesuffix('; ')}")
        return {name: shards[shard] for name, shard in weight_map.items()}

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        """A tensor's dtype, from the header."""
        return self._files[name].entries[name].dtype

    def read(self, name: str) -> np.ndarray:
        """A tensor, memory-mapped."""
        return self._files[name].read(name)

    def json(self, name: str) -> dict[str, Any]:
        """Another JSON file of the directory, or {} when it is not there."""
        return read_object_if_there(self.directory / name)


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
