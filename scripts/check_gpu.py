"""What the decoding programs would do on an H200, compiled on a machine without a GPU, and whether that got worse.

    python scripts/check_gpu.py --quick                  # a period of two models: what CI runs
    python scripts/check_gpu.py                          # every case; hours on two cores
    python scripts/check_gpu.py --model Qwen3.5-4B --budget 0,64 --batch 1
    python scripts/check_gpu.py --quick --cuda 12 --json
    python scripts/check_gpu.py --quick --update         # these figures are the new budget

Makes its own environment with JAX's CUDA plugin (no GPU, no driver), compiles the jitted round and prefill with
abstract weights in bfloat16, and prints a line a program. Exits with 1 after a line for every figure that is worse
than in scripts/gpu_budget.json, 2 after a mistake.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "scripts" / "gpu_budget.json"
MODELS = ("Qwen3.5-0.8B", "Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.5-35B-A3B")
PROGRAMS = ("round", "read", "write")
QUICK = (
    {"model": "Qwen3.5-0.8B", "program": "round", "budget": 16, "batch": 1, "layers": 4},
    {"model": "Qwen3.5-0.8B", "program": "round", "budget": 0, "batch": 1, "layers": 4},
    {"model": "Qwen3.5-35B-A3B", "program": "round", "budget": 16, "batch": 1, "layers": 4},
    {"model": "Qwen3.5-0.8B", "program": "read", "budget": 16, "batch": 1, "layers": 4},
    {"model": "Qwen3.5-0.8B", "program": "write", "budget": 16, "batch": 1, "layers": 4},
)
# By the Python that makes the environment: the last JAX for it, or the one of the stock H200 image.
JAX = {(3, 11): "0.10.2"}
STOCK_JAX = "0.11.2"
# The assembler alone; of the plugin's other dependencies (libraries to run on a GPU) none is needed to compile.
ASSEMBLER = {12: "nvidia-cuda-nvcc-cu12==12.9.*", 13: "nvidia-cuda-nvcc==13.0.*"}
# A figure is a regression when it exceeds its budget by more than this part.
TOLERANCE = {
    "launches": 0.0,
    "loops": 0.0,
    "host_loops": 0.0,
    "branches": 0.0,
    "cache_copies": 0.0,
    "state_copies": 0.0,
    "host_transfers": 0.0,
    "sorts": 0.0,
    "spills": 0.0,
    "moves": 0.05,
    "temp": 0.05,
}
MUST_BE_ZERO = ("cache_copies", "host_transfers", "sorts", "spills", "branches")


def main() -> int:
    """Parse, compile, print, compare."""
    arguments = parser().parse_args()
    try:
        cases = list(selected(arguments))
        python = environment(arguments)
    except (ValueError, RuntimeError) as error:
        print(f"check_gpu.py: error: {error}", file=sys.stderr)
        return 2
    results = {name(case): compiled(python, case, i, len(cases)) for i, case in enumerate(cases, 1)}
    version = jax_version(python)
    section = f"jax {version}, cuda {arguments.cuda}"
    if arguments.json:
        print(json.dumps({"versions": section, "programs": results}, indent=1))
    else:
        print(f"{section}, H200 (sm_90a), compiled without a GPU\n{table(results)}")
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    if arguments.update:
        write_budget(budget, section, results)
        return 0
    return compare(results, budget.get(section, {}), section)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="the few cases of CI, four layers each")
    made.add_argument("--model", default=",".join(MODELS), help="comma-separated (default: all four)")
    made.add_argument("--program", default=",".join(PROGRAMS), help="round, read, write: prefill is read and write")
    made.add_argument("--budget", default="0,16,64,256", help="tree budgets (default %(default)s)")
    made.add_argument("--batch", default="1,8", help="batch sizes (default %(default)s)")
    made.add_argument("--layers", type=int, default=0, help="only the first layers, e.g. 4 for a period (default: all)")
    made.add_argument("--cuda", type=int, choices=sorted(ASSEMBLER), default=13, help="plugin (default %(default)s)")
    made.add_argument(
        "--environment",
        metavar="DIR",
        default=os.environ.get("DDTREE_GPU_ENV"),
        help="where the environment is or goes (default: $DDTREE_GPU_ENV, else .venv-gpu-cuda12 or -cuda13)",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    made.add_argument("--update", action="store_true", help="make the figures the new budget")
    return made


def selected(arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The cases to compile. Prefill does not depend on the budget: the largest stands for all."""
    if arguments.quick:
        yield from QUICK
        return
    models, programs = arguments.model.split(","), arguments.program.split(",")
    budgets, batches = numbers(arguments.budget), numbers(arguments.batch)
    if unknown := set(models) - set(MODELS) | set(programs) - set(PROGRAMS):
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; choose of {', '.join((*MODELS, *PROGRAMS))}")
    for model, program, batch in product(models, programs, batches):
        for budget in budgets if program == "round" else [max(budgets)]:
            yield dict(model=model, program=program, budget=budget, batch=batch, layers=arguments.layers)


