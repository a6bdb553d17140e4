"""The command `convert`: options, a progress bar, tables. `python -m convert` and `ddtree-jax convert` are the same."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddtree_jax.cli import OneLineParser
from ddtree_jax.errors import InputError, report

if TYPE_CHECKING:
    from convert.conversion import Job

WIDTHS = {"bfloat16": 2, "float32": 4}  # bytes of a number
DESCRIPTION = (
    "Convert a Hugging Face checkpoint directory, a target's or a drafter's, to an Orbax checkpoint that load() takes. "
    "A run that is killed leaves DST.partial; the same command goes on from there."
)
EXAMPLES = """examples:
  ddtree-jax convert Qwen3.5-4B/ Qwen3.5-4B-orbax/ --dry-run
  ddtree-jax convert Qwen3.5-4B/ Qwen3.5-4B-orbax/ --verify
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`."""
    parser.add_argument("source", metavar="SRC", help="Hugging Face directory: config.json and safetensors files")
    parser.add_argument("destination", metavar="DST", help="directory to write; it must not exist")
    parser.add_argument("--dtype", choices=tuple(WIDTHS), default="bfloat16", help="default %(default)s")
    parser.add_argument("--keep-fp8", action="store_true", help="leave FP8 weights FP8; the model runs from them")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and every problem")
    parser.add_argument("--verify", action="store_true", help="read everything back and compare checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """The command; returns 0, or 2 when tensors do not fit, after one line for each that does not."""
    from convert.conversion import convert, make_job

    job = make_job(arguments.source, arguments.destination, arguments.dtype, arguments.keep_fp8)
    if arguments.dry_run:
        print(json.dumps(summary(job)) if arguments.json else table(job))
    if job.plan.problems:
        for kind, what in job.plan.problems.items():
            print(*(f"convert: error: {kind}: {one}" for one in what), sep="\n", file=sys.stderr)
        return 2
    if arguments.dry_run:
        return 0
    started = time.perf_counter()
    with progress_bar(job) as on_progress:
        convert(job, arguments.verify, on_progress)
    seconds = round(time.perf_counter() - started, 3)
    if arguments.json:
        print(json.dumps(summary(job) | {"seconds": seconds, "verified": arguments.verify}))
    else:
        checked = ", read back and compared" if arguments.verify else ""
        print(f"{job.destination}: {totals(job)} in {seconds:.1f} s{checked}")
    return 0


def run_or_exit(arguments: argparse.Namespace) -> None:
    """The command for `ddtree-jax`, whose commands return nothing."""
    if code := run(arguments):
        raise SystemExit(code)


@contextmanager
def progress_bar(job: Job) -> Iterator[Callable[[str, int], None]]:
    """A bar of bytes, begun anew for each thing that is done."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def on_progress(what: str, count: int) -> None:
        if what not in bars:
            options: dict[str, Any] = dict(unit="B", unit_scale=True, disable=None, leave=False)
            bars[what] = tqdm(total=job.nbytes, desc=what, **options)
        bars[what].update(count)

    try:
        yield on_progress
    finally:
        for bar in bars.values():
            bar.close()


def totals(job: Job) -> str:
    """One line about the whole."""
    numbers = sum(parameter.nbytes // parameter.dtype.itemsize for parameter in job.plan.parameters)
    return f"{len(job.plan.parameters)} parameters, {numbers / 1e6:,.1f} million numbers, {job.nbytes / 1e9:.3f} GB"


def table(job: Job) -> str:
    """What would be written: equal parameters of different layers in one line."""
    from convert.weights import skipped

    rows: dict[tuple[str, str, str], list[int]] = {}
    for parameter in job.plan.parameters:
        row = (layers_as_one(parameter.name), "x".join(map(str, parameter.shape)), parameter.dtype.name)
        rows.setdefault(row, []).append(parameter.nbytes)
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{'parameter':{width}}  {'count':>5}  {'shape':>18}  {'dtype':8}  {'MB':>10}"]
    for (name, shape, dtype), sizes in rows.items():
        lines.append(f"{name:{width}}  {len(sizes):5}  {shape:>18}  {dtype:8}  {sum(sizes) / 1e6:10,.2f}")
    lines.append(totals(job))
    lines += fp8_lines(job)
    lines += [
        f"{count} tensors of {family}* are left out"
        for family, count in skipped(job.plan.checkpoint, job.plan.spec.config).items()
    ]
    return "\n".join(lines)


def fp8_lines(job: Job) -> list[str]:
    """What becomes of FP8 tensors."""
    from convert.weights import SUFFIX

    kept = set(job.plan.spec.fp8.names) if job.plan.spec.fp8 else set()
    lines = []
    if kept:
        stays = sum(p.nbytes for p in job.plan.parameters if p.name.removesuffix(SUFFIX) in kept)
        wide = sum(math.prod(p.shape) for p in job.plan.parameters if p.name in kept) * WIDTHS[job.dtype]
        sizes = f"{stays / 1e9:.3f} GB with their scales, {wide / 1e9:.3f} GB in {job.dtype}"
        lines.append(f"{len(kept)} parameters stay FP8: {sizes}")
    if names := job.plan.dequantised():
        kinds = ", ".join(sorted({layers_as_one(name) for name in names}))
        lines.append(f"{len(names)} parameters are FP8 in the checkpoint and are dequantised: {kinds}")
    return lines


def layers_as_one(name: str) -> str:
    """A parameter's name without its layer's number."""
    return re.sub(r"\.\d+\.", ".*.", name)


def summary(job: Job) -> dict[str, Any]:
    """The table as a JSON object."""
    from convert.conversion import fp8_record
    from convert.weights import skipped

    checkpoint, made = job.plan.checkpoint, job.plan.parameters
    return {
        "destination": str(job.destination),
        "network": job.plan.spec.module.__name__,
        "dtype": job.dtype,
        "bytes": job.nbytes,
        "parameters": {p.name: {"shape": list(p.shape), "dtype": p.dtype.name} for p in made},
        "skipped": dict(skipped(checkpoint, job.plan.spec.config)),
        "fp8": fp8_record(job.plan.spec),
        "dequantised": len(job.plan.dequantised()),
        "problems": job.plan.problems,
    }


def main(words: list[str]) -> int:
    """`python -m convert SRC DST ..`; returns the exit code."""
    parser = OneLineParser(prog="python -m convert", description=DESCRIPTION, epilog=EXAMPLES)
    add_arguments(parser)
    try:
        return run(parser.parse_args(words))
    except InputError as error:
        return report("convert", error)
    except KeyboardInterrupt:
        print("convert: stopped; the same command goes on from here", file=sys.stderr)
        return 130
