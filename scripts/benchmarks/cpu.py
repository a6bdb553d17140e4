"""`benchmark.py cpu`: what a round costs as the text grows, and the plain step against PyTorch.

Each method is timed at three places, in turns: after 64 tokens with room for few more ("short"), after 64 with room for
2,048 ("room"), and after 2,048 ("long"). "room" above "short" is work on slots that hold nothing; "long" above "room"
is work on tokens that are there, which for attention has to be, and "attention" says how much of it that is: tree
attention alone, all layers, at both lengths. Milliseconds are medians, ratios those of the fastest turns, which other
jobs on the machine disturb least. The pairs are the demo's and a random hybrid; hardly a draft of a random pair is
accepted, so of it only the cost of a round in plain steps says anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import parts, torch_step
from benchmarks.pairs import Pair, hf_config, random_pair
from benchmarks.timing import Timing, about, in_turns, table
from ddtree_jax.config import FULL, AttentionConfig
from ddtree_jax.decode.state import RoundConfig
from ddtree_jax.errors import InputError
from ddtree_jax.files import read_object
from ddtree_jax.loading import DEMO, load
from ddtree_jax.ops.tree_attention import tree_attention

SHORT, LONG = 64, 2048
BUDGET = 16
ROUNDS = 4  # a dispatch
PLACES = {"short": (SHORT, SHORT), "room": (SHORT, LONG), "long": (LONG, SHORT)}  # tokens before, room for more
BOUND = 1.15  # most that a round may cost after 2,048 tokens, in one after 64, attention's own growth taken off


@dataclass(frozen=True)
class Growth:
    """Seconds of a method's round at the three places, and of its attention after 64 and after 2,048 tokens."""

    short: Timing
    room: Timing
    long: Timing
    attention: tuple[Timing, Timing]

    @property
    def beyond_attention(self) -> float:
        """How the round grows from short to long, attention's part taken off."""
        more = self.attention[1].fastest - self.attention[0].fastest
        return (self.long.fastest - more) / self.short.fastest

    def row(self, step: float) -> dict[str, str]:
        """A row of the table; step: the fastest plain step at the short place."""
        milliseconds = {name: f"{1000 * getattr(self, name).seconds:.2f}" for name in PLACES}
        return {
            **milliseconds,
            "attention": f"{1000 * self.attention[0].seconds:.2f}..{1000 * self.attention[1].seconds:.2f}",
            "room/short": f"{self.room.fastest / self.short.fastest:.2f}",
            "long/short": f"{self.long.fastest / self.short.fastest:.2f}",
            "without attention": f"{self.beyond_attention:.2f}",
            f"within {BOUND}": "yes" if self.beyond_attention <= BOUND else "NO",
            "in plain steps": f"{self.short.fastest / step:.2f}",
        }


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--pairs", default="demo,100M", help="of demo, 100M, tiny (default %(default)s)")
    command.add_argument("--turns", type=int, default=5, metavar="N", help="default %(default)s")
    command.add_argument("--no-transformers", action="store_true", help="leave PyTorch out")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    jax.config.update("jax_platforms", "cpu")
    rows: dict[str, dict[str, str]] = {}
    pytorch: dict[str, dict[str, object]] = {}
    for name in arguments.pairs.split(","):
        pair, config = named_pair(name)
        grown = growths(pair, arguments.turns)
        step = grown["plain"].short
        rows |= {f"{name}, {method}": growth.row(step.fastest) for method, growth in grown.items()}
        if not arguments.no_transformers:
            job = torch_step.Job(config, SHORT, "float32", "cpu", arguments.turns)
            pytorch[name] = compared(torch_step.measure(job), step.seconds)
    if arguments.json:
        print(json.dumps({"device": about(), "rows": rows, "transformers": pytorch}))
        return
    print(f"{about()}, float32, milliseconds a round\n{table(rows)}")
    for name, found in pytorch.items():
        print(f"{name}, transformers: {json.dumps(found)}")


def named_pair(name: str) -> tuple[Pair, dict[str, object]]:
    """A pair, and its target's configuration for PyTorch."""
    if name == "demo":
        model = load(dtype="float32")
        if model.drafter is None:
            raise InputError("the demo pair has no drafter")
        return Pair(model.target, model.drafter), dict(read_object(DEMO / "target" / "config.json"))
    return random_pair(name, "float32"), hf_config(name)


def growths(pair: Pair, turns: int) -> dict[str, Growth]:
    """Both methods at all places, in turns."""
    methods = {"plain": parts.PLAIN, f"tree of {BUDGET}": parts.tree_config(pair, BUDGET)}
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for method, config in methods.items():
        for place, (context, room) in PLACES.items():
            calls[method, place] = parts.Rounds(pair, config, context, room, ROUNDS)
        for length in (SHORT, LONG):
            calls[method, str(length)] = attention(pair, config, length)
    found = in_turns(calls, turns)
    return {
        method: Growth(
            **{place: found[method, place].shared(ROUNDS) for place in PLACES},
            attention=(found[method, str(SHORT)], found[method, str(LONG)]),
        )
        for method in methods
    }


def attention(pair: Pair, config: RoundConfig, length: int) -> Callable[[], object]:
    """Tree attention of all layers of a round over caches of `length` slots, all of them visible."""
    target = pair.target.config
    layers = [(target.attention, 1 + config.budget)] * target.layer_types.count(FULL)
    if config.budget:
        drafter = pair.drafter.config
        layers += [(drafter.attention, drafter.block_size)] * drafter.num_layers
    calls = [_attention(shape, rows, length) for shape, rows in layers]
    return lambda: [call() for call in calls]


def _attention(shape: AttentionConfig, rows: int, length: int) -> Callable[[], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (1, rows, shape.num_heads, shape.head_dim))
    k, v = (jax.random.normal(key, (1, rows, shape.num_kv_heads, shape.head_dim)) for key in keys[1:3])
    cache = [jax.random.normal(key, (1, shape.num_kv_heads, length, shape.head_dim)) for key in keys[3:]]
    return partial(jax.jit(tree_attention), q, *cache, k, v, jnp.array([length]), jnp.ones((1, rows, rows), bool))


def compared(pytorch: dict[str, object], step: float) -> dict[str, object]:
    """PyTorch's figures, and how many of our plain steps one of its takes."""
    ms = pytorch.get("ms")
    return pytorch | {"in our steps": round(ms / 1000 / step, 2)} if isinstance(ms, float) else pytorch
