"""Where compiled programs are kept, and that they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from ddtree_jax._cache import enable_compile_cache

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No cache configured and none of its variables set; the configuration comes back afterwards."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name in ("DDTREE_JAX_CACHE", *(option.upper() for option in OPTIONS)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_default_directory(tmp_path: Path):
    directory = enable_compile_cache()
    assert directory == tmp_path / "ddtree-jax" / "xla"
    assert directory.is_dir()
    assert [getattr(jax.config, name) for name in OPTIONS] == [str(directory), 0.3, -1]


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_home_cache_without_an_absolute_xdg_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert enable_compile_cache() == tmp_path / ".cache" / "ddtree-jax" / "xla"


def test_off_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DDTREE_JAX_CACHE", "off")
    assert enable_compile_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert list(tmp_path.iterdir()) == []


def test_a_directory_chosen_before_is_kept(tmp_path: Path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert enable_compile_cache() == tmp_path / "mine"


def test_thresholds_from_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5.0")
    enable_compile_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0


def test_an_unwritable_place_means_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert enable_compile_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_programs_are_written(tmp_path: Path):
    program = "import jax; from ddtree_jax._cache import *; enable_compile_cache(); jax.jit(lambda x: x * 2 + 1)(1.0)"
    environment = {**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, check=True)
    assert list((tmp_path / "ddtree-jax" / "xla").glob("jit__lambda*"))
