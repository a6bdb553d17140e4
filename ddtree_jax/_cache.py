"""XLA's compile cache on disk, so that a second run starts in seconds."""

import os
from pathlib import Path

import jax

# Programs that compile faster than this are not worth a file; every size is.
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.3,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def enable_compile_cache() -> Path | None:
    """Keep compiled programs in a directory of the user's cache; returns it, or None when there is to be no cache.

    The directory is JAX's own choice where one is set (JAX_COMPILATION_CACHE_DIR), else `ddtree-jax/xla` under
    XDG_CACHE_HOME or ~/.cache. DDTREE_JAX_CACHE=off leaves JAX as it is; a directory that cannot be written means no
    cache, not an error. JAX's environment variables for the thresholds win over ours.
    """
    if os.environ.get("DDTREE_JAX_CACHE", "").lower() == "off":
        return None
    try:
        chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        directory = Path(chosen or _default_directory())
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or a user without a home
        return None
    if not os.access(directory, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    for name, value in SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    return directory


def _default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ddtree-jax" / "xla"
