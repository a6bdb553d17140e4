"""`benchmark.py decode`: tokens per second of plain, chain and tree decoding, and of `transformers` in PyTorch where it
is installed. Greedy, one prompt at a time; seconds of decoding only, without the prompt and without compilation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import ddtree_jax
from benchmarks.timing import show
from ddtree_jax.errors import InputError
from ddtree_jax.generation import generate
from ddtree_jax.loading import DEMO, Model
from ddtree_jax.showcase import PROMPTS


@dataclass(frozen=True)
class Pass:
    """One pass over all prompts: seconds of decoding, tokens after the first of each prompt, rounds, accepted nodes."""

    seconds: float
    tokens: int
    rounds: int
    accepted: int


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--target", metavar="DIR", help="default: the demo pair")
    command.add_argument("--drafter", metavar="DIR")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    command.add_argument("--budgets", default="4,8,16,32,64", metavar="N,N", help="of trees (default %(default)s)")
    command.add_argument("--max-new-tokens", type=int, default=192, metavar="N")
    command.add_argument("--repeats", type=int, default=5, metavar="N", help="turns (default %(default)s)")
    command.add_argument("--transformers", action="store_true", help="also PyTorch; needs the extra [parity]")


def run(arguments: argparse.Namespace) -> None:
    """Tokens per second of plain, chain, trees, and PyTorch."""
    model = ddtree_jax.load(arguments.target, arguments.drafter, dtype=arguments.dtype)
    if model.tokenizer is None:
        raise InputError("the benchmark needs a target with a tokenizer.json")
    methods = ours(model, arguments.max_new_tokens, [int(b) for b in arguments.budgets.split(",")])
    if arguments.transformers:
        directory = Path(arguments.target) if arguments.target else DEMO / "target"
        methods["transformers"] = theirs(model, directory, arguments.dtype, arguments.max_new_tokens)
    show(compared(methods, arguments.repeats), arguments.json)


def compared(methods: Mapping[str, Callable[[], Pass]], repeats: int) -> dict[str, dict[str, float]]:
    """A row for every method, which take turns; one of them is called "plain"."""
    for call in tqdm(methods.values(), desc="warm-up", disable=None, leave=False):
        call()
    passes: dict[str, list[Pass]] = {name: [] for name in methods}
    for _ in tqdm(range(repeats), desc="turns", disable=None, leave=False):
        for name, call in methods.items():
            passes[name].append(call())
    rows = {name: summary(turns) for name, turns in passes.items()}
    plain = rows["plain"]["tokens_per_second"]
    for row in rows.values():
        row["against_plain"] = round(row["tokens_per_second"] / plain, 2)
    return rows


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