def numbers(text: str) -> list[int]:
    """Comma-separated non-negative integers; ValueError in words otherwise."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise ValueError(f"{text!r} is no comma-separated list of numbers")
    return [int(part) for part in text.split(",")]


def name(case: dict[str, Any]) -> str:
    """What a case is called in the table and in the budget."""
    part = f" ({case['layers']} layers)" if case["layers"] else ""
    tree = f", budget {case['budget']}" if case["program"] == "round" else ""
    return f"{case['model']}{part} {case['program']}{tree}, batch {case['batch']}"


def environment(arguments: argparse.Namespace) -> Path:
    """The Python of an environment with the CUDA plugin, made where it is missing."""
    place = Path(arguments.environment or ROOT / f".venv-gpu-cuda{arguments.cuda}").resolve()
    python = place / "bin" / "python"
    if not python.exists():
        say(f"making {place} (a minute or two)")
        command(sys.executable, "-m", "venv", str(place))
    plugin = f"jax-cuda{arguments.cuda}-plugin"
    probe = f"import importlib.metadata as m; m.version('{plugin}'), m.version('flax')"
    if subprocess.run([python, "-c", probe], capture_output=True).returncode:
        say("installing JAX, its CUDA plugin and the assembler (about 700 MB)")
        install(str(python), arguments.cuda)
    return python


def install(python: str, cuda: int) -> None:
    """The project's dependencies with a fixed JAX; the plugin without the libraries that only running needs."""
    version = JAX.get(sys.version_info[:2], STOCK_JAX)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    command(*pip, f"jax=={version}", "--editable", str(ROOT), ASSEMBLER[cuda])
    command(*pip, "--no-deps", f"jax-cuda{cuda}-plugin=={version}", f"jax-cuda{cuda}-pjrt=={version}")


def command(*words: str) -> None:
    """Run it; RuntimeError with the end of its output when it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:5])} ...: {(done.stderr or done.stdout).strip()[-800:]}")


def jax_version(python: Path) -> str:
    """The version of JAX in an environment."""
    probe = "import importlib.metadata as m; print(m.version('jax'))"
    return subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True).stdout.strip()


def compiled(python: Path, case: dict[str, Any], number: int, of: int) -> dict[str, Any]:
    """One case in a process of its own; a failure is a result too."""
    say(f"{number}/{of} {name(case)} ...", end=" ")
    began = time.perf_counter()
    worker = ROOT / "scripts" / "gpu_programs.py"
    variables = dict(os.environ, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2")
    done = subprocess.run([python, worker, json.dumps(case)], capture_output=True, text=True, env=variables)
    say(f"{time.perf_counter() - began:.0f} s")
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:500] if done.stderr.strip() else "no output"}
    return json.loads(done.stdout.splitlines()[-1])


COLUMNS = {  # heading: (key, how to print)
    "launches": ("launches", str),
    "loops": ("loops", str),
    "host loops": ("host_loops", str),
    "cond": ("branches", str),
    "cache copies": ("cache_copies", str),
    "state copies": ("state_copies", str),
    "host moves": ("host_transfers", str),
    "sorts": ("sorts", str),
    "moved MiB": ("moves", str),
    "temp MiB": ("temp", lambda n: f"{n / 2**20:.1f}"),
    "donated MiB": ("aliased", lambda n: f"{n / 2**20:.1f}"),
    "arguments GiB": ("arguments", lambda n: f"{n / 2**30:.2f}"),
    "registers": ("registers", str),
    "spills": ("spills", str),
    "shared B": ("shared", str),
    "kernels": ("kernels", str),
    "trace s": ("trace_seconds", str),
    "compile s": ("compile_seconds", str),
}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line a program, in Markdown."""
    lines = ["| program | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for program, figures in results.items():
        cells = ["-"] * len(COLUMNS) if "error" in figures else [show(figures[key]) for key, show in COLUMNS.values()]
        lines.append(f"| {program} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(results: dict[str, dict[str, Any]], budget: dict[str, dict[str, Any]], section: str) -> int:
    """1 after a line for everything that is worse than the budget or must be zero and is not; else 0."""
    problems = [line for program, figures in results.items() for line in regressions(program, figures, budget)]
    for line in problems:
        say(f"regression: {line}")
    if not problems:
        say(f"all {len(results)} programs within scripts/{BUDGET.name} ({section})")
    return 1 if problems else 0


def regressions(program: str, figures: dict[str, Any], budget: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with one program's figures."""
    if "error" in figures:
        return [f"{program}: does not compile: {figures['error']}"]
    lines = [f"{program}: {key} is {figures[key]}, must be 0" for key in MUST_BE_ZERO if figures[key]]
    allowed = budget.get(program)
    if allowed is None:
        return [*lines, f"{program}: no budget for these versions; --update writes one"]
    worse = (key for key, part in TOLERANCE.items() if figures[key] > allowed[key] * (1 + part))
    return lines + [f"{program}: {key} {allowed[key]} -> {figures[key]}" for key in worse if key not in MUST_BE_ZERO]


def write_budget(budget: dict[str, Any], section: str, results: dict[str, dict[str, Any]]) -> None:
    """Replace the budgets of the programs that compiled; others stay."""
    good = {program: figures for program, figures in results.items() if "error" not in figures}
    kept = {program: {key: figures[key] for key in TOLERANCE} for program, figures in good.items()}
    budget[section] = dict(sorted((budget.get(section, {}) | kept).items()))
    lines = json.dumps(dict(sorted(budget.items())), indent=1)
    BUDGET.write_text(lines + "\n")
    say(f"wrote {len(kept)} budgets to scripts/{BUDGET.name} ({section})")


def say(text: str, end: str = "\n") -> None:
    """Progress, beside the output."""
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
