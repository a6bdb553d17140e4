"""Losses of the target and of the DFlash drafter, over whole sequences (no decode caches)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.blocks import KVCache


def cross_entropy(logits: Float[Array, "*batch V"], labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Nats of every label."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def target_loss(target: Target, ids: Int[Array, "B length"]) -> Float[Array, ""]:
    """Mean nats per predicted token of windows of T + 1 tokens: the first T go in, the last T are the labels."""
    hidden, _ = target(ids[:, :-1])
    return jnp.mean(cross_entropy(target.logits(hidden), ids[:, 1:]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftBatch:
    """Sequences with the places to draft from.

    ids: right-padded tokens, `length[b]` of them real. features: the target's taps at every position. anchors: absolute
    position of slot 0 of each of A blocks a sequence; a block sees the context strictly before its anchor, and the
    anchor's token.
    """

    ids: Int[Array, "B T"]
    features: Float[Array, "B T features"]
    length: Int[Array, " B"]
    anchors: Int[Array, "B A"]


def draft_labels(batch: DraftBatch, block_size: int) -> tuple[Int[Array, "B A L"], Bool[Array, "B A L"]]:
    """The tokens after each anchor, and which of them lie inside the sequence (others are 0)."""
    place = batch.anchors[..., None] + jnp.arange(1, block_size)
    there = place < batch.length[:, None, None]
    rows = jnp.take_along_axis(batch.ids, jnp.where(there, place, 0).reshape(place.shape[0], -1), axis=1)
    return jnp.where(there, rows.reshape(place.shape), 0), there


def draft_logits(drafter: Drafter, target: Target, batch: DraftBatch) -> Float[Array, "B A L V"]:
    """float32 logits of slots 1.. of all blocks of all sequences, in one pass of the drafter.

    The blocks of a sequence are rows of one long query: `length` limits each to the context before its anchor, and the
    mask keeps them apart, so the numbers are those of drafting each block alone. Embedding and head are the target's.
    """
    size, (B, A) = drafter.config.block_size, batch.anchors.shape
    first = jnp.take_along_axis(batch.ids, batch.anchors, axis=1)[..., None]
    masks = jnp.full((B, A, size - 1), drafter.config.mask_token_id, jnp.int32)
    noise = jax.lax.stop_gradient(drafter.embed(jnp.concatenate([first, masks], axis=-1).reshape(B, A * size), target))
    position = (batch.anchors[..., None] + jnp.arange(size)).reshape(B, A * size)
    block = jnp.arange(A * size) // size
    mask = jnp.broadcast_to(block[:, None] == block, (B, A * size, A * size))
    length = jnp.repeat(batch.anchors, size, axis=1)
    hidden = drafter.attend(noise, draft_context(drafter, batch.features), position, length, mask)
    return drafter.logits(hidden.reshape(B, A, size, -1)[:, :, 1:], target)


def draft_context(drafter: Drafter, features: Float[Array, "B T features"]) -> tuple[KVCache, ...]:
    """The drafter's context of whole sequences, in the layout of its caches."""
    features = jax.lax.stop_gradient(features)
    position = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
    rows = drafter.context(features, position)
    return tuple(KVCache(jnp.swapaxes(r.k, 1, 2), jnp.swapaxes(r.v, 1, 2)) for r in rows)


def drafter_loss(
    drafter: Drafter, target: Target, batch: DraftBatch, gamma: float = 4.0
) -> tuple[Float[Array, ""], Float[Array, " L"]]:
    """Weighted cross-entropy of the slots against the text, slot k with weight exp(-(k-1)/gamma); slot 0 has no label.

    Also returns, per slot, the share of labels that the arg-max hits. Labels beyond the end of a sequence count in
    neither.
    """
    labels, there = draft_labels(batch, drafter.config.block_size)
    logits = draft_logits(drafter, target, batch)
    weight = there * jnp.exp(-jnp.arange(labels.shape[-1]) / gamma)
    loss = jnp.sum(weight * cross_entropy(logits, labels)) / jnp.maximum(jnp.sum(weight), 1e-6)
    hits = jnp.sum(there & (jnp.argmax(logits, axis=-1) == labels), axis=(0, 1))
    return loss, hits / jnp.maximum(jnp.sum(there, axis=(0, 1)), 1)


def leading_matches(drafted: Int[Array, "*batch L"], labels: Int[Array, "*batch L"]) -> Int[Array, "*batch"]:
    """How many drafted tokens are right before the first wrong one; one more is the acceptance length of a round."""
    return jnp.sum(jnp.cumprod((drafted == labels).astype(jnp.int32), axis=-1), axis=-1)
