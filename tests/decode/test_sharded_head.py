"""A head split over the vocabulary gives the same tokens (cases.md C7): ids are global, and the temperature counts.

Needs two devices, so it runs in a process of its own with two forced host devices.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import dataclasses, sys
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import tiny
from ddtree_jax import generate

assert len(jax.devices()) == 2
mesh = Mesh(jax.devices(), ("vocab",))
config = dataclasses.replace(tiny.HYBRID, vocab_size=14)
drafter = dataclasses.replace(tiny.DRAFTER, vocab_size=14)
model = tiny.tiny_model(0, config, drafter)


def place(path, leaf, split):
    over_vocab = "lm_head" in jax.tree_util.keystr(path) and split
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("vocab") if over_vocab else PartitionSpec()))


def placed(network, split):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(network.spec.abstract()[1])]
    leaves = tuple(place(path, leaf, split) for path, leaf in zip(paths, network.leaves, strict=True))
    return dataclasses.replace(network, leaves=leaves)


def texts(split, **options):
    pair = dataclasses.replace(model, target=placed(model.target, split), drafter=placed(model.drafter, split))
    heads = [leaf for leaf in pair.target.leaves if not leaf.sharding.is_fully_replicated]
    assert len(heads) == split, "the head is split, and nothing else"
    return [r.output_ids for r in generate(pair, prompt_ids=[[1, 2, 3]], max_new_tokens=40, **options)]


greedy = dict(method="ddtree", tree_budget=12)
sampled = dict(method="ddtree", tree_budget=12, temperature=1.0, top_k=9, seed=5)
for options in (greedy, sampled):
    whole = texts(False, **options)
    assert texts(True, **options) == whole, options
    assert max(whole[0][3:]) >= 7, "tokens of the second half of the vocabulary occur"
assert texts(True, **greedy) != texts(True, **sampled)
print("equal")
"""


@pytest.mark.slow
def test_a_head_split_over_two_devices_chooses_the_same_tokens(root: Path):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
    }
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "equal"
