"""`python -m convert compare DIR OUT.npz`: our forward pass beside what PyTorch computed, layer by layer."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert import reference
from convert.agreement import Difference, LogitsDifference, Tolerance, difference, logits_difference
from convert.recording import Recording, read_recording
from ddtree_jax.config import TargetConfig
from ddtree_jax.errors import InputError

DIFFERS = 1  # exit code: the numbers were compared, and leave tolerance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.add_argument("directory", metavar="DIR", help="the checkpoint that this library runs")
    parser.add_argument("recording", metavar="OUT.npz", nargs="?", help="what `reference` wrote")
    parser.add_argument("--target", metavar="DIR", help="DIR is a drafter, this its target, OUT.npz a recorded draft")
    parser.add_argument("--hf", metavar="DIR2", help="run `reference` on this checkpoint first, instead of OUT.npz")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter with torch, for --hf")
    reference.add_input_arguments(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of our side (default: PyTorch's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", metavar="PNG", help="also draw the differences by layer")


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns 0 where the numbers agree, 1 where not; raises InputError for a mistake in the input."""
    if (arguments.recording is None) == (arguments.hf is None):
        raise InputError("give either OUT.npz or --hf DIR2")
    if arguments.hf is None and (arguments.ids, arguments.prompt, arguments.random) != (None, None, None):
        raise InputError("--ids, --prompt and --random belong to --hf; OUT.npz has its tokens")
    if arguments.target is not None:
        from convert import compare_drafter

        return compare_drafter.run(arguments)
    report = compare(arguments.directory, recording_of(arguments), arguments.dtype)
    if arguments.plot:
        plot(report, arguments.plot)
    print(json.dumps(report.to_json()) if arguments.json else table(report))
    return 0 if report.ok else DIFFERS


def recording_of(arguments: argparse.Namespace) -> Recording:
    """Read the recording, or make it."""
    if arguments.recording is not None:
        return read_recording(arguments.recording)
    if arguments.python == sys.executable and importlib.util.find_spec("torch") is None:
        raise InputError("--hf needs torch and transformers here, or --python of an environment that has them")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "reference.npz"
        record(arguments, out)
        return read_recording(out)


