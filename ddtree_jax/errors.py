"""The one exception that stands for a user's mistake, and how a program says it."""

import sys


class InputError(ValueError):
    """A mistake in what the user gave: its message is one line that says what is wrong and what to do."""


def report(program: str, error: InputError) -> int:
    """Print a user's mistake as one line on standard error; returns the exit code, 2."""
    print(f"{program}: error:", " ".join(str(error).split()), file=sys.stderr)
    return 2
