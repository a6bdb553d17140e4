"""A Hugging Face checkpoint directory: its JSON files and its tensors, single file or shards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from convert.safetensors_file import SafetensorsFile
from ddtree_jax.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError when it cannot be read as one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} should hold a JSON object")
    return value


class Checkpoint:
    """An opened directory: `config`, and tensors by name. Every file is checked when it is opened, before anything is
    computed.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise InputError(f"{self.directory} is not a directory; give a local Hugging Face checkpoint directory")
        if not (self.directory / "config.json").exists():
            raise InputError(f"{self.directory} has no config.json; give a Hugging Face checkpoint directory")
        self.config = read_json(self.directory / "config.json")
        self._files = self._open()

    def _open(self) -> dict[str, SafetensorsFile]:
        """Tensor name -> the file that holds it."""
        index = self.directory / INDEX
        if index.exists():
            return self._open_shards(read_json(index).get("weight_map", {}))
        if not (self.directory / SINGLE).exists():
            raise InputError(f"{self.directory} has neither {SINGLE} nor {INDEX}")
        file = SafetensorsFile(self.directory / SINGLE)
        return dict.fromkeys(file.entries, file)

    def _open_shards(self, weight_map: dict[str, str]) -> dict[str, SafetensorsFile]:
        missing = sorted(name for name in set(weight_map.values()) if not (self.directory / name).exists())
        if missing:
            raise InputError(f"{self.directory} lacks {len(missing)} shard(s) named in its index: {', '.join(missing)}")
        shards = {name: SafetensorsFile(self.directory / name) for name in sorted(set(weight_map.values()))}
        absent = [name for name, shard in weight_map.items() if name not in shards[shard].entries]
        unlisted = [name for shard in shards.values() for name in shard.entries if name not in weight_map]
        if absent or unlisted:
            raise InputError(
                f"{index_name(self.directory)} does not match its shards: "
                f"{summary('not in their shard', absent)}{summary('not in the index', unlisted)}"
            )
        return {name: shards[shard] for name, shard in weight_map.items()}

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        return self._files[name].entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """A tensor, memory-mapped."""
        return self._files[name].read(name)

    def json(self, name: str) -> dict[str, Any]:
        """Another JSON file of the directory, or {} when it is not there."""
        path = self.directory / name
        return read_json(path) if path.exists() else {}


def index_name(directory: Path) -> str:
    """The path of a directory's shard index, for messages."""
    return str(directory / INDEX)


def summary(what: str, names: Iterable[str], show: int = 6) -> str:
    """'what: a, b, ... (n in all); ' or '' when there are none."""
    names = sorted(names)
    if not names:
        return ""
    more = f", ... ({len(names)} in all)" if len(names) > show else ""
    return f"{what}: {', '.join(names[:show])}{more}; "
