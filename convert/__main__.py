"""`python -m convert`: a conversion, or the command that the first word names.

Each command's module has `add_arguments` and `run`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ddtree_jax.cli import OneLineParser
from ddtree_jax.errors import InputError, report

COMMANDS = {
    "reference": ("convert.reference", "Record what PyTorch computes for a checkpoint"),
    "compare": ("convert.compare", "Compare our forward pass with such a recording"),
    "compare-run": ("convert.compare_run", "Replay recorded speculative runs and say where they part"),
}
USAGE = (
    "usage: python -m convert SRC DST ...      convert a checkpoint to Orbax (python -m convert SRC --help)\n"
    "       python -m convert COMMAND ...\n\n"
) + "\n".join(f"  {word:<12} {text}" for word, (_, text) in COMMANDS.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 where a comparison differs, 2 after one line about the input."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        return import_module("convert.command").main(words)
    module, description = COMMANDS[words[0]]
    command = import_module(module)
    parser = OneLineParser(prog=f"python -m convert {words[0]}", description=description + ".")
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(words[1:]))
    except InputError as error:
        return report("convert", error)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
