"""Reading the text and JSON files that users give: whatever is wrong with one becomes an InputError of one line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from ddtree_jax.errors import InputError


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. Pipes and devices are refused, since reading one might never end, but for those that a
    shell makes for a command's input.
    """
    try:
        kind = path.stat().st_mode
        piped = str(path).startswith(("/dev/stdin", "/dev/fd/"))
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or piped):  # a directory says so itself
            raise InputError(f"{path} cannot be read: it is not a regular file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read: it is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object")
    return value


def read_object_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} when there is no such file."""
    return read_object(path) if path.exists() else {}
