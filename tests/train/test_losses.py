"""The drafter's training form must be its inference form, and must not see what it is to predict."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.models import Drafter, Target
from ddtree_jax.train.losses import (
    DraftBatch,
    cross_entropy,
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


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Drafter]:
    """A target and a drafter with weights large enough that logits differ clearly."""
    dtype = jnp.dtype("float32")
    models = Target(TARGET, rngs=nnx.Rngs(0), dtype=dtype), Drafter(DRAFTER, rngs=nnx.Rngs(1), dtype=dtype)
    for model in models:
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, state))
    return models


@pytest.fixture(scope="module")
def batch(pair) -> DraftBatch:
    """Two sequences of 12 and 9 tokens; the last anchors are so late that labels are missing."""
    ids = np.random.default_rng(0).integers(0, MASK, (2, 12)).astype(np.int32)
    ids[1, 9:] = 0
    _, features = pair[0](jnp.asarray(ids), TAPS)
    return DraftBatch(
        jnp.asarray(ids), features, jnp.array([12, 9], jnp.int32), jnp.array([[3, 8, 10], [1, 5, 7]], jnp.int32)
    )


def test_every_block_equals_a_block_drafted_alone(pair, batch):
    target, drafter = pair
    logits = draft_logits(drafter, target, batch)
    assert logits.shape == (2, 3, BLOCK - 1, VOCAB) and logits.dtype == jnp.float32
    for row in range(2):
        for column in range(3):
            anchor = int(batch.anchors[row, column])
            alone = draft_alone(target, drafter, batch.ids[row, anchor], batch.features[row : row + 1, :anchor])
            np.testing.assert_allclose(logits[row, column], alone, atol=2e-5)


def draft_alone(target: Target, drafter: Drafter, anchor_token, features):
    """What a decoding round does: a context cache of exactly the tokens before the anchor, then one block."""
    length = features.shape[1]
    rows = drafter.context(features, jnp.arange(length)[None])
    caches = drafter.extend(drafter.init_caches(1, length), rows, jnp.zeros(1, jnp.int32))
    block = jnp.concatenate([anchor_token[None], jnp.full(BLOCK - 1, MASK, jnp.int32)])[None]
    hidden = drafter.draft(target.embed(block), caches, jnp.array([length], jnp.int32))
    return target.logits(hidden)[0, 1:]


def test_nothing_at_or_after_the_anchor_leaks_into_its_block(pair, batch):
    target, drafter = pair
    anchor = 8
    changed_ids = batch.ids.at[0, anchor + 1 :].add(1)
    changed_features = batch.features.at[0, anchor:].add(3.0)
    changed = dataclasses.replace(batch, ids=changed_ids, features=changed_features)
    before, after = (draft_logits(drafter, target, b)[0] for b in (batch, changed))
    np.testing.assert_array_equal(before[:2], after[:2])  # anchors 3 and 8
    assert np.abs(before[2] - after[2]).max() > 1e-3  # anchor 10 does see position 8
    other_token = dataclasses.replace(batch, ids=batch.ids.at[0, anchor].add(1))
    assert np.abs(before[1] - draft_logits(drafter, target, other_token)[0, 1]).max() > 1e-3


def test_labels_are_the_tokens_after_the_anchor_inside_the_text():
    ids = jnp.array([[10, 11, 12, 13, 14, 15]])
    batch = DraftBatch(ids, jnp.zeros((1, 6, 2)), jnp.array([5]), jnp.array([[0, 2, 4]]))
    labels, there = draft_labels(batch, BLOCK)
    assert labels.tolist() == [[[11, 12, 13], [13, 14, 0], [0, 0, 0]]]
    assert there.tolist() == [[[True, True, True], [True, True, False], [False, False, False]]]


def test_loss_is_the_weighted_mean_over_existing_labels(pair, batch):
    target, drafter = pair
    labels, there = draft_labels(batch, BLOCK)
    nats = cross_entropy(draft_logits(drafter, target, batch), labels)
    weight = np.asarray(there) * np.array([1.0, 0.6065307, 0.3678794])  # exp(-(k-1)/2)
    loss, hits = drafter_loss(drafter, target, batch, gamma=2.0)
    np.testing.assert_allclose(loss, np.sum(weight * np.asarray(nats)) / np.sum(weight), rtol=1e-5)
    assert hits.shape == (BLOCK - 1,)


def test_only_the_drafter_gets_a_gradient(pair, batch):
    """Embedding and head are frozen, and so are the features."""
    target, drafter = pair
    gradient = jax.grad(lambda f: drafter_loss(drafter, target, dataclasses.replace(batch, features=f))[0])
    assert np.abs(gradient(batch.features)).max() == 0
    graph, state = nnx.split(drafter)
    own = jax.grad(lambda s: drafter_loss(nnx.merge(graph, s), target, batch)[0])(state)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(own))


def test_target_loss_is_the_mean_nats_of_the_next_tokens(pair):
    target = pair[0]
    ids = jnp.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
    hidden, _ = target(ids[:, :-1])
    logs = np.asarray(jax.nn.log_softmax(target.logits(hidden)))
    expected = -np.mean([[logs[b, t, ids[b, t + 1]] for t in range(4)] for b in range(2)])
    np.testing.assert_allclose(target_loss(target, ids), expected, rtol=1e-5)


def test_leading_matches_stop_at_the_first_wrong_token():
    drafted = jnp.array([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    assert leading_matches(drafted, jnp.array([1, 2, 3])).tolist() == [3, 1, 0]
