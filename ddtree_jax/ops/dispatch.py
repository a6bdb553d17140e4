"""Choosing one of an operation's writings by name, or by the platform that a program is traced for."""

from __future__ import annotations

import os
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
    """The writing called `name`. None: the one that the environment variable DDTREE_IMPLEMENTATION names, if there is
    one; else that called `gpu` when tracing for a single GPU, else the first of the table.

    A kernel is one device's program, so on a mesh, where XLA splits programs, it is never the default. ValueError on an
    unknown name.
    """
    preferred = os.environ.get("DDTREE_IMPLEMENTATION")
    if name is None and preferred in writings:
        name = preferred
    if name is None:
        on_one_gpu = platform() == "gpu" and jax.sharding.get_abstract_mesh().empty
        name = gpu if gpu and on_one_gpu else next(iter(writings))
    if name not in writings:
        raise ValueError(f"unknown implementation {name!r}: choose one of {', '.join(writings)}")
    return writings[name]
