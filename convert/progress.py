"""The record of a conversion under way, so that a second run goes on where the first was killed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ddtree_jax.errors import InputError


@contextmanager
def open_progress(path: Path, identity: Mapping[str, Any]) -> Iterator[Progress]:
    """The record at `path`, made if need be, and locked: two runs at once would spoil each other's work.

    Raises InputError when another run has it, or when it tells of another conversion.
    """
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{path.parent} is being written by another process") from None
        yield Progress(file, path, identity)


class Progress:
    """A file of JSON lines: what is converted, then the checksums of every batch of parameters that is on disk."""

    def __init__(self, file: BinaryIO, path: Path, identity: Mapping[str, Any]):
        self._file, self._path = file, path
        self.saves: dict[str, dict[str, int]] = {}  # name of a save -> parameter -> checksum
        self.merging = False
        self._read(dict(identity))

    def _read(self, identity: dict[str, Any]) -> None:
        """Take over what an earlier run has written; a line that it had not finished does not count."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            self._append(identity)
        elif lines[0] != identity:
            raise InputError(f"{self._path.parent} is left of another conversion; remove it, or choose another name")
        self.merging = {"merging": True} in lines
        self.saves = {line["save"]: line["crc32"] for line in lines if "save" in line}

    def checksums(self) -> dict[str, int]:
        """Parameter -> checksum, for all that are on disk."""
        return {name: checksum for save in self.saves.values() for name, checksum in save.items()}

    def add(self, save: str, checksums: Mapping[str, int]) -> None:
        """A batch is on disk."""
        self.saves[save] = dict(checksums)
        self._append({"save": save, "crc32": self.saves[save]})

    def start_merging(self) -> None:
        """From here on until the checkpoint is there, its parts are no longer usable."""
        self._append({"merging": True})

    def start_again(self, identity: Mapping[str, Any]) -> None:
        """Forget everything."""
        self._file.truncate(0)
        self._read(dict(identity))

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
