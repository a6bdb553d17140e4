"""How the target chooses a token: greedy, or sampled with noise that depends only on the seed and the absolute
position.

The noise is what makes speculation exact at any temperature: plain, chain and tree decoding look at the same noise for
the same position, so they choose the same tokens (algorithm.md section 14).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Settings of every row. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 filter nothing.

    `greedy` and `filtered` are static: whether all rows are greedy, and whether any row filters, so that what nobody
    asked for is not compiled.
    """

    key: Key[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    greedy: bool = field(metadata=dict(static=True))
    filtered: bool = field(metadata=dict(static=True))


def gumbel(key: Key[Array, " B"], position: Int[Array, " B"], vocab: int) -> Float[Array, "B V"]:
    """The noise of absolute position `position[b]` under each row's key."""
    return jax.vmap(lambda k, p: jax.random.gumbel(jax.random.fold_in(k, p), (vocab,)))(key, position)


def pick(logits: Float[Array, "B V"], sampling: Sampling, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """The target's token for `position`, given its logits there: argmax of the filtered logits / T plus the position's
    noise.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling.greedy:
        return greedy
    scaled = _scale(logits, sampling.temperature)
    if sampling.filtered:
        scaled = jnp.where(allowed(scaled, sampling), scaled, -jnp.inf)
    noisy = jnp.argmax(scaled + gumbel(sampling.key, position, logits.shape[-1]), axis=-1).astype(jnp.int32)
    return jnp.where(sampling.temperature > 0, noisy, greedy)


def couple(logits: Float[Array, "B L V"], sampling: Sampling, start: Int[Array, " B"]) -> Float[Array, "B L V"]:
    """Draft logits with the noise that the target will see, for positions start+1, start+2, ... (rows at temperature 0:
    unchanged).

    A tree built from these favours the tokens the noise favours; the target's choices do not change, so the text does
    not either.
    """
    if sampling.greedy:
        return logits
    steps = jnp.arange(1, logits.shape[1] + 1)
    noise = jax.vmap(lambda p: gumbel(sampling.key, p, logits.shape[-1]), in_axes=1, out_axes=1)(start[:, None] + steps)
    coupled = _scale(logits, sampling.temperature[:, None]) + noise
    return jnp.where(sampling.temperature[:, None, None] > 0, coupled, logits)


def allowed(scaled: Float[Array, "B V"], sampling: Sampling) -> Bool[Array, "B V"]:
    """Which tokens pass top-k, then top-p, then min-p, all on the logits after temperature (the order of Hugging Face).

    Ties at a border all stay, so the result does not depend on an order among equals; at least the best token stays.
    """
    order = sortable(scaled)
    vocab = scaled.shape[-1]
    ones = jnp.ones_like(scaled)
    wanted = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab).astype(jnp.float32)
    keep = order >= smallest_kept(order, ones, wanted)[:, None]
    p = jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)
    nucleus = order >= smallest_kept(order, p, sampling.top_p)[:, None]
    keep = keep & (nucleus | (sampling.top_p >= 1.0)[:, None])
    p = jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)
    return keep & (p >= sampling.min_p[:, None] * jnp.max(p, axis=-1, keepdims=True))


def sortable(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """uint32 keys in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def smallest_kept(
    order: UInt[Array, "B V"], weight: Float[Array, "B V"], target: Float[Array, " B"]
) -> UInt[Array, " B"]:
    """The largest key t for which the weights of all entries with key >= t sum to `target` or more (0 when no key
    does).

    Found bit by bit in 32 passes: no sort of the vocabulary.
    """

    def try_bit(i, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= candidate[:, None], weight, 0.0), axis=-1)
        return jnp.where(total >= target, candidate, threshold)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(order.shape[0], jnp.uint32))


def _scale(logits, temperature):
    """(logits - max) / T, which no T overflows; T is taken as 1 where it is 0 (those rows do not use the result)."""
    logits = logits.astype(jnp.float32)
    distance = logits - jnp.max(logits, axis=-1, keepdims=True)
    return distance / jnp.where(temperature > 0, temperature, 1.0)[..., None]
