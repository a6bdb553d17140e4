"""Tensor parallelism on eight forced host devices, and over two processes: the tokens of one device (cases.md C7)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec
from tiny import HYBRID

from ddtree_jax import parallel
from ddtree_jax.errors import InputError
from ddtree_jax.models import Target
from ddtree_jax.models.network import NetworkSpec
from ddtree_jax.sizes import SIZES, published

# Many devices on few cores: programs have to compile fast rather than run fast.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def start(root: Path, devices: int, *arguments: object) -> subprocess.Popen:
    environment = os.environ | {
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
    }
    command = [sys.executable, str(root / "tests" / "mesh_programs.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen) -> dict:
    """What a program printed; fails with its errors when it did."""
    out, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_eight_devices_choose_the_tokens_of_one(root: Path):
    assert said(start(root, 8, "tokens")) == {"wide": True, "narrow": True, "experts": True}


@pytest.mark.slow
def test_both_kinds_of_directory_load_onto_two_devices(root: Path):
    found = said(start(root, 2, "loaded"))
    assert found == {"target": True, "target split": True, "converted": True, "converted split": True}


@pytest.mark.slow
def test_weights_and_caches_stay_split(root: Path):
    """A device holds an eighth of every matrix and of the caches, also after rounds; the report is whole everywhere."""
    found = said(start(root, 8, "layout"))
    whole = {name for name, share in found["weights"].items() if share == 1}
    parts = ("layernorm.weight", "norm.weight", "A_log", "dt_bias", "conv1d.weight")
    assert all(name.endswith(parts) for name in whole) and len(whole) == 11
    assert set(found["weights"].values()) == {0.125, 1.0}
    assert found["caches"] == [0.125] * 4 + [1.0] * 4  # the drafter has two key heads: its context is whole
    assert all(found["report"]) and found["compilations"] == 1


@pytest.mark.slow
def test_two_processes_choose_the_tokens_of_one(root: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [start(root, 2, "process", port, 2, number) for number in range(2)]
    expected = said(start(root, 1, "alone"))["texts"]
    for process in both:
        assert said(process) == {"devices": 4, "local": 2, "texts": expected}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("devices", [2, 8])
def test_published_sizes_are_split_evenly(name: str, devices: int):
    """Nothing large is on every device, but keys and values of models with fewer key heads than devices."""
    config = published(name)
    shapes = NetworkSpec(Target, config, jax.numpy.dtype("bfloat16")).parameters()
    whole, split = 0, 0
    for parameter, leaf in shapes.items():
        spec = parallel.partition(parameter, leaf.shape, config, devices)
        if spec == PartitionSpec():
            whole += leaf.size
            assert leaf.size < 1e7 or any(part in parameter for part in ("k_proj", "v_proj", "q_proj", "o_proj"))
        else:
            split += leaf.size
            axis = list(spec).index(parallel.AXIS)
            assert leaf.shape[axis] % devices == 0
    assert whole < 0.03 * split


def test_heads_that_do_not_divide_stay_whole():
    spec = parallel.partition("layers.3.self_attn.k_proj.weight", (32, 48), HYBRID, 4)
    assert spec == PartitionSpec()  # two key heads
    assert parallel.partition("layers.3.self_attn.o_proj.weight", (48, 64), HYBRID, 4) == PartitionSpec(None, "model")
    assert parallel.partition("layers.3.self_attn.q_norm.weight", (16,), HYBRID, 4) == PartitionSpec()


def test_more_devices_than_there_are():
    with pytest.raises(InputError, match="tensor_parallel is 99, but JAX has"):
        parallel.make_mesh(99)
