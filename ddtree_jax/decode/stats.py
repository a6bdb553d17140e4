"""What is reported about a generation: acceptance, rounds, tree sizes, times (compilation told apart from running)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """Seconds jax has spent tracing, lowering and compiling in this process, reads of the compile cache included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in COMPILE_EVENTS:
            self.seconds += duration_secs


COMPILE_CLOCK = CompileClock()


class Stopwatch:
    """Wall-clock seconds of a stage without what was spent compiling in it."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again from zero."""
        self._wall, self._compile = time.perf_counter(), COMPILE_CLOCK.seconds

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation since the start."""
        return COMPILE_CLOCK.seconds - self._compile

    @property
    def seconds(self) -> float:
        """Seconds since the start, compilation apart."""
        return max(time.perf_counter() - self._wall - self.compile_seconds, 0.0)


@dataclass(frozen=True)
class Timings:
    """Seconds of a batch: the prompts, the rounds, and compilation (only the first call with new shapes has any)."""

    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class Stats:
    """Acceptance of one request.

    acceptance_lengths: tokens that each round's walk accepted, the root included, as found by the target: the last may
      reach past a stop
    or the limit. tree_nodes: nodes verified in all rounds, roots included.
    """

    acceptance_lengths: list[int]
    rounds: int
    tree_nodes: int

    @property
    def mean_acceptance_length(self) -> float:
        """tau: mean accepted nodes a round, the root counted (1 = nothing accepted); 0 without a round."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else 0.0

    @property
    def mean_tree_nodes(self) -> float:
        """Mean nodes verified a round."""
        return self.tree_nodes / self.rounds if self.rounds else 0.0

    def acceptance_by_position(self) -> list[float]:
        """For depth 1, 2, ...: the share of rounds that accepted a node at least that deep."""
        return acceptance_by_position(self.acceptance_lengths)


def acceptance_by_position(lengths: Sequence[int]) -> list[float]:
    """Share of rounds whose acceptance length is over d, for d = 1 .. longest - 1."""
    return [sum(n > d for n in lengths) / len(lengths) for d in range(1, max(lengths, default=1))]


def rounded(value: object) -> object:
    """Floats to six digits, for JSON that people read."""
    return round(value, 6) if isinstance(value, float) else value


def as_json(record: Any) -> dict[str, Any]:
    """A flat dataclass as a dictionary for JSON."""
    return {f.name: rounded(getattr(record, f.name)) for f in dataclasses.fields(record)}
