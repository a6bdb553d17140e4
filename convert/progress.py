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

    Raises InputError when another run has it, and when it tells of another conversion or is damaged.
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
        lines = self._parsed(whole)
        if not lines:
            self._append(identity)
        elif lines[0] != identity:
            raise InputError(f"{self._path.parent} is left of another conversion; remove it, or choose another name")
        self.merging = {"merging": True} in lines
        self.saves = self._saves(lines)

    def _parsed(self, text: bytes) -> list[dict[str, Any]]:
        try:
            lines = [json.loads(line) for line in text.splitlines()]
        except (ValueError, RecursionError):
            raise self._damaged() from None
        if not all(isinstance(line, dict) for line in lines):
            raise self._damaged()
        return lines

    def _saves(self, lines: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
        saves: dict[str, Any] = {line["save"]: line.get("crc32") for line in lines if isinstance(line.get("save"), str)}
        if not all(isinstance(checksums, dict) for checksums in saves.values()):
            raise self._damaged()
        return saves

    def _damaged(self) -> InputError:
        return InputError(f"{self._path} is damaged; remove {self._path.parent} and convert again")

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
