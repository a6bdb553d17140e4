"""The drafter's training form must be its inference form, and must not see what it is to predict."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.config import BlockConvConfig, DrafterConfig, TargetConfig
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.network import Network, NetworkSpec
from ddtree_jax.train.losses import (
    DraftBatch,
    draft_labels,
    draft_logits,
    drafter_loss,
    leading_matches,
    target_loss,
)

VOCAB, HIDDEN, BLOCK, MASK, TAPS = 32, 16, 4, 31, (0, 1)
SHARED_KEYS = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    rope_parameters=dict(rope_theta=10000.0),
)
TARGET = TargetConfig.from_hf(SHARED_KEYS | dict(model_type="qwen3", num_hidden_layers=3, tie_word_embeddings=True))
DRAFTER = DrafterConfig.from_hf(
    SHARED_KEYS
    | dict(
        architectures=["DFlashDraftModel"],
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        dflash_config=dict(block_size=BLOCK, mask_token_id=MASK, target_layer_ids=list(TAPS)),
    )
)


Logits = Callable[[DraftBatch], np.ndarray]


def network(module: type, config: TargetConfig | DrafterConfig, seed: int) -> Network:
    """Random weights, large enough that logits differ clearly; norm weights around one."""
    spec = NetworkSpec(module, config, jnp.dtype("float32"))
    rng = np.random.default_rng(seed)
    shapes = [leaf.shape for leaf in jax.tree.leaves(spec.abstract()[1])]
    leaves = [(0.2 * rng.normal(size=shape) + (len(shape) == 1)).astype(np.float32) for shape in shapes]
    return Network(tuple(map(jnp.asarray, leaves)), spec)


@pytest.fixture(scope="module")
def pair() -> tuple[Network, Network]:
    return network(Target, TARGET, 0), network(Drafter, DRAFTER, 1)


@pytest.fixture(scope="module")
def logits_of(pair) -> Logits:
    return jax.jit(lambda batch: draft_logits(pair[1].module(), pair[0].module(), batch))


@pytest.fixture(scope="module")
def batch() -> DraftBatch:
    """Two sequences of 12 and 9 tokens; the last anchors are so late that labels are missing."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, MASK, (2, 12)).astype(np.int32)
    features = rng.normal(size=(2, 12, len(TAPS) * HIDDEN)).astype(np.float32)
    anchors = np.array([[3, 8, 10], [1, 5, 7]], np.int32)
    return DraftBatch(*map(jnp.asarray, (ids, features, np.array([12, 9], np.int32), anchors)))


def test_no_convolution_reaches_into_the_block_before(pair, batch):
    """DFlash2: the blocks of a sequence stand in one row, and each equals the block drafted alone."""
    drafter = network(Drafter, dataclasses.replace(DRAFTER, conv=BlockConvConfig(taps=2, group_size=4)), 2)
    together = jax.jit(lambda batch: draft_logits(drafter.module(), pair[0].module(), batch))(batch)
    for row, column in ((0, 1), (1, 2)):
        anchor = int(batch.anchors[row, column])
        block = np.array([[batch.ids[row, anchor]] + [MASK] * (BLOCK - 1)], np.int32)
        alone = draft_alone(pair[0], drafter, jnp.asarray(block), batch.features[row : row + 1, :anchor])
        np.testing.assert_allclose(together[row, column], alone, atol=2e-5)


@pytest.mark.parametrize(("row", "column"), [(0, 1), (1, 2)])
def test_every_block_equals_a_block_drafted_alone(pair, logits_of, batch, row, column):
    anchor = int(batch.anchors[row, column])
    block = np.array([[batch.ids[row, anchor]] + [MASK] * (BLOCK - 1)], np.int32)
    alone = draft_alone(*pair, jnp.asarray(block), batch.features[row : row + 1, :anchor])
    np.testing.assert_allclose(logits_of(batch)[row, column], alone, atol=2e-5)


