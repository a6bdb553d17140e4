"""scripts/benchmark.py gpu on the smallest size: the whole path without a GPU, and the figures it works with."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import benchmark
from benchmarks import costs, gpu, parts
from benchmarks.pairs import Pair, random_network, random_pair, target_spec
from benchmarks.timing import Timing

from ddtree_jax.models.network import NetworkSpec
from ddtree_jax.sizes import DRAFTERS, published, published_drafter


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair("tiny", "float32")


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, capsys):
    words = "gpu --size tiny --turns 1 --context 20 --nodes 9 --budgets 15 --prefill 64 --no-transformers --json"
    assert benchmark.main([*words.split(), "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads((tmp_path / "results.json").read_text())
    found = {part["name"]: part for part in printed["parts"]}
    assert list(found) == [
        "ar step",
        "verify N=9",
        "draft",
        "expand budget=15",
        "commit N=16",
        "round budget=15",
        "round forced budget=15",
        "prefill 64",
    ]
    assert all(part["timing"]["seconds"] > 0 for part in found.values())
    assert found["round forced budget=15"]["accepted"] == 16
    assert 1 <= found["round budget=15"]["accepted"] < 3
    assert printed["platform"] == "cpu" and printed["weights_read_once_seconds"] > 0
    assert [ratio["met"] for ratio in printed["ratios"]] == [None]  # aims are a GPU's


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu"], "JAX finds no GPU for Qwen3.5-4B; --size tiny or --cpu runs on the CPU"),
        (["gpu", "--size", "Qwen9"], "unknown size 'Qwen9'; use one of Qwen3.5-0.8B"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    assert benchmark.main([*words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_every_published_drafter_belongs_to_its_target():
    for name in DRAFTERS:
        published_drafter(name).check_against(published(name))


def test_random_weights_have_the_published_shapes_and_are_drawn(pair):
    assert {n: x.shape for n, x in pair.target.spec.parameters().items()} == dict(
        zip(pair.target.spec.parameters(), (x.shape for x in pair.target.leaves), strict=True)
    )
    matrix = next(x for x in pair.target.leaves if x.ndim == 2 and x.size > 20000)
    assert float(jnp.std(matrix)) == pytest.approx(0.02, rel=0.05)
    other = random_network(pair.target.spec, 1)
    assert not jnp.array_equal(other.leaves[0], pair.target.leaves[0])


def shortened(size: str) -> NetworkSpec:
    """The first period of a published target."""
    spec = target_spec(size, "bfloat16")
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, layer_types=spec.config.layer_types[:4]))


def test_weight_bytes_count_what_a_pass_reads():
    sizes = {name: shortened(name) for name in ("Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.5-35B-A3B")}
    whole = {
        name: sum(math.prod(x.shape) * x.dtype.itemsize for x in spec.parameters().values())
        for name, spec in sizes.items()
    }
    read = {name: costs.weight_bytes(spec, 1) for name, spec in sizes.items()}
    assert read["Qwen3.5-4B"] == whole["Qwen3.5-4B"]  # the embedding is the head
    assert whole["Qwen3.5-27B"] - read["Qwen3.5-27B"] == 2 * 248319 * 5120  # all rows of the embedding but one
    unread = 4 * 248 * 3 * 2048 * 512 + 248319 * 2048  # 8 of 256 experts in each of four layers
    assert whole["Qwen3.5-35B-A3B"] - read["Qwen3.5-35B-A3B"] == pytest.approx(2 * unread)
    assert costs.weight_bytes(sizes["Qwen3.5-35B-A3B"], 10**6) == pytest.approx(whole["Qwen3.5-35B-A3B"])


def test_work_of_a_pass_grows_with_rows_and_context():
    spec = shortened("Qwen3.5-4B")
    one, many, far = (costs.target_pass(spec, *shape) for shape in ((1, 0), (65, 0), (1, 1024)))
    assert many.operations == pytest.approx(65 * one.operations, rel=1e-2)
    assert far.nbytes - one.nbytes == 1024 * 4096  # a token in one layer's KV cache


def test_ratios_and_verdicts(tmp_path):
    results = gpu.Results("Qwen3.5-4B", {"platform": "gpu"}, tmp_path, floor=1.0, transformers={"ms": 2400.0})
    for name, seconds in {"ar step": 1.3, "verify N=65": 1.5, "round budget=64": 2.6}.items():
        results.rows[name] = gpu.Row(name, Timing(seconds, seconds, seconds, 0.0))
    assert results.ratios() == [
        ("ar step / weights read once", 1.3, "at most 1.25", False),
        ("verify of 65 nodes / ar step", 1.154, "at most 1.25", True),
        ("round of 65 nodes / ar step", 2.0, "at most 1.6", False),
        ("transformers step / ar step", 1.846, "at least 2.0", False),
    ]
    assert "MISSED" in results.table()
    results.head["platform"] = "cpu"
    assert {met for *_, met in results.ratios()} == {None}


@pytest.mark.slow
def test_a_commit_takes_the_deepest_first_children(pair):
    tree, depth = parts.some_tree(pair, 17)
    state = parts.ready(pair, parts.tree_config(pair, 16), 20, 64)
    _, features, rows = parts.verify(pair.target, pair.drafter, state, tree, depth)
    after = parts.commit(pair.drafter, state, tree, rows, features, depth)
    node, expected = 0, 20
    while node is not None:
        children = [i for i in range(17) if bool(tree.valid[0, i]) and int(tree.parent[0, i]) == node]
        node, expected = (children[0] if children else None), expected + 1
    assert int(after.length[0]) == expected > 21
