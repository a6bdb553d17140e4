"""Converted checkpoints: a directory with an Orbax checkpoint, a record of where it came from, and the tokenizer."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from convert.checkpoint import INDEX, SINGLE, Checkpoint, Directory
from convert.weights import grouped, keep_fp8, load_network, mismatches, refuse
from ddtree_jax import parallel
from ddtree_jax.errors import InputError
from ddtree_jax.files import read_object
from ddtree_jax.models.network import Network, NetworkSpec
from ddtree_jax.models.quantised import Quantised

RECORD = "conversion.json"
WEIGHTS = "weights"
PROGRESS = "progress.jsonl"  # in the directory of a conversion that is not finished
RESULT = "result"  # in the same place: what becomes the converted directory
FORMAT = 1
ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")  # one of them is in every directory that Orbax writes


class Converted(Directory):
    """An opened directory that `ddtree-jax convert` wrote: `config`, `parameters` by name, {"shape": .., ..}, and
    `fp8`, which of them are FP8.

    Raises InputError for a record that cannot be read.
    """

    def __init__(self, directory: str | Path):
        super().__init__(directory)
        self.record = read_object(self.file(RECORD))
        if self.record.get("format") != FORMAT:
            raise InputError(f"{self.directory}: format {self.record.get('format')!r} is not {FORMAT}; convert again")
        self.parameters = self._parameters(self.record.get("parameters"))
        self.fp8 = self._quantised(self.record.get("fp8"))
        self.weights = self.file(WEIGHTS)
        if not self.weights.is_dir():
            raise InputError(f"{self.directory} has lost its {WEIGHTS}; convert the checkpoint again")

    def names(self) -> Collection[str]:
        """All parameter names."""
        return self.parameters.keys()

    def _parameters(self, found: Any) -> dict[str, dict[str, Any]]:
        try:
            return {name: {**entry, "shape": tuple(entry["shape"])} for name, entry in found.items()}
        except (AttributeError, KeyError, TypeError):
            raise self._damaged() from None

    def _quantised(self, found: Any) -> Quantised | None:
        if found is None:
            return None
        try:
            rows, columns = found["block"]
            kept = Quantised(tuple(found["parameters"]), (int(rows), int(columns)))
        except (KeyError, TypeError, ValueError):
            raise self._damaged() from None
        if min(kept.block) < 1 or not self.parameters.keys() >= set(kept.names):
            raise self._damaged()
        return kept

    def _damaged(self) -> InputError:
        return InputError(f"{self.directory / RECORD} is damaged; convert the checkpoint again")


Source = Checkpoint | Converted


def open_directory(directory: str | Path) -> Source:
    """A Hugging Face directory or a converted one; InputError for what is neither, or was not written to its end."""
    path = Path(directory)
    if any(os.path.exists(path / name) for name in (SINGLE, INDEX)):  # whatever else lies there
        return Checkpoint(path)
    whole = Path(os.path.abspath(path))
    work = whole.parent if whole.name == RESULT else whole
    if any(os.path.exists(place / PROGRESS) for place in (whole, work)):
        raise InputError(f"{path} is a conversion that was not finished; run the same ddtree-jax convert again")
    if os.path.exists(path / RECORD):
        return Converted(path)
    if any(os.path.exists(path / mark) for mark in (*ORBAX, WEIGHTS)):
        raise InputError(f"{path} has no {RECORD}: it is not a finished directory of ddtree-jax convert")
    return Checkpoint(path)


def with_fp8(source: Source, spec: NetworkSpec, keep: bool) -> NetworkSpec:
    """The spec with what is FP8: what a converted directory has as FP8, or if `keep`, what a Hugging Face one has."""
    if isinstance(source, Converted):
        return replace(spec, fp8=source.fp8)
    return keep_fp8(source, spec) if keep else spec


def read_network(source: Source, spec: NetworkSpec, mesh: Mesh | None = None) -> Network:
    """Fill a network from either kind of directory, with the same bits; the rules of `load_network` hold for both."""
    if isinstance(source, Checkpoint):
        return load_network(source, spec, mesh)
    wanted = spec.parameters()
    found = {name: entry["shape"] for name, entry in source.parameters.items()}
    refuse(source, spec, grouped(mismatches({name: leaf.shape for name, leaf in wanted.items()}, found)))
    from convert import orbax_store  # importing Orbax takes a second, which Hugging Face directories need not pay

    loaded = orbax_store.load(source.weights, wanted, parallel.shardings(wanted, spec.config, mesh))
    return Network(tuple(loaded[name] for name in wanted), spec, mesh)
