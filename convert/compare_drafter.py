"""`compare DRAFTER OUT.npz --target DIR`: one recorded draft, array by array, beside ours.

`transformers` has no class for DFlash drafters, so `reference.py` cannot record one; a script around the drafter's own
code does, under the names that `observe.draft` lists, with target_taps and noise_embedding for what went in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.agreement import Difference, LogitsDifference, Tolerance, difference, logits_difference
from convert.recording import read_npz
from ddtree_jax.errors import InputError

INPUTS = ("target_taps", "noise_embedding")
LOGITS = "draft_logits_slots1"
COMPARED = re.compile(r"ctx_feature|ctx_[kv]_L\d+|layer_out_\d+|draft_hidden")
DIFFERS = 1


@dataclass(frozen=True)
class DraftReport:
    """Differences by array name, in the order in which a draft makes them, and of the logits (None: not recorded)."""

    dtype: str
    arrays: dict[str, Difference]
    logits: LogitsDifference | None

    @property
    def first(self) -> str | None:
        """The first array that leaves tolerance."""
        return next((name for name, d in self.arrays.items() if not d.ok), None)

    @property
    def problems(self) -> list[str]:
        """One line for everything that leaves tolerance; of the arrays only the first."""
        found = [] if self.first is None else [f"{self.first} is the first to leave tolerance"]
        return found + (list(self.logits.problems) if self.logits else [])

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return dataclasses.asdict(self) | {"ok": not self.problems, "problems": self.problems, "first": self.first}


def run(arguments: argparse.Namespace) -> int:
    """The command, see `compare.run`."""
    from convert.compare import finite

    if arguments.hf is not None or arguments.plot is not None:
        raise InputError("--hf and --plot are for targets; a draft is compared with OUT.npz alone")
    report = compare(arguments.directory, arguments.target, arguments.recording, arguments.dtype or "float32")
    print(json.dumps(finite(report.to_json())) if arguments.json else table(report))
    return DIFFERS if report.problems else 0


def compare(drafter: str, target: str, path: str, dtype: str) -> DraftReport:
    """Draft from the recorded taps and embeddings, and compare everything that is recorded of it."""
    from convert import observe
    from ddtree_jax.loading import load

    recorded = read_npz(path)
    if missing := sorted({*INPUTS, "draft_hidden"} - recorded.keys()):
        raise InputError(f"{path} is no recorded draft: it lacks {', '.join(missing)}")
    model = load(target, drafter, dtype=dtype)
    assert model.drafter is not None
    config, hidden = model.drafter.config, model.target.config.hidden_size
    expected = {
        "target_taps": (None, len(config.target_layer_ids) * hidden),
        "noise_embedding": (config.block_size, hidden),
    }
    check_inputs(recorded, expected, path)
    ours = observe.draft(model.target, model.drafter, *(recorded[name] for name in INPUTS))
    names = sorted((n for n in ours if n in recorded and COMPARED.fullmatch(n)), key=_order)
    ours[LOGITS] = ours.pop("logits")
    check_shapes(recorded, ours, [*names, LOGITS] if LOGITS in recorded else names, path)
    tolerance = Tolerance.of(model.target.config, dtype, "float32")
    logits = logits_difference(ours[LOGITS], recorded[LOGITS], tolerance) if LOGITS in recorded else None
    return DraftReport(dtype, {n: difference(ours[n], recorded[n], tolerance) for n in names}, logits)


def check_inputs(recorded: dict[str, np.ndarray], expected: dict[str, tuple[int | None, int]], path: str) -> None:
    """Raise InputError where a recorded input has not the expected shape (None: one row or more), or is no number."""
    for name, (rows, width) in expected.items():
        found = recorded[name]
        if found.ndim != 2 or found.shape[1] != width or found.shape[0] != (rows or max(found.shape[0], 1)):
            wanted = f"({rows or 'tokens'}, {width})"
            raise InputError(f"{path} is of another drafter: {name} is {found.shape}, should be {wanted}")
    if wrong := [f"{name} is {x.dtype}" for name, x in recorded.items() if _is_read(name) and x.dtype.kind != "f"]:
        raise InputError(f"{path} should hold floating point numbers: {'; '.join(wrong)}")


def _is_read(name: str) -> bool:
    return name in (*INPUTS, LOGITS) or COMPARED.fullmatch(name) is not None


def check_shapes(recorded: dict[str, np.ndarray], ours: dict[str, np.ndarray], names: list[str], path: str) -> None:
    """Raise InputError where a recorded array has another shape than ours."""
    wrong = [f"{n} is {recorded[n].shape}, ours {ours[n].shape}" for n in names if recorded[n].shape != ours[n].shape]
    if wrong:
        raise InputError(f"{path} is of another drafter: {'; '.join(wrong)}")


def _order(name: str) -> tuple[int, int, str]:
    """In the order of the computation: the feature, all context rows, the layers, the end."""
    stage = ("ctx_feature", "ctx_", "layer_out_", "draft_hidden")
    number = re.search(r"\d+$", name)
    return next(i for i, s in enumerate(stage) if name.startswith(s)), int(number[0]) if number else 0, name


def table(report: DraftReport) -> str:
    """The report for people."""
    lines = ["array            max       mean      tolerance used"]
    for name, d in report.arrays.items():
        lines.append(f"{name:<17}{d.max:.1e}   {d.mean:.1e}   {d.used:.0%}{'' if d.ok else '  <-- too much'}")
    if (logits := report.logits) is not None:
        lines += [
            "",
            f"logits   max {logits.max:.2e}, mean {logits.mean:.2e}, KL divergence at most {logits.kl_max:.2e}",
        ]
        lines += [f"         first choice the same in {logits.top1:.1%} of slots"]
    return "\n".join([*lines, "", *([f"DIFFERS: {p}" for p in report.problems] or ["AGREES within tolerance"])])
