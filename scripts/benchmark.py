"""How fast decoding is on this machine.

    python scripts/benchmark.py decode                 # plain, chain and tree side by side: the demo pair
    python scripts/benchmark.py decode --transformers --json
    python scripts/benchmark.py decode --target DIR --drafter DIR --budgets 8,16,32,64 --dtype bfloat16
    python scripts/benchmark.py gpu                    # the parts of a round at Qwen3.5-4B's shapes
    python scripts/benchmark.py gpu --size Qwen3.5-27B --out results-27b
    python scripts/benchmark.py gpu --size tiny        # the same code in a minute, without a GPU
    python scripts/benchmark.py cpu                    # what a round costs as the text grows
    python scripts/benchmark.py operations
    python scripts/benchmark.py convert --gigabytes 4

Whatever is compared is measured in turns in one process, so that a noisy machine disturbs all alike (only PyTorch's
step in `gpu` and `cpu` has a process of its own); medians are printed, and compilation is not in them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import conversion, cpu, decoding, gpu, operations

from ddtree_jax.errors import InputError

COMMANDS = {
    "decode": (decoding, "tokens per second of every method"),
    "gpu": (gpu, "the parts of a round at published sizes, against the time of reading the weights"),
    "cpu": (cpu, "what a round costs as the text grows, and against PyTorch"),
    "operations": (operations, "milliseconds of every writing of an operation"),
    "convert": (conversion, "conversion to Orbax beside cp and fsync of the same bytes"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Parse and run; 2 after one line about a mistake in the input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
    except InputError as error:
        print(f"benchmark.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
