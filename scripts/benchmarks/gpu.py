"""`benchmark.py gpu`: the parts of a round at a published size, random weights, one sequence: milliseconds, ratios to
what we aim at, a roofline. Needs no network and no checkpoint.

Order: PyTorch's step (a process of its own, gone before JAX takes memory), what the device can do (copy and matrix
product), then each part with its state freed before the next. Rows are printed and written to OUT/results.json as
they come, so a run that is stopped has left what it measured.

Whole rounds are those of generation (`decode_rounds`). With random weights hardly a draft is accepted; to force
acceptance there are rounds whose weights make all logits equal, so that the chain of a spine tree is accepted to its
end. The acceptance length that was observed is printed with every round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import costs, parts, roofline, torch_step
from benchmarks.pairs import Pair, hf_config, known, random_pair, target_spec
from benchmarks.timing import Timing, about, table, timed
from ddtree_jax._cache import enable_compile_cache
from ddtree_jax.decode.loop import prefill
from ddtree_jax.decode.state import RoundConfig
from ddtree_jax.errors import InputError

SERIES = {"nodes": [1, 8, 17, 33, 65, 129, 257], "budgets": [16, 64, 256], "prefill": [512, 2048, 8192, 32768]}
TINY_SERIES = {"nodes": [1, 17, 65], "budgets": [16, 64], "prefill": [64, 512]}
STEPS = 16  # plain steps a dispatch
ROUNDS = 8  # rounds a dispatch
SUMMARY = "results.json"


@dataclass(frozen=True)
class Aims:
    """Most that a part may take, in multiples; None where nothing is asked of a size."""

    step: float | None = None  # of the time of reading the weights once
    round: float | None = None  # a round of 65 nodes, of a plain step
    verify: float = 1.25  # 65 nodes, of a plain step
    transformers: float = 2.0  # least: PyTorch's step, of ours


AIMS = {"Qwen3.5-4B": Aims(1.25, 1.6), "Qwen3.5-27B": Aims(1.15, 1.35)}


@dataclass(frozen=True)
class Row:
    """One measured part; work is what a target pass needs at least."""

    name: str
    timing: Timing
    work: costs.Work | None = None
    accepted: float | None = None


@dataclass
class Results:
    """Everything that is known so far; written to a file after every part."""

    size: str
    head: dict[str, Any]
    directory: Path
    bandwidth: float = 0.0
    peak: float = 0.0
    floor: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)
    transformers: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Keep a row, print it and write everything."""
        self.rows[row.name] = row
        say(f"{row.name:32}{1000 * row.timing.seconds:12.3f} ms")
        (self.directory / SUMMARY).write_text(json.dumps(self.to_json(), indent=1))

    def ratios(self) -> list[tuple[str, float, str, bool | None]]:
        """What we aim at: (what, its value, the aim, whether it is met; None: nothing is asked here)."""
        aims, on_gpu = AIMS.get(self.size, Aims()), self.head["platform"] == "gpu"
        step, verify = self.seconds("ar step"), self.seconds("verify N=65")
        theirs = self.transformers["ms"] / 1000 if "ms" in self.transformers else None
        asked = [
            ("ar step / weights read once", step, self.floor, aims.step, True),
            ("verify of 65 nodes / ar step", verify, step, aims.verify, True),
            ("round of 65 nodes / ar step", self.seconds("round budget=64"), step, aims.round, True),
            ("transformers step / ar step", theirs, step, aims.transformers, False),
        ]
        found = []
        for name, value, base, aim, most in asked:
            if value and base:
                ratio = value / base
                met = None if aim is None or not on_gpu else (ratio <= aim) == most
                words = "none" if aim is None else f"at {'most' if most else 'least'} {aim}"
                found.append((name, round(ratio, 3), words, met))
        return found

    def seconds(self, name: str) -> float | None:
        """A part's time, None if it was not measured."""
        return self.rows[name].timing.seconds if name in self.rows else None

    def to_json(self) -> dict[str, Any]:
        """What results.json holds. Times are in seconds."""
        return {
            **self.head,
            "size": self.size,
            "copy_bytes_per_second": self.bandwidth,
            "matmul_operations_per_second": self.peak,
            "weights_read_once_seconds": self.floor,
            "transformers": self.transformers,
            "parts": [asdict(row) for row in self.rows.values()],
            "ratios": [dict(zip(("name", "value", "aim", "met"), one, strict=True)) for one in self.ratios()],
        }

    def table(self) -> str:
        """Parts beside the plain step, then the ratios."""
        step = self.seconds("ar step")
        lines = {name: columns(row, step, self.floor) for name, row in self.rows.items()}
        verdicts = {True: "met", False: "MISSED", None: "-"}
        ratios = {name: {"value": v, "aim": aim, "verdict": verdicts[met]} for name, v, aim, met in self.ratios()}
        return f"{table(lines)}\n\n{table(ratios)}" if ratios else table(lines)


