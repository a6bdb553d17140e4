"""Timing of calls, compilation apart, and tables of figures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ddtree_jax.decode.stats import Stopwatch


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over several turns, and what its first call spent compiling."""

    seconds: float
    fastest: float
    slowest: float
    compile_seconds: float

    def shared(self, among: int) -> Timing:
        """The time of one of `among` equal pieces of work that a call did."""
        return Timing(self.seconds / among, self.fastest / among, self.slowest / among, self.compile_seconds)


def timed(call: Callable[[], Any], turns: int) -> Timing:
    """Median time of a call."""
    return in_turns({"": call}, turns)[""]


def in_turns(calls: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, Timing]:
    """Median time of each call; they take turns, so that a noisy machine disturbs all alike."""
    compiled = {name: warmed(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            seconds[name].append(elapsed(call))
    return {
        name: Timing(statistics.median(times), min(times), max(times), compiled[name])
        for name, times in seconds.items()
    }


def warmed(call: Callable[[], Any]) -> float:
    """Two calls that are not counted; the seconds that the first one spent compiling."""
    watch = Stopwatch()
    jax.block_until_ready(call())
    compiling = watch.compile_seconds
    jax.block_until_ready(call())
    return compiling


def elapsed(call: Callable[[], Any]) -> float:
    """Seconds of a call. On a GPU four are queued, as a decode loop does, so that starting one hides behind another."""
    queued = 1 if jax.default_backend() == "cpu" else 4
    start = time.perf_counter()
    for _ in range(queued):
        made = call()
    jax.block_until_ready(made)
    return (time.perf_counter() - start) / queued


def about() -> str:
    """Device and version, for the head of a table."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({device.platform}), jax {jax.__version__}"


def show(rows: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """One table, or one JSON object."""
    if as_json:
        print(json.dumps({"device": about(), "rows": rows}))
    else:
        print(f"{about()}\n{table(rows)}")


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for every row; the columns are those of the first."""
    columns = list(next(iter(rows.values())))
    widths = {c: max(7, len(c), *(len(str(row[c])) for row in rows.values())) + 2 for c in columns}
    head = f"{'':32}" + "".join(f"{c:>{widths[c]}}" for c in columns)
    body = [f"{name:32}" + "".join(f"{row[c]!s:>{widths[c]}}" for c in columns) for name, row in rows.items()]
    return "\n".join([head, *body])
