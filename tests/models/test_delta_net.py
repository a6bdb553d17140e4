"""The unit norm of Gated DeltaNet: literal values where the placement of its epsilon shows."""

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.models.delta_net import unit


def test_epsilon_is_added_to_the_sum_of_squares():  # cases.md B12
    # |x|^2 = 25e-8, so x / sqrt(1.25e-6); an epsilon added to the mean would make it x / sqrt(2.25e-6)
    np.testing.assert_allclose(unit(jnp.array([3e-4, 4e-4])), [0.26832816, 0.35777088], rtol=1e-6)
    np.testing.assert_allclose(unit(jnp.array([3.0, 4.0])), [0.6, 0.8], rtol=1e-6)


def test_a_zero_row_has_a_finite_gradient():  # cases.md B5
    np.testing.assert_array_equal(unit(jnp.zeros(4)), np.zeros(4))
    gradient = jax.grad(lambda x: unit(x).sum())(jnp.zeros(4))
    np.testing.assert_allclose(gradient, np.full(4, 1e3), rtol=1e-6)
