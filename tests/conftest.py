"""What every test has: exact matmuls, a compile cache, the shared material, deterministic hypothesis."""

import os
from pathlib import Path

import hypothesis
import jax
import pytest

from ddtree_jax._cache import enable_compile_cache

ROOT = Path(__file__).parents[1]

# Examples compile programs, so there is no deadline; the same examples every time, so a failure stays a failure.
hypothesis.settings.register_profile("project", derandomize=True, deadline=None)
hypothesis.settings.load_profile("project")


def pytest_configure() -> None:
    enable_compile_cache()
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU here")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's directory."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The specifications and golden data beside the project (or at DDTREE_SHARED); skips where they are absent."""
    path = Path(os.environ.get("DDTREE_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip("no shared material: set DDTREE_SHARED to its directory")
    return path
