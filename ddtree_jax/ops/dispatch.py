"""Choosing one of an operation's writings by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Writing = TypeVar("Writing")  # a function, or a module of several


def choose(writings: Mapping[str, Writing], name: str | None) -> Writing:
    """The writing called `name`; the first of the table when `name` is None. ValueError on an unknown name."""
    if name is None:
        return next(iter(writings.values()))
    if name not in writings:
        raise ValueError(f"unknown implementation {name!r}: choose one of {', '.join(writings)}")
    return writings[name]
