"""`python -m convert compare-run`: recorded rounds, intact and tampered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.__main__ import main
from convert.compare_run import RecordedRound, RecordedRun, compare_rounds, parting, path_scores, read_runs, same_tree
from convert.replay import Round
from ddtree_jax.errors import InputError

# position 1: tokens 0 and 1 tie; position 2: token 2 is best
DRAFT = np.log(np.array([[0.4, 0.4, 0.2], [0.1, 0.2, 0.7]], np.float32))

UNEVEN = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], np.float32))


def ours(tokens: list[int], parents: list[int], depths: list[int], path: list[int]) -> Round:
    return Round([9, *tokens], [-1, *parents], [0, *depths], path, DRAFT)


def compared(rounds: list[Round], output: list[int], recorded: RecordedRun):
    return compare_rounds("3", 0, rounds, output, recorded, tie=1e-4)


TREE = ([0, 1, 2], [0, 0, 1], [1, 1, 2])
SWAPPED = ([1, 0, 2], [0, 0, 1], [1, 1, 2])  # other nodes, the same scores
OTHER = ([0, 2, 2], [0, 0, 1], [1, 1, 2])  # a worse node


def test_path_scores():
    scores = path_scores(DRAFT, RecordedRound(*TREE, path=[0]))
    assert scores == pytest.approx(np.log([0.4, 0.4, 0.28]))


def test_parting():
    assert parting([1, 2], [1, 2]) is None
    assert parting([1, 2], [1, 3]) == 1
    assert parting([1, 2], [1, 2, 3]) == parting([1, 2, 3], [1, 2]) == 2


def test_same_run():
    recorded = RecordedRun([9, 0, 5], [2], [RecordedRound(*TREE, path=[0, 1])])
    report = compared([ours(*TREE, path=[0, 1])], [9, 0, 5], recorded)
    assert report.ok and report.rounds == 1 and report.ties == ()


def test_tree_parts():
    first, second = RecordedRound(*TREE, path=[0]), RecordedRound(*OTHER, path=[0])
    report = compared([ours(*TREE, path=[0])] * 2, [9, 5, 6], RecordedRun([9, 5, 6], [1, 1], [first, second]))
    assert not report.ok and report.tree == 1
    assert report.path is report.acceptance is report.tokens is None


def test_other_parents_are_another_tree():
    """The same tokens at the same depths: node 3 hangs on node 1 here, on node 2 there."""
    moved = ([0, 1, 2], [0, 0, 2], [1, 1, 2])
    recorded = RecordedRun([9, 5], [1], [RecordedRound(*moved, path=[0])])
    assert not same_tree(ours(*TREE, path=[0]), recorded.rounds[0])
    report = compared([Round([9, *TREE[0]], [-1, *TREE[1]], [0, *TREE[2]], [0], UNEVEN)], [9, 5], recorded)
    assert not report.ok and report.tree == 0 and report.ties == ()


def test_trees_of_other_sizes_part():
    smaller = RecordedRound(*(nodes[:2] for nodes in TREE), path=[0])
    assert compared([ours(*TREE, path=[0])], [9, 5], RecordedRun([9, 5], [1], [smaller])).tree == 0


def test_ties_are_noted_and_excuse_what_follows():
    """The swapped tree holds the other of two equal tokens, so the walk may go elsewhere; the output may not."""
    recorded = RecordedRun([9, 0, 2, 5], [3], [RecordedRound(*SWAPPED, path=[0, 2, 3])])
    report = compared([ours(*TREE, path=[0, 1]), ours(*TREE, path=[0])], [9, 0, 2, 5], recorded)
    assert report.ok and report.ties == (0,)
    assert compared([ours(*TREE, path=[0, 1])], [9, 0, 2, 4], recorded).tokens == 3


def test_path_and_acceptance_part():
    recorded = RecordedRun([9, 0, 5], [2], [RecordedRound(*TREE, path=[0, 2])])
    assert compared([ours(*TREE, path=[0, 1])], [9, 0, 5], recorded).path == 0
    longer = RecordedRun([9, 0, 5], [3], [RecordedRound(*TREE, path=[0, 1, 3])])
    report = compared([ours(*TREE, path=[0, 1])], [9, 0, 5], longer)
    assert (report.path, report.acceptance) == (0, 0)


def test_rounds_beyond_the_first_other_acceptance_are_not_compared():
    """From there on they start at different places."""
    theirs = [RecordedRound(*TREE, path=[0]), RecordedRound(*OTHER, path=[0])]
    report = compared([ours(*TREE, path=[0, 1]), ours(*TREE, path=[0])], [9], RecordedRun([9], [1, 1], theirs))
    assert (report.path, report.acceptance, report.tree) == (0, 0, None)


def small_file(**changes: Any) -> dict[str, Any]:
    tree = {"node_token_ids": [4], "node_depths": [1], "parents": [-1, 0]}
    rounds = [{"accepted_indices": [0, 1], "tree": tree}] * 2
    run = {"output": [7, 8, 1, 2, 3], "acceptance_lengths": [2, 2], "rounds": rounds}
    entry = {"prompt": [7, 8], "ar": [7, 8, 1, 2, 3], "dflash": {"acceptance_lengths": [1, 1]}, "ddtree": {"1": run}}
    return {"block_size": 8, "max_new_tokens": 3, "prompts": [entry]} | changes


def test_reading(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(small_file()))
    recorded = read_runs(path)
    assert recorded.methods == ["ar", "dflash", "1"] and recorded.prompts == [[7, 8]] and recorded.stop_ids is None
    assert recorded.runs["ar"] == [RecordedRun([1, 2, 3], None, [])]
    assert recorded.runs["dflash"] == [RecordedRun([1, 2, 3], [1, 1], [])]
    # one round yields the two tokens after the first; the recorded loop ran another
    assert recorded.runs["1"] == [RecordedRun([1, 2, 3], [2], [RecordedRound([4], [0], [1], [0, 1])])]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "no file of recorded runs"),
        (small_file(prompts=[]), "no file of recorded runs"),
        (small_file(prompts=[{"prompt": [1]}]), "KeyError: 'ddtree'"),
        (small_file(prompts=3), "TypeError"),
        ([], "must hold a JSON object"),
    ],
)
def test_unreadable(tmp_path, content, problem):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=problem):
        read_runs(path)


def changed_run(**changes: Any) -> dict[str, Any]:
    """The file with another run of one node a tree."""
    content = small_file()
    content["prompts"][0]["ddtree"]["1"] |= changes
    return content


def changed_round(accepted: Any = (0, 1), **changes: Any) -> dict[str, Any]:
    tree = {"node_token_ids": [4, 5], "node_depths": [1, 2], "parents": [-1, 0, 1]} | changes
    return changed_run(rounds=[{"accepted_indices": list(accepted) if accepted else accepted, "tree": tree}])


def keyed(budget: str) -> dict[str, Any]:
    content = small_file()
    content["prompts"][0]["ddtree"] = {budget: content["prompts"][0]["ddtree"]["1"]}
    return content


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (small_file(block_size="8"), "block_size should be a whole number from 2 to 1000000, found '8'"),
        (small_file(max_new_tokens="3"), "max_new_tokens should be a whole number"),
        (small_file(max_new_tokens=10**12), "max_new_tokens should be a whole number"),
        (small_file(max_new_tokens=True), "max_new_tokens should be a whole number"),
        (small_file(max_new_tokens=2), "at most max_new_tokens, 2, more"),
        (small_file(stop_token_ids="0"), "stop_token_ids should be a list"),
        (small_file(stop_token_ids=["0"]), "stop_token_ids, entry 0, should be a whole number"),
        (keyed("many"), "tree budgets for its keys, found 'many'"),
        (changed_run(output=[7, 9, 1]), "output should be the prompt and"),
        (changed_run(output=[7, 8, 1.5]), "output, entry 2, should be a whole number"),
        (changed_run(acceptance_lengths=[0, 3]), "acceptance_lengths, entry 0, should be a whole number from 1 to 8"),
        (changed_run(acceptance_lengths=None), "acceptance_lengths should be a list"),
        (changed_run(rounds=[[]]), "round 0 should be an object, found []"),
        (small_file(prompts=[small_file()["prompts"][0], []]), "prompt 1 should be an object, found []"),
        (changed_round(accepted=None), "round 0: accepted nodes should be a list of whole numbers, found None"),
        (changed_round(accepted=[0, 3]), "accepted nodes, entry 1, should be a whole number from 0 to 2, found 3"),
        (changed_round(parents=[-1, 0, 9]), "parents, entry 1, should be a whole number from 0 to 2, found 9"),
        (changed_round(parents=[-1, 0, 2]), "node 2 comes before its parent"),
        (changed_round(parents=[-1, 0]), "2 tokens, 1 parents and 2 depths"),
        (changed_round(node_depths=[1, 8]), "depths, entry 1, should be a whole number from 1 to 7, found 8"),
        (changed_round(node_token_ids=[4, -1]), "tokens, entry 1, should be a whole number"),
    ],
)
def test_misfits(tmp_path, content, problem):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(changed_round()))
    assert len(read_runs(path).runs["1"][0].rounds) == 1
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_runs(path)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_that_is_a_list(tmp_path):
    content = small_file()
    content["prompts"][0]["ddtree"]["1"] = [1, 2]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"prompt 0, 1: a run should be an object, found \[1, 2\]"):
        read_runs(path)


def test_tokens_beyond_the_vocabulary(golden, tmp_path, capsys):
    """Said before anything is decoded."""
    directory = golden("official_qwen3")
    path = tmp_path / "runs.json"
    words = ["compare-run", str(directory / "target"), str(directory / "drafter"), str(path)]
    path.write_text(json.dumps(changed_round(node_token_ids=[4, 99999])))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "a recorded tree has token 99999; the target's vocabulary is" in said and said.count("\n") == 1
    assert main([*words, "--prompts", "0"]) == 2
    assert "--prompts should be 1 or more" in capsys.readouterr().err


def test_mistakes(golden, tmp_path, capsys):
    directory = golden("official_qwen3")
    pair = [str(directory / "target"), str(directory / "drafter")]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(small_file(block_size=4)))
    assert main(["compare-run", *pair, str(path)]) == 2
    assert "blocks of 4, this drafter has 8" in capsys.readouterr().err
    assert main(["compare-run", *pair, str(path), "--methods", "ar,5"]) == 2
    assert "has no runs of 5; it has ar, dflash, 1" in capsys.readouterr().err


def both_files(golden, tmp_path: Path, change) -> tuple[Path, Path]:
    """The recorded pair, and its runs after `change`."""
    directory = golden("official_qwen3")
    content = json.loads((directory / "runs.json").read_text())
    change(content["prompts"])
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(content))
    return directory, path


@pytest.mark.slow
def test_recorded_runs(golden, tmp_path, capsys):
    """The authors' runs of two prompts; then the same with one node of one tree, and one token, changed."""

    def tamper(prompts):
        prompts[1]["ddtree"]["7"]["rounds"][3]["tree"]["node_token_ids"][2] ^= 64
        prompts[0]["ar"][len(prompts[0]["prompt"]) + 20] ^= 1

    directory, tampered = both_files(golden, tmp_path, tamper)
    words = ["compare-run", str(directory / "target"), str(directory / "drafter")]
    options = ["--methods", "ar,7", "--prompts", "2"]
    assert main([*words, str(directory / "runs.json"), *options]) == 0
    assert capsys.readouterr().out.endswith("The same in every round\n")
    assert main([*words, str(tampered), *options, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    parted = {(run["method"], run["prompt"]): (run["tokens"], run["tree"]) for run in report["runs"] if not run["ok"]}
    assert not report["ok"] and parted == {("ar", 0): (20, None), ("7", 1): (None, 3)}
    assert main([*words, str(tampered), *options]) == 1
    assert "DIFFERS: 7, prompt 1: tree in round 3\n" in capsys.readouterr().out