def columns(row: Row, step: float | None, floor: float) -> dict[str, Any]:
    """A row of the table."""
    seconds = row.timing.seconds
    return {
        "ms": f"{1000 * seconds:.3f}",
        "min": f"{1000 * row.timing.fastest:.3f}",
        "max": f"{1000 * row.timing.slowest:.3f}",
        "x step": f"{seconds / step:.2f}" if step else "",
        "x floor": f"{seconds / floor:.2f}" if row.work else "",
        "GB/s": f"{row.work.nbytes / seconds / 1e9:.0f}" if row.work else "",
        "TFLOP/s": f"{row.work.operations / seconds / 1e12:.2f}" if row.work else "",
        "accepted": "" if row.accepted is None else f"{row.accepted:.2f}",
        "compile s": f"{row.timing.compile_seconds:.1f}",
    }


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    numbers = partial(command.add_argument, type=numbers_of, metavar="N,N")
    command.add_argument("--size", default="Qwen3.5-4B", help="a published size, 100M or tiny (default %(default)s)")
    command.add_argument("--cpu", action="store_true", help="on the CPU, whatever the size")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: float32 on a CPU, else bfloat16")
    command.add_argument(
        "--context", type=int, default=1024, metavar="N", help="committed tokens (default %(default)s)"
    )
    numbers("--nodes", help="of verify (default 1,8,17,33,65,129,257; tiny 1,17,65)")
    numbers("--budgets", help="of rounds (default 16,64,256; tiny 16,64)")
    numbers("--prefill", help="prompt lengths (default 512,2048,8192,32768; tiny 64,512)")
    command.add_argument("--turns", type=int, default=15, metavar="N", help="of each part (default %(default)s)")
    command.add_argument(
        "--only", metavar="WORD", help="only parts whose name begins so: ar, verify, round, prefill ..."
    )
    command.add_argument("--no-transformers", action="store_true", help="leave PyTorch out")
    command.add_argument("--out", default="benchmark-results", metavar="DIR", help="default %(default)s")


def say(line: str) -> None:
    """Progress, on standard error: standard output has the result alone."""
    print(line, file=sys.stderr, flush=True)


def numbers_of(text: str) -> list[int]:
    """Positive whole numbers, comma-separated."""
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, and write OUT/results.json and OUT/roofline.png."""
    arguments.size = known(arguments.size)  # an unknown one is said before anything is started
    for name, numbers in (TINY_SERIES if arguments.size == "tiny" else SERIES).items():
        setattr(arguments, name, getattr(arguments, name) or numbers)
    choose_device(arguments)
    enable_compile_cache()
    on_cpu = jax.default_backend() == "cpu"
    arguments.dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    results = Results(arguments.size, head(arguments), Path(arguments.out))
    results.directory.mkdir(parents=True, exist_ok=True)
    if not arguments.no_transformers:
        results.transformers = transformers_step(arguments, on_cpu)
        say(f"transformers: {json.dumps(results.transformers)}")
    measure_device(results, on_cpu, arguments)
    for row in measured(results, arguments):
        results.add(row)
    picture = results.directory / "roofline.png"
    drawn = roofline.draw(picture, results.size, results.bandwidth, results.peak, results.rows)
    say(f"written: {results.directory / SUMMARY}, {drawn or 'no roofline (it needs matplotlib)'}")
    print(json.dumps(results.to_json()) if arguments.json else f"\n{about()}, {arguments.dtype}\n{results.table()}")


def choose_device(arguments: argparse.Namespace) -> None:
    """Settle on a GPU or the CPU; InputError where there is no GPU and the CPU was not asked for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch comes first and needs the memory
    if arguments.cpu:
        jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() == "cpu" and not arguments.cpu and arguments.size != "tiny":
        raise InputError(f"JAX finds no GPU for {arguments.size}; --size tiny or --cpu runs on the CPU")


