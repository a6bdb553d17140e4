"""`ddtree-jax demo`: the embedded pair decodes the same prompts plainly, by chain and by tree, and the three are laid
side by side.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

from ddtree_jax.errors import InputError
from ddtree_jax.generation import Result, generate
from ddtree_jax.loading import Model, load

PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The :mod:`json` module provides functions to",
    "import unittest\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n",
)
METHODS: dict[str, dict[str, Any]] = {
    "plain": dict(method="ar"),
    "chain": dict(method="dflash"),
    "tree": dict(method="ddtree"),
}
REPEATS = 3
PAYS = """\
A round of chain or tree pays when its mean acceptance length is above its cost in plain steps, drafter included.
Here a round costs {chain} plain steps for the chain and {tree} for the tree. On a CPU every further row costs: 8 rows
take about 2.4 plain steps in the target alone, 64 about 6.8. On a GPU, where a step waits for memory, 65 rows are
expected to cost little more than one; that has not been measured yet."""


def run(max_new_tokens: int, tree_budget: int, as_json: bool) -> None:
    """Print the texts and the comparison (or one JSON object). Raises InputError when the texts are not the same."""
    model = load(dtype="float32")
    runs = measure(model, max_new_tokens, tree_budget)
    texts = {name: [r.text for r in results] for name, (results, _) in runs.items()}
    same = all(text == texts["plain"] for text in texts.values())
    rows = {name: row(results, seconds) for name, (results, seconds) in runs.items()}
    if as_json:
        print(json.dumps({"texts": texts["plain"], "identical": same, "methods": rows}))
    else:
        print_texts(texts["plain"])
        print(table(rows))
        print(f"\nThe three texts are {'identical' if same else 'NOT identical'}. {platform()}\n\n{costs(rows)}")
    if not same:
        raise InputError("plain, chain and tree decoding gave different texts: this is a fault, please report it")


def measure(model: Model, max_new_tokens: int, tree_budget: int) -> dict[str, tuple[list[Result], float]]:
    """For every method the results of all prompts, one at a time, and the median seconds of a pass over them.

    The methods take turns, so that a noisy machine disturbs all alike.
    """
    results: dict[str, list[Result]] = {}
    passes: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in tqdm(range(REPEATS + 1), desc="passes", disable=None, leave=False):
        for name, options in METHODS.items():
            options: dict[str, Any] = options | dict(tree_budget=tree_budget, max_new_tokens=max_new_tokens)
            results[name] = [generate(model, [prompt], **options)[0] for prompt in PROMPTS]
            passes[name].append(sum(r.decode_seconds for r in results[name]))
    # the first pass warms up
    return {name: (results[name], statistics.median(passes[name][1:])) for name in METHODS}


def row(results: Sequence[Result], seconds: float) -> dict[str, float]:
    """Figures of one method over all prompts."""
    tokens, rounds = sum(r.completion_tokens for r in results), sum(r.rounds for r in results)
    return {
        "tokens_per_second": ratio(tokens - len(results), seconds, 1),
        "mean_acceptance_length": ratio(sum(sum(r.acceptance_lengths) for r in results), rounds, 2),
        "target_passes_per_token": ratio(rounds + len(results), tokens, 3),
        "milliseconds_per_round": ratio(1000 * seconds, rounds, 2),
    }


def ratio(part: float, whole: float, digits: int) -> float:
    """part / whole, rounded; 0 where nothing was done (one token needs no round)."""
    return round(part / whole, digits) if whole else 0.0


def costs(rows: dict[str, dict[str, float]]) -> str:
    """When a draft pays, from the rows just measured."""
    plain = rows["plain"]["milliseconds_per_round"]
    relative = {name: ratio(rows[name]["milliseconds_per_round"], plain, 1) for name in ("chain", "tree")}
    return PAYS.format(**relative)


def table(rows: dict[str, dict[str, float]]) -> str:
    """The comparison as text."""
    names = ["tokens/s", "mean acceptance", "target passes/token", "ms/round"]
    lines = [f"{'':8}" + "".join(f"{name:>21}" for name in names)]
    lines += [f"{name:8}" + "".join(f"{value:>21}" for value in row.values()) for name, row in rows.items()]
    return "\n".join(lines)


def print_texts(texts: Sequence[str | None]) -> None:
    """Every prompt with its continuation."""
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"--- {prompt.splitlines()[0]} ...\n{prompt}{text}\n")
    sys.stdout.flush()


def platform() -> str:
    """What this ran on."""
    device = jax.devices()[0]
    machine = f"{device.device_kind} ({device.platform}), jax {jax.__version__}"
    return f"Measured on {machine}, float32, medians of {REPEATS} runs."
