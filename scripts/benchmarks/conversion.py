"""What `benchmark.py convert` measures: a generated checkpoint, its conversion in a process of its own, and a copy.

Peak memory is that of the whole process: Python, JAX and Orbax (0.4 GB), and the pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from benchmarks.timing import show
from convert.recipes import recipe
from ddtree_jax.config import TargetConfig
from ddtree_jax.models import Target
from ddtree_jax.models.network import NetworkSpec

SHARD = 1 << 30  # bytes of a file
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 131072,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
CONVERTS = """
import json, resource, sys, time
started = time.perf_counter()
from convert.conversion import convert, make_job
job = make_job(sys.argv[1], sys.argv[2], "bfloat16")
ready, cpu = time.perf_counter(), time.process_time()
convert(job)
done, cpu = time.perf_counter(), time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
largest = max(parameter.nbytes for parameter in job.plan.parameters)
seconds = {"seconds": done - ready, "cpu_seconds": cpu, "import_seconds": ready - started}
print(json.dumps(seconds | {"peak": peak, "largest": largest}))
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--gigabytes", type=float, default=1.0, metavar="N", help="default %(default)s")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="turns (default %(default)s)")
    command.add_argument("--directory", metavar="DIR", help="where to write three times that much (default: temporary)")


def run(arguments: argparse.Namespace) -> None:
    """Wall time and peak memory of a conversion, and of `cp` with fsync, in turns."""
    show(measure(arguments.gigabytes, arguments.repeats, arguments.directory), arguments.json)


def measure(gigabytes: float, repeats: int, directory: str | None) -> dict[str, dict[str, float]]:
    """Rows of the table: the copy and the conversion, in turns."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        source, target = Path(name) / "source", Path(name) / "target"
        nbytes = generate(source, int(gigabytes * 1e9))
        copies, conversions = [], []
        for _ in tqdm(range(repeats), desc="turns", disable=None, leave=False):
            copies.append(copy(source, target))
            conversions.append(convert(source, target))
    copied = statistics.median(run["seconds"] for run in copies)
    return {"cp and fsync": row(copies, nbytes, copied), "convert": row(conversions, nbytes, copied)}


def row(runs: list[dict[str, float]], nbytes: int, copied: float) -> dict[str, float]:
    """One row: medians, and the highest peak memory, by itself and beyond the largest tensor."""
    seconds = [run["seconds"] for run in runs]
    middle, peak = statistics.median(seconds), max(run["peak"] for run in runs)
    return {
        "median_s": round(middle, 2),
        "min_s": round(min(seconds), 2),
        "cpu_s": round(statistics.median(run["cpu_seconds"] for run in runs), 2),
        "gb_per_s": round(nbytes / middle / 1e9, 2),
        "against_cp": round(middle / copied, 2),
        "peak_gb": round(peak / 1e9, 2),
        "above_largest_gb": round((peak - runs[0]["largest"]) / 1e9, 2),
    }


def generate(directory: Path, nbytes: int) -> int:
    """A dense checkpoint of about so many bytes in shards, of random bits; returns its bytes."""
    directory.mkdir()
    one, two = (sum(np.prod(shape) * 2 for shape in shapes(layers).values()) for layers in (1, 2))
    layers = max(round((nbytes - one) / (two - one)) + 1, 1)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    rng, weight_map, shard = np.random.default_rng(0), {}, {}
    for name, shape in tqdm(shapes(layers).items(), desc="generating", disable=None, leave=False):
        shard[name] = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), ml_dtypes.bfloat16).reshape(shape)
        if sum(x.nbytes for x in shard.values()) > SHARD:
            weight_map |= write_shard(directory, shard)
            shard = {}
    weight_map |= write_shard(directory, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in directory.iterdir())


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors."""
    config = TargetConfig.from_hf(CONFIG | {"num_hidden_layers": layers})
    wanted = NetworkSpec(Target, config, np.dtype(ml_dtypes.bfloat16)).parameters()
    made = [recipe(name, leaf.shape, config, ()) for name, leaf in wanted.items()]
    return {f"model.{name}": shape for one in made for name, shape in one.tensors.items()}


def write_shard(directory: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """A file of tensors; returns its part of the index."""
    name = f"model-{len(list(directory.glob('*.safetensors'))) + 1:05}.safetensors"
    save_file(tensors, directory / name)
    return dict.fromkeys(tensors, name)


def copy(source: Path, target: Path) -> dict[str, float]:
    """What `cp` and fsync took; the copy is removed."""
    sync(source)
    before, started = os.times(), time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    sync(target)
    seconds, after = time.perf_counter() - started, os.times()
    shutil.rmtree(target)
    return {"seconds": seconds, "cpu_seconds": sum(after[:4]) - sum(before[:4]), "peak": 0, "largest": 0}


def sync(directory: Path) -> None:
    """Force every file of a directory to the disk."""
    for file in directory.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def convert(source: Path, target: Path) -> dict[str, float]:
    """What a conversion in a process of its own took; the result is removed."""
    command = [sys.executable, "-c", CONVERTS, source, target]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    shutil.rmtree(target)
    return json.loads(done.stdout.splitlines()[-1])
