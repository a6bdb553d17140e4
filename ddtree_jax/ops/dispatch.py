"""Choosing one of an operation's writings by name, or by the platform that a program is traced for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

Writing = TypeVar("Writing")  # a function, or a module of several
_TRACING_FOR: ContextVar[str | None] = ContextVar("tracing_for", default=None)


def platform() -> str:
    """The platform that programs are traced for: JAX's default ("cpu", "gpu"), unless inside `tracing_for`."""
    return _TRACING_FOR.get() or jax.default_backend()


@contextmanager
def tracing_for(name: str) -> Iterator[None]:
    """Trace for a platform that this process does not have, to compile ahead of time (scripts/check_gpu.py).

    jit keeps traces by their arguments only: use one platform in a process.
    """
    token = _TRACING_FOR.set(name)
    try:
        yield
    finally:
        _TRACING_FOR.reset(token)


def choose(writings: Mapping[str, Writing], name: str | None, gpu: str | None = None) -> Writing:
    """The writing called `name`. None: the one called `gpu` when tracing for a GPU, else the first of the table.

    ValueError on an unknown name.
    """
    if name is None:
        name = gpu if gpu and platform() == "gpu" else next(iter(writings))
    if name not in writings:
        raise ValueError(f"unknown implementation {name!r}: choose one of {', '.join(writings)}")
    return writings[name]
