"""How fast decoding is on this machine: plain, chain and tree side by side, and `transformers` in PyTorch where it is
installed.

    python scripts/benchmark.py decode
    python scripts/benchmark.py decode --transformers --json
    python scripts/benchmark.py decode --target DIR --drafter DIR --budgets 8,16,32,64 --dtype bfloat16
    python scripts/benchmark.py operations
    python scripts/benchmark.py convert --gigabytes 4

Everything is measured in turns in one process, so that a noisy machine disturbs all alike; medians are printed. Greedy,
one prompt at a
time; seconds of decoding only, without the prompt and without compilation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import conversion_benchmark
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import ddtree_jax
from ddtree_jax.errors import InputError
from ddtree_jax.generation import generate
from ddtree_jax.loading import DEMO, Model
from ddtree_jax.ops.tree_attention import IMPLEMENTATIONS as ATTENTIONS
from ddtree_jax.ops.tree_attention import tree_attention
from ddtree_jax.ops.tree_delta import IMPLEMENTATIONS as DELTAS
from ddtree_jax.ops.tree_delta import tree_delta
from ddtree_jax.showcase import PROMPTS


@dataclass(frozen=True)
class Pass:
    """One pass over all prompts: seconds of decoding, tokens after the first of each prompt, rounds, accepted nodes."""

    seconds: float
    tokens: int
    rounds: int
    accepted: int


def main() -> int:
    """Parse and run; 2 after one line about a mistake in the input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    decode = commands.add_parser("decode", help="tokens per second of every method")
    decode.add_argument("--target", metavar="DIR", help="default: the demo pair")
    decode.add_argument("--drafter", metavar="DIR")
    decode.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    decode.add_argument("--budgets", default="4,8,16,32,64", help="tree budgets, comma-separated (default %(default)s)")
    decode.add_argument("--max-new-tokens", type=int, default=192, metavar="N")
    decode.add_argument("--repeats", type=int, default=5, metavar="N", help="turns (default %(default)s)")
    decode.add_argument("--transformers", action="store_true", help="also PyTorch; needs the extra [parity]")
    decode.set_defaults(run=run_decode)
    operations = commands.add_parser("operations", help="milliseconds of every writing of an operation")
    operations.add_argument("--repeats", type=int, default=30, metavar="N", help="calls (default %(default)s)")
    operations.set_defaults(run=run_operations)
    convert = commands.add_parser("convert", help="conversion to Orbax beside cp and fsync of the same bytes")
    convert.add_argument("--gigabytes", type=float, default=1.0, metavar="N", help="default %(default)s")
    convert.add_argument("--repeats", type=int, default=3, metavar="N", help="turns (default %(default)s)")
    convert.add_argument("--directory", metavar="DIR", help="where to write three times that much (default: temporary)")
    convert.set_defaults(run=run_convert)
    for command in (decode, operations, convert):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except InputError as error:
        print(f"benchmark.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def run_decode(arguments: argparse.Namespace) -> None:
    """Tokens per second of plain, chain, trees, and PyTorch."""
    model = ddtree_jax.load(arguments.target, arguments.drafter, dtype=arguments.dtype)
    if model.tokenizer is None:
        raise InputError("the benchmark needs a target with a tokenizer.json")
    methods = ours(model, arguments.max_new_tokens, [int(b) for b in arguments.budgets.split(",")])
    if arguments.transformers:
        directory = Path(arguments.target) if arguments.target else DEMO / "target"
        methods["transformers"] = theirs(model, directory, arguments.dtype, arguments.max_new_tokens)
    for run in tqdm(methods.values(), desc="warm-up", disable=None, leave=False):
        run()
    passes: dict[str, list[Pass]] = {name: [] for name in methods}
    for _ in tqdm(range(arguments.repeats), desc="turns", disable=None, leave=False):
        for name, run in methods.items():
            passes[name].append(run())
    rows = {name: summary(turns) for name, turns in passes.items()}
    plain = rows["plain"]["tokens_per_second"]
    for row in rows.values():
        row["against_plain"] = round(row["tokens_per_second"] / plain, 2)
    show(rows, arguments.json)


def ours(model: Model, max_new_tokens: int, budgets: list[int]) -> dict[str, Callable[[], Pass]]:
    """A pass over the prompts for each of our methods."""

    def run(**options: object) -> Pass:
        results = [
            generate(model, [prompt], max_new_tokens=max_new_tokens, stop_ids=[], **options)[0] for prompt in PROMPTS
        ]
        return Pass(
            sum(r.decode_seconds for r in results),
            sum(r.completion_tokens - 1 for r in results),
            sum(r.rounds for r in results),
            sum(sum(r.acceptance_lengths) for r in results),
        )

    methods: dict[str, Callable[[], Pass]] = {"plain": lambda: run(method="ar")}
    if model.drafter:
        methods["chain"] = lambda: run(method="dflash")
        for budget in budgets:
            methods[f"tree {budget}"] = lambda b=budget: run(method="ddtree", tree_budget=b)
            methods[f"spine {budget}"] = lambda b=budget: run(method="ddtree", tree_budget=b, tree="spine")
    return methods


def theirs(model: Model, directory: Path, dtype: str, max_new_tokens: int) -> Callable[[], Pass]:
    """The same prompts by `transformers`' greedy generate; the time of the prompt is measured apart and taken off."""
    try:
        import torch
        import transformers
    except ImportError:
        raise InputError("--transformers needs PyTorch: pip install 'ddtree-jax[parity]'") from None
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    ids = [torch.tensor([model.tokenizer.encode(prompt)]) for prompt in PROMPTS]

    def timed(row: torch.Tensor, new: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            network.generate(row, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        return time.perf_counter() - start

    def run() -> Pass:
        seconds = sum(timed(row, max_new_tokens) - timed(row, 1) for row in ids)
        steps = len(ids) * (max_new_tokens - 1)
        return Pass(seconds, steps, steps, steps)

    return run


def summary(turns: list[Pass]) -> dict[str, float]:
    """Medians over the turns."""
    seconds = statistics.median(turn.seconds for turn in turns)
    last = turns[-1]
    return {
        "tokens_per_second": round(last.tokens / seconds, 1),
        "ms_per_round": round(1000 * seconds / last.rounds, 3),
        "mean_acceptance_length": round(last.accepted / last.rounds, 2),
        "target_passes_per_token": round(last.rounds / last.tokens, 3),
    }


def run_operations(arguments: argparse.Namespace) -> None:
    """Every writing of tree attention and of the tree delta rule, on shapes of Qwen3.5-0.8B with a short context."""
    rows = {}
    for nodes in (1, 17, 65):
        for name in ATTENTIONS:
            rows[f"tree_attention {name}, N={nodes}"] = time_attention(name, nodes, arguments.repeats)
        for name in DELTAS:
            rows[f"tree_delta {name}, N={nodes}"] = time_delta(name, nodes, arguments.repeats)
    show(rows, arguments.json)


def time_attention(name: str, nodes: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one writing: 8 query heads, 2 kv heads of 256, 512 slots of context, a star."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q, k, v = (jax.random.normal(next(keys), (1, nodes, heads, 256)) for heads in (8, 2, 2))
    cache = [jax.random.normal(next(keys), (1, 2, 512, 256)) for _ in range(2)]
    call = jax.jit(lambda *xs: tree_attention(*xs, implementation=name))
    return milliseconds(call, (q, *cache, k, v, jnp.array([500]), star_mask(nodes)), repeats)


def time_delta(name: str, nodes: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one writing: 16 heads of 128, a tree whose node i has parent (i-1) // 2."""
    parent = (np.arange(nodes)[None] - 1) // 2
    depth = np.floor(np.log2(np.arange(nodes) + 1)).astype(np.int32)[None]
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q, k, v = (jax.random.normal(next(keys), (1, nodes, 16, 128)) / 128**0.5 for _ in range(3))
    g, beta = -jnp.ones((1, nodes, 16)), jnp.full((1, nodes, 16), 0.5)
    state = jax.random.normal(next(keys), (1, 16, 128, 128))
    call = jax.jit(lambda *xs: tree_delta(*xs, max_depth=7, implementation=name))
    return milliseconds(call, (q, k, v, g, beta, state, jnp.array(parent, jnp.int32), jnp.array(depth)), repeats)


def star_mask(nodes: int) -> jax.Array:
    """Root and itself."""
    return (jnp.eye(nodes, dtype=bool) | (jnp.arange(nodes) == 0))[None]


def milliseconds(call: Callable[..., object], inputs: tuple, repeats: int) -> dict[str, float]:
    """Median of timed calls after a first one that compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call(*inputs))
        times.append(1000 * (time.perf_counter() - start))
    return {"median_ms": round(statistics.median(times[1:]), 3), "min_ms": round(min(times[1:]), 3)}


def run_convert(arguments: argparse.Namespace) -> None:
    """Wall time and peak memory of a conversion, and of `cp` with fsync, in turns."""
    show(conversion_benchmark.measure(arguments.gigabytes, arguments.repeats, arguments.directory), arguments.json)


def show(rows: dict[str, dict[str, float]], as_json: bool) -> None:
    """One table, or one JSON object."""
    device = jax.devices()[0]
    about = f"{device.device_kind} ({device.platform}), jax {jax.__version__}"
    if as_json:
        print(json.dumps({"device": about, "rows": rows}))
        return
    columns = list(next(iter(rows.values())))
    print(f"{about}\n{'':32}" + "".join(f"{column:>26}" for column in columns))
    for name, row in rows.items():
        print(f"{name:32}" + "".join(f"{row[column]:>26}" for column in columns))


if __name__ == "__main__":
    raise SystemExit(main())