def head(arguments: argparse.Namespace) -> dict[str, Any]:
    """Which machine, versions and settings the figures belong to."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "implementation": os.environ.get("DDTREE_IMPLEMENTATION", "default"),
        "dtype": arguments.dtype,
        "context": arguments.context,
        "turns": arguments.turns,
    }


def transformers_step(arguments: argparse.Namespace, on_cpu: bool) -> dict[str, Any]:
    """The same step in PyTorch; why not, where it is not to be had."""
    device = "cpu" if on_cpu else "cuda"
    config = hf_config(arguments.size)
    return torch_step.measure(torch_step.Job(config, arguments.context, arguments.dtype, device, arguments.turns))


def measure_device(results: Results, on_cpu: bool, arguments: argparse.Namespace) -> None:
    """Copy bandwidth, the rate of a matrix product, and the floor that the first sets."""
    results.bandwidth = costs.copy_bandwidth(2**28 if on_cpu else 2**32, arguments.turns)
    results.peak = costs.peak_operations(1024 if on_cpu else 8192, arguments.dtype, arguments.turns)
    spec = target_spec(arguments.size, arguments.dtype)
    results.floor = costs.weight_bytes(spec, 1) / results.bandwidth
    say(
        f"copy {results.bandwidth / 1e9:.0f} GB/s, matrix product {results.peak / 1e12:.1f} TFLOP/s, "
        f"weights read once {1000 * results.floor:.3f} ms"
    )


def measured(results: Results, arguments: argparse.Namespace) -> Iterator[Row]:
    """The parts, one after another."""
    pair = random_pair(arguments.size, arguments.dtype)
    for name, part in all_parts(pair, arguments).items():
        if name.startswith(arguments.only or ""):
            yield part(name)


def all_parts(pair: Pair, arguments: argparse.Namespace) -> dict[str, Callable[[str], Row]]:
    """Every part by name; nothing runs before it is called."""
    bench = Bench(pair, arguments.context, arguments.turns)
    horizon = pair.drafter.config.horizon
    found: dict[str, Callable[[str], Row]] = {"ar step": bench.steps}
    found |= {f"verify N={n}": partial(bench.verify, nodes=n) for n in arguments.nodes}
    found["draft"] = bench.draft
    found |= {f"expand budget={b}": partial(bench.expand, budget=b) for b in arguments.budgets}
    found |= {f"commit N={1 + b}": partial(bench.commit, nodes=1 + b) for b in arguments.budgets}
    found |= {f"round budget={b}": partial(bench.rounds, budget=b) for b in arguments.budgets}
    forced = [b for b in arguments.budgets if b >= horizon]
    found |= {f"round forced budget={b}": partial(bench.rounds, budget=b, forced=True) for b in forced}
    found |= {f"prefill {t}": partial(bench.prefill, tokens=t) for t in arguments.prefill}
    return found


@dataclass(frozen=True)
class Bench:
    """The parts of one pair, after `context` committed tokens. Each makes its own state, which goes when it is done."""

    pair: Pair
    context: int
    turns: int

    def steps(self, name: str) -> Row:
        """Plain decoding."""
        call = parts.Rounds(self.pair, parts.PLAIN, self.context, 0, STEPS)
        return Row(name, timed(call, self.turns).shared(STEPS), self.work(1))

    def rounds(self, name: str, budget: int, forced: bool = False) -> Row:
        """Whole rounds; forced: with equal logits and a spine tree, so that all of the chain is accepted."""
        pair = self.pair.flat() if forced else self.pair
        config = parts.tree_config(pair, budget, "spine" if forced else "best-first")
        call = parts.Rounds(pair, config, self.context, 0, ROUNDS)
        timing = timed(call, self.turns).shared(ROUNDS)
        return Row(name, timing, accepted=call.accepted())

    def verify(self, name: str, nodes: int) -> Row:
        """The target over a tree, head and argmax included; the caches are only read."""
        tree, depth = parts.some_tree(self.pair, nodes)
        state = self.state(nodes)
        call = partial(parts.verify, self.pair.target, self.pair.drafter, state, tree, depth)
        return Row(name, timed(call, self.turns), self.work(nodes))

    def draft(self, name: str) -> Row:
        """The drafter's pass over one block, with the head."""
        state, horizon = self.state(16), self.pair.drafter.config.horizon
        return Row(name, timed(partial(parts.draft, self.pair.target, self.pair.drafter, state, horizon), self.turns))

    def expand(self, name: str, budget: int) -> Row:
        """From draft logits to a tree."""
        return Row(name, timed(partial(parts.grown, parts.sharp_logits(self.pair), budget), self.turns))

    def commit(self, name: str, nodes: int) -> Row:
        """The walk, and the writing of its path into all caches, the drafter's too."""
        return Row(name, timed(parts.Commit(self.pair, self.state(nodes), nodes), self.turns))

    def prefill(self, name: str, tokens: int) -> Row:
        """A prompt to its first token, allocation of the caches included."""
        config = parts.tree_config(self.pair, 16)
        request = parts.request(self.pair, config, tokens, 1)
        timing = timed(lambda: prefill(self.pair.target, self.pair.drafter, request)[1], max(self.turns // 5, 1))
        return Row(name, timing, costs.target_pass(self.pair.target.spec, tokens, 0))

    def state(self, nodes: int) -> Any:
        """Caches after the context, the drafter's too."""
        config: RoundConfig = parts.tree_config(self.pair, 16)
        return parts.ready(self.pair, config, self.context, max(nodes, 64))

    def work(self, rows: int) -> costs.Work:
        """The least work of a target pass."""
        return costs.target_pass(self.pair.target.spec, rows, self.context)
