"""`ddtree-jax convert`: a Hugging Face directory -> an Orbax checkpoint that `load()` takes, in bounded memory.

Everything is written under DST.partial, and DST appears by one rename at the end: a run that is killed leaves nothing
that loads. The record of finished parameters lies there too, and the next run goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import ddtree_jax
from convert import orbax_store
from convert.checkpoint import INDEX, Checkpoint
from convert.converted import FORMAT, PROGRESS, RECORD, WEIGHTS, with_fp8
from convert.progress import Progress, open_progress
from convert.weights import Parameter, Plan, plan, skipped
from ddtree_jax.config import DrafterConfig, TargetConfig, is_drafter
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.network import NetworkSpec

BATCH = 512 << 20  # bytes written at once, all in memory; a larger parameter is a batch of its own
CARRIED = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt chat_template.jinja chat_template.json LICENSE"
).split()
LIBRARIES = ("jax", "flax", "orbax-checkpoint", "tensorstore", "numpy", "ml_dtypes")

OnProgress = Callable[[str, int], None]  # what is being done, and how many bytes of it are done more


@dataclass(frozen=True)
class Job:
    """One conversion: what, and where to."""

    plan: Plan
    destination: Path
    dtype: str

    @property
    def work(self) -> Path:
        """Where everything happens until the end."""
        return self.destination.with_name(self.destination.name + ".partial")

    @property
    def result(self) -> Path:
        """What becomes the destination."""
        return self.work / "result"

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.plan.parameters)

    def identity(self) -> dict[str, Any]:
        """What has to be the same for a second run to go on with this one."""
        source = source_record(self.plan.checkpoint)
        return {"dtype": self.dtype, "fp8": fp8_record(self.plan.spec), "source": source, "format": FORMAT}


def make_job(source: str | Path, destination: str | Path, dtype: str, fp8: bool = False) -> Job:
    """Open a checkpoint of a target or a drafter and decide what becomes of its tensors; nothing is written.

    fp8: weights that are FP8 stay so where their blocks stay whole. Raises InputError for what cannot be opened, and
    when nothing would stay FP8; tensors that do not fit are in `plan.problems`.
    """
    checkpoint = Checkpoint(source)
    spec = network_spec(checkpoint, jnp.dtype(dtype))
    spec = with_fp8(checkpoint, spec, keep=fp8)
    if fp8 and spec.fp8 is None:
        raise InputError(f"{checkpoint.directory} has no FP8 weights that could be kept; convert without --keep-fp8")
    return Job(plan(checkpoint, spec), Path(os.path.abspath(destination)), dtype)


def network_spec(checkpoint: Checkpoint, dtype: jnp.dtype) -> NetworkSpec:
    """What network a checkpoint holds: a drafter or a target."""
    if is_drafter(checkpoint.config):
        return NetworkSpec(Drafter, DrafterConfig.from_hf(checkpoint.config, checkpoint.names()), dtype)
    return NetworkSpec(Target, TargetConfig.from_hf(checkpoint.config), dtype)


def convert(job: Job, verify: bool = False, on_progress: OnProgress = lambda what, count: None) -> None:
    """Write the destination, or go on where a killed run left off.

    verify: read everything back and compare checksums before the destination appears. Raises InputError for a plan with
    problems, a destination that is there already, one that cannot be written or is too small, and parameters that read
    back differently.
    """
    job.plan.check()
    check_destination(job)
    job.work.mkdir(exist_ok=True)
    with open_progress(job.work / PROGRESS, job.identity()) as progress:
        job.result.mkdir(exist_ok=True)
        write_weights(job, progress, on_progress)
        if verify:
            verify_weights(job, progress.checksums(), on_progress)
        write_record(job, progress.checksums())
        os.rename(job.result, job.destination)
    shutil.rmtree(job.work)


def check_destination(job: Job) -> None:
    """Refuse, in one line, a destination that is there, has no parent, is no conversion of ours, or is too small."""
    destination, work = job.destination, job.work
    if os.path.lexists(destination):
        raise InputError(f"{destination} exists already; remove it, or choose another name")
    if not (destination.parent.is_dir() and os.access(destination.parent, os.W_OK)):
        raise InputError(f"{destination.parent} is not a directory that can be written")
    if os.path.lexists(work) and not (work / PROGRESS).is_file() and (not work.is_dir() or any(work.iterdir())):
        raise InputError(f"{work} is in the way and not an unfinished conversion; remove it")
    done = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    free = shutil.disk_usage(destination.parent).free
    if job.nbytes - done > free:
        raise InputError(f"{destination} needs {job.nbytes / 1e9:.2f} GB; {free / 1e9:.2f} GB are free")


def write_weights(job: Job, progress: Progress, on_progress: OnProgress) -> None:
    """Write all parameters that are not on disk yet, and make one checkpoint of them."""
    weights = job.result / WEIGHTS
    if weights.is_dir():
        on_progress("writing", job.nbytes)
        return
    if progress.merging:  # killed within the second in which Orbax merges: its parts cannot be told from each other
        progress.start_again(job.identity())
    orbax_store.keep_saves(weights, set(progress.saves))
    done = progress.checksums()
    on_progress("writing", sum(p.nbytes for p in job.plan.parameters if p.name in done))
    for batch in batches(p for p in job.plan.parameters if p.name not in done):
        write_batch(job.plan, weights, batch, progress)
        on_progress("writing", sum(parameter.nbytes for parameter in batch))
    progress.start_merging()
    orbax_store.finish(weights)


def write_batch(plan: Plan, weights: Path, batch: list[Parameter], progress: Progress) -> None:
    """Make some parameters, write them, and note that they are on disk. Checksums are taken while they are written."""
    before = orbax_store.finished_saves(weights)
    arrays = {parameter.name: plan.make(parameter) for parameter in batch}
    wait = orbax_store.save(weights, arrays)
    checksums = {name: checksum(array) for name, array in arrays.items()}
    wait()
    (save,) = orbax_store.finished_saves(weights) - before
    progress.add(save, checksums)


def batches(parameters: Iterable[Parameter], limit: int = BATCH) -> Iterator[list[Parameter]]:
    """Parameters in order, as many at a time as make up at most `limit` bytes, and at least one."""
    batch: list[Parameter] = []
    for parameter in parameters:
        if batch and sum(p.nbytes for p in batch) + parameter.nbytes > limit:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


def checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def verify_weights(job: Job, checksums: dict[str, int], on_progress: OnProgress) -> None:
    """Read every parameter back; InputError naming those that are not what was written."""
    wrong = []
    for batch in batches(job.plan.parameters):
        # broadcast from one number: shapes and dtypes without memory
        like = {p.name: np.broadcast_to(np.zeros((), p.dtype), p.shape) for p in batch}
        read = orbax_store.read(job.result / WEIGHTS, like)
        wrong += [name for name, array in read.items() if checksum(array) != checksums[name]]
        on_progress("verifying", sum(parameter.nbytes for parameter in batch))
    if wrong:
        names = ", ".join(wrong[:6])
        raise InputError(
            f"{job.work}: {len(wrong)} parameters read back differently ({names}); remove it, check the disk"
        )


def write_record(job: Job, checksums: dict[str, int]) -> None:
    """Copy the small files, then write the record, which makes the directory a whole one."""
    for name in CARRIED:
        if os.path.exists(source := job.plan.checkpoint.file(name)):
            shutil.copyfile(source, job.result / name)
    text = json.dumps(record(job, checksums), indent=1)
    with (job.result / RECORD).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def record(job: Job, checksums: dict[str, int]) -> dict[str, Any]:
    """What is written beside the weights: everything about where they came from."""
    checkpoint, made = job.plan.checkpoint, job.plan.parameters
    return {
        "format": FORMAT,
        "network": job.plan.spec.module.__name__,
        "dtype": job.dtype,
        "float32": [p.name for p in made if p.dtype == np.float32 and job.dtype != "float32"],
        "source": source_record(checkpoint),
        "config": checkpoint.config,
        "versions": {"ddtree-jax": ddtree_jax.__version__} | {name: version(name) for name in LIBRARIES},
        "skipped": dict(skipped(checkpoint)),
        "fp8": fp8_record(job.plan.spec),
        "dequantised": len(job.plan.dequantised()),
        "parameters": {
            p.name: {"shape": list(p.shape), "dtype": p.dtype.name, "crc32": checksums[p.name]} for p in made
        },
    }


def fp8_record(spec: NetworkSpec) -> dict[str, Any] | None:
    """Which parameters are FP8, None when there are none."""
    return None if spec.fp8 is None else {"block": list(spec.fp8.block), "parameters": list(spec.fp8.names)}


def source_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name and digests of a checkpoint: of its index, and of all its headers with the sizes of the files."""
    headers = hashlib.sha256()
    for file in checkpoint.files():
        headers.update(f"{file.path.name} {file.path.stat().st_size}\n".encode())
        headers.update(file.header_bytes())
    index = checkpoint.file(INDEX)
    digest = hashlib.sha256(index.read_bytes()).hexdigest() if index.is_file() else None
    return {"name": checkpoint.directory.resolve().name, "index_sha256": digest, "headers_sha256": headers.hexdigest()}
