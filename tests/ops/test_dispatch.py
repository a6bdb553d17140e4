"""Which writing of an operation runs."""

import jax
import jax.numpy as jnp
import pytest

from ddtree_jax.ops.dispatch import choose, platform, tracing_for
from ddtree_jax.ops.tree_attention import tree_attention
from ddtree_jax.ops.tree_delta import tree_delta

TABLE = {"xla": 1, "pallas": 2}
ROWS = jnp.zeros((1, 3, 2, 16))
CACHE = jnp.zeros((1, 2, 4, 16))
ATTENTION = (ROWS, CACHE, CACHE, ROWS, ROWS, jnp.zeros(1, jnp.int32), jnp.ones((1, 3, 3), bool))


def test_the_default_depends_on_the_platform():
    assert choose(TABLE, None, gpu="pallas") == 1
    with tracing_for("gpu"):
        assert platform() == "gpu"
        assert choose(TABLE, None, gpu="pallas") == 2
        assert choose(TABLE, None) == 1
        assert choose(TABLE, "xla", gpu="pallas") == 1
    assert platform() == jax.default_backend()
    with pytest.raises(ValueError, match="unknown implementation 'mosaic': choose one of xla, pallas"):
        choose(TABLE, "mosaic")


def test_the_environment_chooses_for_all(monkeypatch):
    monkeypatch.setenv("DDTREE_IMPLEMENTATION", "pallas")
    assert choose(TABLE, None) == 2
    assert choose(TABLE, "xla") == 1
    assert choose({"xla": 1, "scan": 3}, None) == 1  # an operation that has no such writing keeps its default
    assert calls_kernel(tree_attention, *ATTENTION)


def test_no_kernel_is_the_default_on_a_mesh():
    """XLA splits programs over a mesh, and cannot split a kernel."""
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    with tracing_for("gpu"), jax.sharding.use_abstract_mesh(mesh):
        assert choose(TABLE, None, gpu="pallas") == 1


def calls_kernel(f, *arguments, **options) -> bool:
    return "pallas_call" in str(jax.make_jaxpr(lambda *x: f(*x, **options))(*arguments))


@pytest.mark.parametrize("nodes", [1, 3])
def test_kernels_are_the_default_on_a_gpu_only(nodes):
    rows, state = jnp.zeros((1, nodes, 2, 16)), jnp.zeros((1, 2, 16, 16))
    gate, parent = jnp.zeros((1, nodes, 2)), jnp.full((1, nodes), -1)
    delta = (rows, rows, rows, gate, gate, state, parent, jnp.zeros_like(parent))
    cache, mask = jnp.zeros((1, 2, 4, 16)), jnp.ones((1, nodes, nodes), bool)
    attention = (rows, cache, cache, rows, rows, jnp.zeros(1, jnp.int32), mask)
    assert not calls_kernel(tree_delta, *delta, max_depth=1) and not calls_kernel(tree_attention, *attention)
    with tracing_for("gpu"):
        assert calls_kernel(tree_attention, *attention)
        assert calls_kernel(tree_delta, *delta, max_depth=1) == (nodes > 1)  # a lone root has nothing to solve
