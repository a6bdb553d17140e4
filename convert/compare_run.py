"""`python -m convert compare-run DIR DRAFTER RUNS.json`: recorded speculative runs, replayed round by round.

Two schemas are read: that of the authors' own runs (`ar`, `output`, `tree`) and the flat one of runs whose choices came
from uncached forwards (`autoregressive`, `tokens`, `parents`). Trees are compared node by node. Where only nodes of
equal score changed places, that is a tie, and not held against either side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.agreement import log_softmax
from ddtree_jax.config import DrafterConfig
from ddtree_jax.errors import InputError
from ddtree_jax.files import read_object

if TYPE_CHECKING:
    from convert.replay import Round
    from ddtree_jax.loading import Model

DIFFERS = 1  # exit code: the runs were compared, and part
MOST = 1_000_000  # of what a file says of itself: more is no run that anybody recorded
TIE = {"float32": 1e-4, "bfloat16": 0.25}  # path scores closer than this are equal: the noise of their logits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare-run`."""
    parser.add_argument("directory", metavar="DIR", help="the target")
    parser.add_argument("drafter", metavar="DRAFTER", help="its drafter")
    parser.add_argument("runs", metavar="RUNS.json", help="recorded runs")
    parser.add_argument("--methods", metavar="ar,dflash,16", help="ar, dflash, tree budgets (default: all there are)")
    parser.add_argument("--prompts", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns 0 where the runs are the same, 1 where not; raises InputError for a mistake in the input."""
    from ddtree_jax.loading import load

    if arguments.prompts is not None and arguments.prompts < 1:
        raise InputError("--prompts should be 1 or more")
    recorded = read_runs(Path(arguments.runs), arguments.methods, arguments.prompts)
    model = load(arguments.directory, arguments.drafter, dtype=arguments.dtype)
    assert model.drafter is not None
    check_block(recorded, model.drafter.config)
    check_tokens(recorded, model)
    reports = []
    for number, method in enumerate(recorded.methods, 1):
        print(f"compare-run: {method} ({number} of {len(recorded.methods)})", file=sys.stderr)
        reports += compare_method(model, recorded, method, TIE[arguments.dtype])
    print(json.dumps(to_json(reports)) if arguments.json else table(reports))
    return 0 if all(report.ok for report in reports) else DIFFERS


@dataclass(frozen=True)
class RecordedRound:
    """A tree, root first as node 0, and the nodes that were accepted."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    path: list[int]


@dataclass(frozen=True)
class RecordedRun:
    """One prompt with one method: output without the prompt; acceptance lengths, where recorded, of the rounds that it
    took; and those rounds.
    """

    output: list[int]
    lengths: list[int] | None
    rounds: list[RecordedRound]


@dataclass(frozen=True)
class RecordedRuns:
    """A file of runs: runs[method][i] is that of prompts[i]. Methods are 'ar', 'dflash' and tree budgets."""

    block_size: int
    new_tokens: int
    stop_ids: list[int] | None
    prompts: list[list[int]]
    runs: dict[str, list[RecordedRun]]

    @property
    def methods(self) -> list[str]:
        """The methods in the order in which they are compared."""
        return list(self.runs)


def read_runs(path: Path, methods: str | None = None, prompts: int | None = None) -> RecordedRuns:
    """Read a file; InputError where it is not of a known schema, or lacks a method that is asked for."""
    content = read_object(path)
    try:
        return _read_content(content, methods, prompts)
    except _Misfit as error:
        raise InputError(f"{path}: {error}") from None
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{path} is no file of recorded runs ({type(error).__name__}: {error})") from None


class _Misfit(Exception):
    """What is wrong in a file of runs."""


def _read_content(content: dict[str, Any], methods: str | None, prompts: int | None) -> RecordedRuns:
    block = _whole(content["block_size"], "block_size", 2, MOST)
    new_tokens = _whole(content["max_new_tokens"], "max_new_tokens", 1, MOST)
    stop_ids = content.get("stop_token_ids")
    entries = content["prompts"][:prompts]
    for number, entry in enumerate(entries):
        _object(entry, f"prompt {number}")
    offered = ["ar", "dflash", *entries[0]["ddtree"]]
    for budget in offered[2:]:
        if not re.fullmatch(r"[0-9]{1,4}", budget):
            raise _Misfit(f"ddtree should have tree budgets for its keys, found {budget!r}")
    chosen = offered if methods is None else methods.split(",")
    if missing := [method for method in chosen if method not in offered]:
        raise _Misfit(f"it has no runs of {', '.join(missing)}; it has {', '.join(offered)}")
    read = _RunReader(block, new_tokens)
    return RecordedRuns(
        block,
        new_tokens,
        None if stop_ids is None else _ids(stop_ids, "stop_token_ids"),
        [_ids(entry["prompt"], f"prompt {i}", least=1) for i, entry in enumerate(entries)],
        {method: [read.run(entry, method, i) for i, entry in enumerate(entries)] for method in chosen},
    )


def _object(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise _Misfit(f"{name} should be an object, found {_short(value)}")


def _whole(value: Any, name: str, low: int, high: int) -> int:
    """A whole number from low to high."""
    if type(value) is not int or not low <= value <= high:
        raise _Misfit(f"{name} should be a whole number from {low} to {high}, found {_short(value)}")
    return value


def _ids(value: Any, name: str, low: int = 0, high: int = 2**31 - 1, least: int = 0) -> list[int]:
    """A list of at least `least` whole numbers from low to high."""
    if not isinstance(value, list) or len(value) < least:
        raise _Misfit(f"{name} should be a list of whole numbers, found {_short(value)}")
    for number, one in enumerate(value):
        _whole(one, f"{name}, entry {number},", low, high)
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + " ..."


@dataclass(frozen=True)
class _RunReader:
    """Reads runs of a file with this block size and limit."""

    block: int
    new_tokens: int

    def run(self, entry: dict[str, Any], method: str, prompt: int) -> RecordedRun:
        """One prompt's run with one method."""
        where = f"prompt {prompt}, {method}"
        plain = entry["ar"] if "ar" in entry else entry["autoregressive"]
        if method == "ar":
            return RecordedRun(self.output(entry, plain, where), None, [])
        found = entry["dflash"] if method == "dflash" else entry["ddtree"][method]
        _object(found, f"{where}: a run")
        output = self.output(entry, found.get("output", plain), where)
        lengths = _ids(found["acceptance_lengths"], f"{where}: acceptance_lengths", 1, self.block)
        lengths = rounds_needed(lengths, len(output))
        rounds = found.get("rounds", [])[: len(lengths)]
        return RecordedRun(output, lengths, [self.round(one, f"{where}, round {i}") for i, one in enumerate(rounds)])

    def output(self, entry: dict[str, Any], tokens: Any, where: str) -> list[int]:
        """What follows the prompt."""
        size = len(entry["prompt"])
        new = _ids(tokens, f"{where}: output", least=size + 1)[size:]
        if tokens[:size] != entry["prompt"] or len(new) > self.new_tokens:
            raise _Misfit(f"{where}: output should be the prompt and at most max_new_tokens, {self.new_tokens}, more")
        return new

    def round(self, entry: Any, where: str) -> RecordedRound:
        """Both schemas leave the root's token and depth out, and count it as node 0. Its token is not compared: that is
        the output's business.
        """
        _object(entry, where)
        if "tree" in entry:
            tree, path = entry["tree"], entry["accepted_indices"]
            tokens, parents, depths = tree["node_token_ids"], tree["parents"][1:], tree["node_depths"]
        else:
            tokens, parents, depths, path = (entry[name] for name in ("tokens", "parents", "depths", "accepted"))
        size = len(_ids(tokens, f"{where}: tokens"))
        _ids(parents, f"{where}: parents", 0, size)
        _ids(depths, f"{where}: depths", 1, self.block - 1)
        if not size == len(parents) == len(depths):
            raise _Misfit(f"{where}: {size} tokens, {len(parents)} parents and {len(depths)} depths behind the root")
        if early := [i for i, parent in enumerate(parents, 1) if parent >= i]:
            raise _Misfit(f"{where}: node {early[0]} comes before its parent")
        return RecordedRound(tokens, parents, depths, _ids(path, f"{where}: accepted nodes", 0, size, least=1))


def rounds_needed(lengths: list[int], new_tokens: int) -> list[int]:
    """Acceptance lengths of the rounds that produce `new_tokens`, the first of which comes from prefill. The recorded
    loops may run one round more.
    """
    produced = 1 + np.cumsum([0, *lengths])
    enough = np.flatnonzero(produced >= new_tokens)
    return lengths[: enough[0]] if enough.size else lengths


def check_tokens(recorded: RecordedRuns, model: Model) -> None:
    """Raise InputError where prompts or trees hold tokens that the target has not, or a prompt fills its context."""
    from ddtree_jax.generation import read_prompts

    read_prompts(model, None, recorded.prompts)
    vocab = model.target.config.vocab_size
    rounds = (one for runs in recorded.runs.values() for run in runs for one in run.rounds)
    if beyond := [token for one in rounds for token in one.tokens if token >= vocab]:
        raise InputError(f"a recorded tree has token {beyond[0]}; the target's vocabulary is {vocab}")


def check_block(recorded: RecordedRuns, drafter: DrafterConfig) -> None:
    """Raise InputError where the drafter cannot be the recorded one."""
    if drafter.block_size != recorded.block_size:
        raise InputError(
            f"the runs were recorded with blocks of {recorded.block_size}, this drafter has {drafter.block_size}"
        )


@dataclass(frozen=True)
class RunReport:
    """Where one prompt's run with one method parts from the recorded one; None: nowhere.

    tokens: place in the output. tree, path, acceptance: the first round whose tree has other nodes, whose accepted path
    is another, whose acceptance length is another. ties: rounds in which only nodes of equal score changed places; what
    follows from them alone is not reported.
    """

    method: str
    prompt: int
    rounds: int
    tokens: int | None
    tree: int | None = None
    path: int | None = None
    acceptance: int | None = None
    ties: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run is the recorded one."""
        return all(place is None for place in (self.tokens, self.tree, self.path, self.acceptance))


def compare_method(model: Model, recorded: RecordedRuns, method: str, tie: float) -> list[RunReport]:
    """All prompts with one method, as one batch."""
    options: dict[str, Any] = dict(max_new_tokens=recorded.new_tokens, stop_ids=recorded.stop_ids)
    runs = recorded.runs[method]
    if method == "ar":
        import jax

        from ddtree_jax.generation import generate

        with jax.default_matmul_precision("highest"):
            results = generate(model, prompt_ids=recorded.prompts, method="ar", **options)
        outputs = [result.output_ids[result.prompt_tokens :] for result in results]
        return [
            RunReport(method, i, len(ours) - 1, parting(ours, run.output))
            for i, (ours, run) in enumerate(zip(outputs, runs, strict=True))
        ]
    from convert.replay import outputs, replay

    options |= dict(method="dflash") if method == "dflash" else dict(method="ddtree", tree_budget=int(method))
    rounds, state = replay(model, recorded.prompts, **options)
    everything = zip(rounds, outputs(state), runs, strict=True)
    return [compare_rounds(method, i, *one, tie=tie) for i, one in enumerate(everything)]


def compare_rounds(
    method: str, prompt: int, rounds: list[Round], output: list[int], recorded: RecordedRun, tie: float
) -> RunReport:
    """One prompt's rounds beside the recorded ones."""
    trees, paths, ties = [], [], []
    for number, (ours, theirs) in enumerate(zip(rounds, recorded.rounds, strict=False)):
        if same_tree(ours, theirs):
            paths += [number] if ours.path != theirs.path else []
        elif same_scores(ours, theirs, tie):
            ties.append(number)
        else:
            trees.append(number)
        if len(ours.path) != len(theirs.path):
            break  # from here on the rounds start at different places
    lengths = [len(one.path) for one in rounds]
    acceptance = None if recorded.lengths is None else parting(lengths, recorded.lengths)
    return RunReport(
        method,
        prompt,
        len(rounds),
        tokens=parting(output, recorded.output),
        tree=next(iter(trees), None),
        path=next(iter(paths), None),
        acceptance=None if acceptance in ties else acceptance,
        ties=tuple(ties),
    )


def parting(ours: list[int], theirs: list[int]) -> int | None:
    """The first place at which two lists differ, or at which one of them ends."""
    differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    end = None if len(ours) == len(theirs) else min(len(ours), len(theirs))
    return next(differing, end)


def same_tree(ours: Round, theirs: RecordedRound) -> bool:
    """Whether all nodes behind the root are the same, in the same order."""
    return (ours.tokens[1:], ours.parents[1:], ours.depths[1:]) == (theirs.tokens, theirs.parents, theirs.depths)


def same_scores(ours: Round, theirs: RecordedRound, tie: float) -> bool:
    """Whether two trees have the same path scores under our draft logits: then they differ by the order of equals."""
    sizes = len(ours.tokens) - 1, len(theirs.tokens)
    if sizes[0] != sizes[1] or ours.draft_logits is None:
        return False
    scores = log_softmax(ours.draft_logits)
    a, b = (np.sort(path_scores(scores, tree)) for tree in (_without_root(ours), theirs))
    return bool(np.all(np.abs(a - b) <= tie))


def _without_root(one: Round) -> RecordedRound:
    return RecordedRound(one.tokens[1:], one.parents[1:], one.depths[1:], one.path)


def path_scores(log_probs: np.ndarray, tree: RecordedRound) -> np.ndarray:
    """Sum of log-probabilities [L, V] along the path of every node; parent 0 is the root."""
    scores = [0.0]
    for token, parent, depth in zip(tree.tokens, tree.parents, tree.depths, strict=True):
        scores.append(scores[parent] + log_probs[depth - 1, token])
    return np.array(scores[1:])


def to_json(reports: list[RunReport]) -> dict[str, Any]:
    """A dictionary for JSON."""
    runs = [dataclasses.asdict(report) | {"ok": report.ok} for report in reports]
    return {"ok": all(report.ok for report in reports), "runs": runs}


def table(reports: list[RunReport]) -> str:
    """The reports for people: one line a method, and one for every run that parts."""
    lines = ["method    prompts   rounds    ties      same"]
    for method in dict.fromkeys(report.method for report in reports):
        of = [report for report in reports if report.method == method]
        cells = len(of), sum(r.rounds for r in of), sum(len(r.ties) for r in of), sum(r.ok for r in of)
        lines.append(f"{method:<10}" + "".join(f"{cell:<10}" for cell in cells))
    parted = [report for report in reports if not report.ok]
    lines += [""] + [f"DIFFERS: {_where(report)}" for report in parted]
    return "\n".join(lines if parted else [*lines, "The same in every round"])


def _where(report: RunReport) -> str:
    places = (
        ("tree", "in round", report.tree),
        ("accepted path", "in round", report.path),
        ("acceptance length", "in round", report.acceptance),
        ("output", "at token", report.tokens),
    )
    found = "; ".join(f"{what} {where} {at}" for what, where, at in places if at is not None)
    return f"{report.method}, prompt {report.prompt}: {found}"