@jax.jit
def draft_alone(target: Network, drafter: Network, block, features):
    """What a decoding round does: a context cache of exactly the tokens before the anchor, then one block."""
    target, drafter, length = target.module(), drafter.module(), features.shape[1]
    rows = drafter.context(features, jnp.arange(length)[None])
    caches = drafter.extend(drafter.init_caches(1, length), rows, jnp.zeros(1, jnp.int32))
    return target.logits(drafter.draft(target.embed(block), caches, jnp.array([length], jnp.int32)))[0, 1:]


def test_nothing_at_or_after_the_anchor_leaks_into_its_block(logits_of, batch):
    anchor = 8
    ids, features = np.array(batch.ids), np.array(batch.features)
    ids[0, anchor + 1 :] = (ids[0, anchor + 1 :] + 1) % MASK
    features[0, anchor:] += 3.0
    changed = dataclasses.replace(batch, ids=jnp.asarray(ids), features=jnp.asarray(features))
    before, after = (np.asarray(logits_of(b))[0] for b in (batch, changed))
    np.testing.assert_array_equal(before[:2], after[:2])  # anchors 3 and 8
    assert np.abs(before[2] - after[2]).max() > 1e-3  # anchor 10 does see position 8
    ids[0, anchor] = (ids[0, anchor] + 1) % MASK
    other = np.asarray(logits_of(dataclasses.replace(batch, ids=jnp.asarray(ids))))[0]
    assert np.abs(before[1] - other[1]).max() > 1e-3


def test_labels_are_the_tokens_after_the_anchor_inside_the_text():
    ids = jnp.array([[10, 11, 12, 13, 14, 15]])
    batch = DraftBatch(ids, jnp.zeros((1, 6, 2)), jnp.array([5]), jnp.array([[0, 2, 4]]))
    labels, there = draft_labels(batch, BLOCK)
    assert labels.tolist() == [[[11, 12, 13], [13, 14, 0], [0, 0, 0]]]
    assert there.tolist() == [[[True, True, True], [True, True, False], [False, False, False]]]


def test_loss_is_the_weighted_mean_over_existing_labels(pair, logits_of, batch):
    labels, there = map(np.asarray, draft_labels(batch, BLOCK))
    logs = jax.nn.log_softmax(np.asarray(logits_of(batch)))
    nats = -np.take_along_axis(np.asarray(logs), labels[..., None], -1)[..., 0]
    weight = there * np.array([1.0, 0.6065307, 0.3678794])  # exp(-(k-1)/2)
    target, drafter = pair
    loss, hits = jax.jit(lambda b: drafter_loss(drafter.module(), target.module(), b, gamma=2.0))(batch)
    np.testing.assert_allclose(loss, np.sum(weight * nats) / np.sum(weight), rtol=1e-5)
    assert hits.shape == (BLOCK - 1,)


def test_the_drafter_gets_a_gradient_and_the_features_do_not(pair, batch):
    target, drafter = pair

    @jax.jit
    @jax.grad
    def gradient(varied):
        leaves, features = varied
        moved = dataclasses.replace(batch, features=features)
        return drafter_loss(drafter.spec.bind(leaves), target.module(), moved)[0]

    own, features = gradient((drafter.leaves, batch.features))
    assert np.abs(features).max() == 0
    assert all(np.abs(leaf).max() > 0 for leaf in own)


def test_target_loss_is_the_mean_nats_of_the_next_tokens(pair):
    ids = jnp.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])

    @jax.jit
    def both(ids):
        target = pair[0].module()
        return target_loss(target, ids), jax.nn.log_softmax(target.logits(target(ids[:, :-1])[0]))

    loss, logs = both(ids)
    expected = -np.mean([[logs[b, t, ids[b, t + 1]] for t in range(4)] for b in range(2)])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_leading_matches_stop_at_the_first_wrong_token():
    drafted = jnp.array([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    labels = jnp.array([[1, 2, 3]] * 3)
    assert leading_matches(drafted, labels).tolist() == [3, 1, 0]
