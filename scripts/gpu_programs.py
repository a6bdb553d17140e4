"""One program compiled for an H200 without a GPU, and what it would do there; the worker of check_gpu.py.

    python scripts/gpu_programs.py '{"model": "Qwen3.5-0.8B", "program": "round", "budget": 16, "batch": 1}'

Weights and caches are abstract: nothing is allocated. Needs JAX with a CUDA plugin; prints one line of JSON.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin compiles without being initialised; it would look for a driver

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_schedule
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.decode import loop
from ddtree_jax.decode.sampling import Sampling
from ddtree_jax.decode.state import DecodeState, RoundConfig
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.blocks import KVCache
from ddtree_jax.models.network import Network, NetworkSpec
from ddtree_jax.ops.dispatch import tracing_for
from ddtree_jax.sizes import published, published_drafter

PERIOD = 4  # layers after which a hybrid repeats
CHUNK = 1024  # prompt tokens of the prefill programs
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """What to compile. layers: 0 for all of the model's. program: round, read (a prefill chunk) or write."""

    model: str
    program: str = "round"
    budget: int = 16
    batch: int = 1
    layers: int = 0
    capacity: int = 4096


def main() -> None:
    """Compile the case that the only argument describes."""
    case = Case(**json.loads(sys.argv[1]))
    print(json.dumps(check(case)))


def check(case: Case) -> dict[str, Any]:
    """Compile and count."""
    mesh = Mesh(topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1").devices, ("x",))
    target, drafter = networks(case)
    with tempfile.TemporaryDirectory() as dump, jax.set_mesh(mesh), tracing_for("gpu"):
        state = jax.eval_shape(lambda t, d: loop.start(t, d, request(case)), target, drafter)
        began = time.perf_counter()
        traced = trace(case, *on_device(mesh, (target, drafter, state)), mesh)
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"})
        seconds = time.perf_counter() - lowered_at
        kernels = assembled(Path(dump))
        thunks = "".join(path.read_text() for path in Path(dump).glob("*thunk_sequence.txt"))
    counted = gpu_schedule.schedule(gpu_schedule.parse(compiled.as_text()), cache_arrays(state))
    memory = compiled.memory_analysis()
    return {
        **dataclasses.asdict(counted),
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "registers": max((k.registers for k in kernels), default=0),
        "spills": sum(k.spills for k in kernels),
        "spilling": sorted(k.name for k in kernels if k.spills),
        "kernels": len(kernels),
        "shared": gpu_schedule.dynamic_shared(thunks),
        "trace_seconds": round(lowered_at - began, 1),
        "compile_seconds": round(seconds, 1),
        "jax": jax.__version__,
    }


def networks(case: Case) -> tuple[Network, Network | None]:
    """Target and drafter with abstract weights; plain decoding has no drafter."""
    target, drafter = published(case.model), published_drafter(case.model)
    if case.layers:
        target, drafter = shortened(target, drafter, case.layers)
    return abstract(Target, target), abstract(Drafter, drafter) if case.budget else None


def shortened(target: TargetConfig, drafter: DrafterConfig, layers: int) -> tuple[TargetConfig, DrafterConfig]:
    """The first layers of a target, and of its drafter the last two and as many taps as are left to read."""
    target = dataclasses.replace(target, layer_types=target.layer_types[:layers])
    drafter = dataclasses.replace(
        drafter,
        causal=drafter.causal[-2:],
        windows=drafter.windows[-2:],
        target_layer_ids=tuple(range(min(layers - 1, len(drafter.target_layer_ids)))),
        num_target_layers=None,
    )
    return target, drafter


def abstract(module: type, config: Any) -> Network:
    """A network in bfloat16 whose weights are shapes."""
    spec = NetworkSpec(module, config, jnp.dtype(jnp.bfloat16))
    return Network(tuple(jax.tree.leaves(spec.abstract()[1])), spec)


def request(case: Case) -> loop.Request:
    """Greedy prompts whose caches have `capacity` slots."""
    zero, key = jnp.zeros(case.batch), jax.random.split(jax.random.key(0), case.batch)
    sampling = Sampling(key, zero, zero.astype(jnp.int32), zero + 1, zero, greedy=True, filtered=False)
    prompt = [0] * (case.capacity - CHUNK)
    limits = [CHUNK // 2] * case.batch
    return loop.Request([prompt] * case.batch, limits, [case.budget] * case.batch, (1,), sampling, round_config(case))


def round_config(case: Case) -> RoundConfig:
    """The static shape of the case's round."""
    horizon = published_drafter(case.model).horizon if case.budget else 0
    return RoundConfig(case.budget, "best-first" if case.budget else "chain", horizon)


def trace(case: Case, target: Network, drafter: Network | None, state: DecodeState, mesh: Mesh) -> Any:
    """The case's program, traced over abstract arguments."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return on_device(mesh, jax.ShapeDtypeStruct(shape, dtype))

    if case.program == "round":
        return loop.decode_rounds.trace(target, drafter, state, array(), config=round_config(case))
    last = array(case.batch, target.config.hidden_size, dtype=jnp.bfloat16)
    lengths, start = array(case.batch), array()
    reading = (target, drafter, state, last, array(case.batch, CHUNK), lengths, start)
    if case.program == "read":
        return loop.read_chunk.trace(*reading)
    _, made, features = on_device(mesh, jax.eval_shape(loop.read_chunk, *reading))
    state, rows = loop.take_delta(state, made)
    return loop.write_chunk.trace(target, drafter, state, rows, features, lengths, start)


def on_device(mesh: Mesh, tree: Any) -> Any:
    """The same shapes, placed on the device that is compiled for."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def cache_arrays(state: DecodeState) -> set[gpu_schedule.Array]:
    """The arrays of which no copy may be made: keys, values and recurrent states."""
    caches = (*state.caches, *state.draft_caches)
    arrays = [x for cache in caches for x in ((cache.k, cache.v) if isinstance(cache, KVCache) else (cache.state,))]
    names = {"bfloat16": "bf16", "float32": "f32"}
    return {gpu_schedule.Array(names[str(x.dtype)], x.shape) for x in arrays}


def assembled(dump: Path) -> list[gpu_schedule.Kernel]:
    """Registers and spills of every kernel, by the assembler that XLA finds too."""
    output = []
    for path in sorted(dump.rglob("*.ptx")):
        command = [assembler(), "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"ptxas refuses {path.name}: {result.stderr.strip()[:500]}")
        output.append(result.stdout + result.stderr)
    return gpu_schedule.kernels("\n".join(output))


def assembler() -> str:
    """ptxas: XLA looks at the PATH first, then at the wheels beside JAX, then at the system's CUDA."""
    wheels = sorted(Path(jax.__file__).parent.parent.glob("nvidia/*/bin/ptxas"))
    found = shutil.which("ptxas") or next(map(str, wheels), "/usr/local/cuda/bin/ptxas")
    if not Path(found).exists():
        raise FileNotFoundError("no ptxas: install the wheel nvidia-cuda-nvcc")
    return found


if __name__ == "__main__":
    main()