def record(arguments: argparse.Namespace, out: Path) -> None:
    """Run `reference` as a process of its own: torch's memory is given back before ours is needed."""
    command = [arguments.python, reference.__file__, arguments.hf, str(out), "--greedy", str(arguments.greedy)]
    for name in ("ids", "prompt", "random", "dtype"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"--python {arguments.python} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise InputError(f"PyTorch's side failed (exit code {done.returncode}): {said[-1]}")


@dataclass(frozen=True)
class LayerReport:
    """One layer. whole: its output in our pass over the tokens. alone: its output when it is given PyTorch's input;
    mixer and mlp: what its modules then add to the residual stream. None: not recorded.
    """

    index: int
    kind: str
    whole: Difference | None
    alone: Difference | None
    mixer: Difference | None
    mlp: Difference | None

    @property
    def ok(self) -> bool:
        """Whether everything recorded of it is within tolerance."""
        return all(d is None or d.ok for d in (self.whole, self.alone, self.mixer, self.mlp))

    @property
    def part(self) -> str | None:
        """The first of its modules that is off by itself; None where the layer is not, or only by its input."""
        parts = (("mixer", self.mixer), ("feed-forward", self.mlp), ("norms or residual", self.alone))
        return next((name for name, d in parts if d is not None and not d.ok), None)


@dataclass(frozen=True)
class GreedyReport:
    """Greedy continuation: `same` of `count` tokens before the first that differs, and how clear PyTorch's choice there
    was (the gap of its two best logits).
    """

    count: int
    same: int
    margin: float | None


@dataclass(frozen=True)
class Report:
    """A comparison; `problems` is empty where everything is within tolerance."""

    origin: dict[str, Any]
    dtype: str
    tokens: int
    embeddings: Difference | None
    layers: list[LayerReport]
    logits: LogitsDifference
    greedy: GreedyReport
    tolerance: Tolerance

    @property
    def first_layer(self) -> LayerReport | None:
        """The first layer that leaves tolerance."""
        return next((layer for layer in self.layers if not layer.ok), None)

    @property
    def problems(self) -> list[str]:
        """One line for everything that leaves tolerance; of the layers only the first."""
        found = []
        if self.embeddings is not None and not self.embeddings.ok:
            found.append("the embeddings leave tolerance")
        if (first := self.first_layer) is not None:
            found.append(f"layer {first.index} ({first.kind}) is the first to leave tolerance{_blame(first)}")
        found += self.logits.problems
        if self.tolerance.greedy and self.greedy.margin is not None and self.greedy.margin > 2 * self.logits.max:
            found.append(f"greedy token {self.greedy.same} differs (PyTorch's margin {self.greedy.margin:.2g})")
        return found

    @property
    def ok(self) -> bool:
        """Whether everything is within tolerance."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON; what is not finite is null."""
        first = self.first_layer
        fields = dataclasses.asdict(self) | {"ok": self.ok, "problems": self.problems}
        fields["layers"] = [dataclasses.asdict(layer) | {"ok": layer.ok, "part": layer.part} for layer in self.layers]
        return finite(fields | {"first_layer": None if first is None else first.index})


def _blame(layer: LayerReport) -> str:
    if layer.part is not None:
        return f", by itself: its {layer.part}"
    return "; given PyTorch's input it does not" if layer.alone is not None else ""


def finite(value: Any) -> Any:
    """The value with None for infinities and not-a-numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(directory: str | Path, recording: Recording, dtype: str | None = None) -> Report:
    """Load the checkpoint and compare its forward pass with the recording. `dtype` None: that of the recording."""
    from convert import observe
    from ddtree_jax.loading import load

    dtype = dtype or recording.dtype
    model = load(directory, dtype=dtype)
    config = model.target.config
    recording.check_against(config)
    tolerance = Tolerance.of(config, dtype, recording.dtype)
    inputs = recording.inputs(config.num_layers)
    whole = observe.whole(model.target, recording.ids)
    alone = observe.alone(model.target, inputs) if inputs else {}
    return Report(
        origin=recording.meta,
        dtype=dtype,
        tokens=len(recording.ids),
        embeddings=_difference(whole, recording, "hidden_00", tolerance),
        layers=[layer_report(config, i, whole, alone, recording, tolerance) for i in range(config.num_layers)],
        logits=logits_difference(whole["logits"], recording.logits, tolerance),
        greedy=greedy_report(model, recording),
        tolerance=tolerance,
    )


def layer_report(
    config: TargetConfig,
    index: int,
    whole: dict[str, np.ndarray],
    alone: dict[str, np.ndarray],
    recording: Recording,
    tolerance: Tolerance,
) -> LayerReport:
    """Everything recorded of one layer against ours."""
    output, mixer, mlp = f"hidden_{index + 1:02d}", f"mixer_{index:02d}", f"mlp_{index:02d}"
    return LayerReport(
        index,
        config.layer_types[index].removesuffix("_attention") + (", experts" if config.has_experts(index) else ""),
        whole=_difference(whole, recording, output, tolerance),
        alone=_difference(alone, recording, output, tolerance),
        mixer=_difference(alone, recording, mixer, tolerance),
        mlp=_difference(alone, recording, mlp, tolerance),
    )


def _difference(ours: dict[str, np.ndarray], recording: Recording, name: str, tolerance: Tolerance):
    """None unless both sides have it."""
    if name not in ours or name not in recording.layered:
        return None
    return difference(ours[name], recording.layered[name], tolerance)


def greedy_report(model: Any, recording: Recording) -> GreedyReport:
    """Continue the recorded tokens as PyTorch did, and see how long the texts are the same."""
    import jax

    from ddtree_jax.generation import generate

    count = len(recording.greedy)
    if count == 0:
        return GreedyReport(0, 0, None)
    with jax.default_matmul_precision("highest"):
        (result,) = generate(model, prompt_ids=[recording.ids.tolist()], method="ar", max_new_tokens=count, stop_ids=[])
    ours = np.array(result.output_ids[len(recording.ids) :])
    differing = np.flatnonzero(ours != recording.greedy[: len(ours)])
    same = int(differing[0]) if differing.size else len(ours)
    return GreedyReport(count, same, float(recording.margin[same]) if differing.size else None)


def table(report: Report) -> str:
    """The report for people."""
    origin, logits, greedy = report.origin, report.logits, report.greedy
    lines = [
        f"{origin.get('class', 'PyTorch')} in {origin.get('dtype', 'float32')} (transformers "
        f"{origin.get('transformers', '?')}) and this library in {report.dtype}, {report.tokens} tokens",
        "",
        "                      our pass            each layer given PyTorch's input",
        "layer                 max       mean      max       mean      mixer     mlp       tolerance used",
        _row("embeddings", report.embeddings, None, None, None),
        *(_row(f"{x.index:<3} {x.kind}", x.whole, x.alone, x.mixer, x.mlp) for x in report.layers),
        "",
        f"logits   max {logits.max:.2e}, 99 % below {logits.p99:.2e}, mean {logits.mean:.2e}",
        f"         KL divergence mean {logits.kl_mean:.2e}, max {logits.kl_max:.2e}",
        f"         first choice the same at {logits.top1:.1%} of positions, {logits.top5:.1%} of the first five",
        f"greedy   {greedy.same} of {greedy.count} tokens the same"
        + ("" if greedy.margin is None else f"; PyTorch's margin at the next is {greedy.margin:.2g}"),
        "",
        *([f"DIFFERS: {problem}" for problem in report.problems] or ["AGREES within tolerance"]),
    ]
    return "\n".join(lines)


def _row(name: str, *parts: Difference | None) -> str:
    whole, alone, mixer, mlp = parts
    cells = [
        *((whole.max, whole.mean) if whole else (None, None)),
        *((alone.max, alone.mean) if alone else (None, None)),
        *(d.max if d else None for d in (mixer, mlp)),
    ]
    used = [d.used for d in parts if d]
    return f"{name:<22}" + "".join("-         " if c is None else f"{c:.1e}   " for c in cells) + _used(used)


def _used(parts: list[float]) -> str:
    """The largest part of a tolerance that is used, in words."""
    if not parts:
        return ""
    worst = np.max(parts)
    return f"{worst:.0%}" if worst <= 1 else f"{worst:.3g} times  <-- too much"


def plot(report: Report, path: str) -> None:
    """Differences by layer, to a PNG file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'ddtree-jax[plot]'") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    series = (
        ("our pass, max", "o-", lambda x: x.whole and x.whole.max),
        ("our pass, mean", "o:", lambda x: x.whole and x.whole.mean),
        ("given PyTorch's input, max", "s-", lambda x: x.alone and x.alone.max),
        ("its mixer, max", "^--", lambda x: x.mixer and x.mixer.max),
        ("its feed-forward, max", "v--", lambda x: x.mlp and x.mlp.max),
    )
    for label, style, value in series:
        points = [(x.index, v) for x in report.layers if (v := value(x)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if math.isfinite(report.tolerance.layer_max):
        axes.axhline(report.tolerance.layer_max, color="black", linewidth=1, label="tolerance")
    axes.set(xlabel="layer", ylabel="absolute difference", title=f"{report.origin.get('source', '')} ({report.dtype})")
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
