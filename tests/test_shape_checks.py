"""The packages are checked while tests run, so a signature that lies fails a test."""

import jax
import pytest
from jaxtyping import TypeCheckError

from ddtree_jax.text import stop_ids


def test_arguments_of_the_package_are_checked():
    with pytest.raises(TypeCheckError, match="config"):
        stop_ids(None, 3, None)  # type: ignore[arg-type]


def test_matmuls_are_exact():
    assert jax.config.jax_default_matmul_precision == "highest"
