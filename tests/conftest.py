"""What every test has: exact matmuls, a compile cache, the shared material, deterministic hypothesis."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import jax
import pytest

from ddtree_jax._cache import enable_compile_cache

ROOT = Path(__file__).parents[1]
CUT = ROOT / "tests" / "data" / "golden"

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


def shared_directory() -> Path:
    """Where the shared material is, if it is there at all."""
    return Path(os.environ.get("DDTREE_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The specifications and golden data beside the project (or at DDTREE_SHARED); skips where they are absent."""
    path = shared_directory()
    if not path.is_dir():
        pytest.skip("no shared material: set DDTREE_SHARED to its directory")
    return path


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """Recorded truth by name, as a directory: all of it from the shared material, else the cut in tests/data/golden.

    A pair of checkpoints that neither has is skipped.
    """
    recorded = shared_directory() / "golden"

    def find(name: str) -> Path:
        found = next((p / name for p in (recorded / "hf", recorded, CUT) if (p / name).is_dir()), None)
        if found is None:
            pytest.skip(f"no shared material, and {name} is not in the committed cut of it: set DDTREE_SHARED")
        return found

    return find
