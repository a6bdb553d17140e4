"""What DFlash2 adds, against float64 references written from reference_models.md 5.6; the recorded drafter is among
those of test_drafter_parity.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddtree_jax.config import BlockConvConfig, SelectorConfig
from ddtree_jax.models.dflash2 import BlockConv, CandidateSelector

B, L, H, V = 2, 5, 12, 40


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def randomised(module: nnx.Module, seed: int) -> nnx.Module:
    """The module with every parameter drawn from N(0, 1)."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    drawn = [jnp.asarray(normal(seed + i, *x.shape)) for i, x in enumerate(leaves)]
    return nnx.merge(graph, jax.tree.unflatten(tree, drawn))


def conv_reference(conv: BlockConv, u: np.ndarray, x: np.ndarray, half: int, blocks: int) -> np.ndarray:
    """One half of the convolution, slot by slot, channel by channel; u and x hold `blocks` blocks in a row."""
    taps, group = conv.config.taps, conv.config.group_size
    base = np.asarray(conv.base_kernel[...], np.float64)
    predicted = u.astype(np.float64) @ np.asarray(conv.kernel_projection.weight[...], np.float64).T
    predicted = predicted.reshape(*u.shape[:2], 2, taps, H // group)
    out, size = np.zeros(x.shape), x.shape[1] // blocks
    for b, t, j, c in np.ndindex(*x.shape[:2], taps, H):
        if t % size >= j:
            out[b, t, c] += (base[half, j, c] + predicted[b, t, half, j, c // group]) * x[b, t - j, c]
    return out


@pytest.mark.parametrize(("taps", "group"), [(2, 4), (2, 1), (3, 12), (1, 3)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_convolution(taps, group, blocks):
    """Also several blocks in one row, as in training: none reaches into the one before."""
    conv = randomised(BlockConv(BlockConvConfig(taps, group), H, rngs=nnx.Rngs(0), dtype=jnp.float32), taps)
    u, x = normal(1, B, L * blocks, H), normal(2, B, L * blocks, H)
    slot = jnp.broadcast_to(jnp.arange(L * blocks) % L, (B, L * blocks))
    for half, kernel in enumerate(conv.kernels(jnp.asarray(u))):
        expected = conv_reference(conv, u, x, half, blocks)
        np.testing.assert_allclose(conv(jnp.asarray(x), kernel, slot), expected, atol=1e-4)


def test_a_new_convolution_changes_little():
    """It starts as the identity plus a small predicted part, so that training can begin from a DFlash drafter."""
    conv = BlockConv(BlockConvConfig(2, 4), H, rngs=nnx.Rngs(0), dtype=jnp.float32)
    x = jnp.asarray(normal(3, B, L, H))
    slot = jnp.broadcast_to(jnp.arange(L), (B, L))
    for kernel in conv.kernels(x):
        assert 0 < np.linalg.norm(conv(x, kernel, slot) - x) < 0.2 * np.linalg.norm(x)


def make_selector(top_k: int, rank: int = 3) -> CandidateSelector:
    selector = CandidateSelector(SelectorConfig(rank, top_k), H, V, rngs=nnx.Rngs(0), dtype=jnp.float32)
    return randomised(selector, 7)


def pair_scores(selector: CandidateSelector, hidden: np.ndarray) -> np.ndarray:
    """[L, V, V]: what token c gets after token p, in float64."""
    names = ("predecessor_codebook", "successor_codebook")
    before, after = (np.asarray(getattr(selector, name)[...], np.float64) for name in names)
    project = np.asarray(selector.hidden_projection.weight[...], np.float64)
    return np.einsum("pr,lr,cr->lpc", before, hidden @ project.T, after)


@pytest.mark.parametrize("top_k", [1, 6, V, 3 * V])
@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_selector(top_k, scale):
    """Every list of followers, with its log-probabilities, and the group each leads to."""
    selector, scores, hidden = make_selector(top_k), 3 * normal(4, B, L, V), normal(5, B, L, H)
    root, count = np.array([3, 17]), min(top_k, V)
    branches = selector(jnp.asarray(scores), jnp.asarray(hidden), jnp.asarray(root), jnp.full(B, scale))
    assert branches.logp.shape == (B, L, count, count) and branches.logp.dtype == jnp.float32
    for b in range(B):
        pair = scale * pair_scores(selector, hidden[b])
        candidates = [np.argsort(-row, kind="stable")[:count] for row in scores[b]]
        for slot in range(L):
            for group in range(count if slot else 1):
                before = candidates[slot - 1][group] if slot else root[b]
                value = scores[b, slot, candidates[slot]] + pair[slot, before, candidates[slot]]
                order = np.argsort(-value, kind="stable")
                logp = value - value.max() - np.log(np.exp(value - value.max()).sum())
                np.testing.assert_array_equal(branches.token[b, slot, group], candidates[slot][order])
                np.testing.assert_array_equal(branches.group[b, slot, group], order)
                np.testing.assert_allclose(branches.logp[b, slot, group], logp[order], atol=1e-4)


def test_selector_without_numbers():
    """A slot whose logits are not numbers has no followers, and a token of logit -inf follows nothing."""
    scores = normal(6, B, L, V)
    scores[0, 1] = np.nan
    scores[1, 2, 4:] = -np.inf
    hidden = jnp.asarray(normal(5, B, L, H))
    branches = make_selector(6)(jnp.asarray(scores), hidden, jnp.zeros(B, int), jnp.ones(B))
    assert (np.asarray(branches.logp[0, 1]) == -np.inf).all()
    assert np.isfinite(branches.logp[1, 2]).sum(-1).tolist() == [4] * 6
    assert np.isfinite(branches.logp[0, 2:]).all() and np.isfinite(branches.logp[1, :2]).all()


def test_bfloat16():
    """Codebooks and convolutions in bfloat16; scores add up in float32."""
    config = SelectorConfig(3, 6)
    selector = CandidateSelector(config, H, V, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    hidden = jnp.asarray(normal(5, B, L, H), jnp.bfloat16)
    branches = selector(jnp.asarray(normal(4, B, L, V)), hidden, jnp.zeros(B, int), jnp.ones(B))
    assert branches.logp.dtype == jnp.float32
    np.testing.assert_allclose(np.exp(np.asarray(branches.logp)).sum(-1), 1, atol=1e-5)
    conv = BlockConv(BlockConvConfig(2, 4), H, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    out = conv(hidden, conv.kernels(hidden)[0], jnp.broadcast_to(jnp.arange(L), (B, L)))
    assert out.dtype == jnp.bfloat16
