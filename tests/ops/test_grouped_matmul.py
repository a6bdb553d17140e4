"""Grouped products against a loop, in every writing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.oracle import equations

from ddtree_jax.ops.grouped_matmul import IMPLEMENTATIONS, grouped_matmul

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def case(sizes: list[int], columns: int = 5, out: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(sizes), columns)).astype(np.float32)
    return x, rng.standard_normal((len(sizes), out, columns)).astype(np.float32)


@each
@pytest.mark.parametrize("sizes", [[2, 0, 3, 1], [0, 0, 0, 7], [1, 1, 1, 1], [6, 0, 0, 0]])
def test_every_row_takes_the_matrix_of_its_group(implementation, sizes):
    x, weight = case(sizes)
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.stack([weight[e] @ row for e, row in zip(group, x, strict=True)])
    y = grouped_matmul(jnp.array(x), jnp.array(weight), jnp.array(sizes, jnp.int32), implementation=implementation)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@each
@pytest.mark.parametrize("sizes", [[2, 0, 3, 1], [0, 0, 0, 3], [3, 3, 3, 3]])
def test_a_bound_on_the_rows_of_a_group(implementation, sizes):
    """Slots that a group does not fill hold other groups' rows, of which nothing may come back."""
    x, weight = (jnp.array(part) for part in case(sizes))
    count = jnp.array(sizes, jnp.int32)
    expected = grouped_matmul(x, weight, count, implementation="reference")
    y = grouped_matmul(x, weight, count, largest=3, implementation=implementation)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "largest", "shape"),
    [([2, 0, 3, 1], 3, (4, 3, 3)), ([2, 0, 3, 1], 6, (4, 6, 3)), ([1, 0, 2, 1], 2, (4, 3))],
)
def test_work_is_bounded(sizes, largest, shape):
    """More rows than groups: `largest` for each group. Else each row has its own product and no other."""
    x, weight = (jnp.array(part) for part in case(sizes))
    traced = jax.make_jaxpr(lambda *a: grouped_matmul(*a, largest=largest))(x, weight, jnp.array(sizes))
    products = [e.outvars[0].aval.shape for e in equations(traced) if e.primitive.name == "dot_general"]
    assert products == [shape]


@each
def test_bfloat16_accumulates_in_float32(implementation):
    # 256 products of 1 and then one of 1: a bfloat16 sum stays at 256
    x = jnp.ones((2, 257), jnp.bfloat16)
    weight = jnp.ones((1, 2, 257), jnp.bfloat16)
    y = grouped_matmul(x, weight, jnp.array([2], jnp.int32), implementation=implementation)
    assert y.dtype == jnp.bfloat16
    exact = grouped_matmul(x.astype(jnp.float32), weight.astype(jnp.float32), jnp.array([2], jnp.int32))
    assert float(exact[0, 0]) == 257.0
    assert float(y[0, 0]) in (256.0, 258.0)  # 257 rounded once


def test_unknown_implementation_is_refused():
    x, weight = case([1])
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        grouped_matmul(jnp.array(x), jnp.array(weight), jnp.array([1], jnp.int32), implementation="fast")
