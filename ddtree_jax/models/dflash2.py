"""What DFlash2 adds to a drafter: convolutions over the block, and scores for pairs of neighbouring tokens
(reference_models.md 5.6).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ddtree_jax.config import BlockConvConfig, SelectorConfig
from ddtree_jax.models.layers import Linear, normal
from ddtree_jax.ops.top_k import top_k
from ddtree_jax.tree import Branches

Kernels = Float[Array, "2 B N K H"]


class BlockConv(nnx.Module):
    """Convolutions before and after a sublayer, over the last K slots of a block, with kernels made from its input."""

    def __init__(self, config: BlockConvConfig, hidden: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = config
        # at first the identity: the slot itself, none of those before it
        base = jnp.zeros((2, config.taps, hidden), dtype).at[:, 0].set(1)
        self.base_kernel = nnx.Param(base)
        rows = 2 * config.taps * (hidden // config.group_size)
        self.kernel_projection = Linear(hidden, rows, rngs=rngs, dtype=dtype)

    def kernels(self, u: Float[Array, "B N H"]) -> Kernels:
        """Both kernels of every slot: a base, and a part predicted from u for each group of channels."""
        taps, group = self.config.taps, self.config.group_size
        predicted = self.kernel_projection(u).reshape(*u.shape[:2], 2, taps, -1)
        return self.base_kernel[...][:, None, None] + jnp.repeat(jnp.moveaxis(predicted, 2, 0), group, axis=-1)

    def __call__(
        self, x: Float[Array, "B N H"], kernel: Float[Array, "B N K H"], slot: Int[Array, "B N"]
    ) -> Float[Array, "B N H"]:
        """sum over j < K of kernel[t, j] * x[t - j]; what lies before slot 0 of a block counts as zero."""
        taps = self.config.taps
        padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
        size = x.shape[1]
        shifted = [padded[:, taps - 1 - j : taps - 1 - j + size] for j in range(taps)]
        there = [jnp.where((slot >= j)[..., None], s, 0) for j, s in enumerate(shifted)]
        return sum((kernel[:, :, j] * s for j, s in enumerate(there)), jnp.zeros_like(x))


class CandidateSelector(nnx.Module):
    """Scores a slot's candidates by the token chosen for the slot before, by a low-rank product of two codebooks."""

    def __init__(self, config: SelectorConfig, hidden: int, vocab: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = config
        self.hidden_projection = Linear(hidden, config.rank, rngs=rngs, dtype=dtype)
        self.predecessor_codebook = normal(rngs, (vocab, config.rank), dtype)
        self.successor_codebook = normal(rngs, (vocab, config.rank), dtype)

    def __call__(
        self,
        scores: Float[Array, "B L V"],
        hidden: Float[Array, "B L H"],
        root: Int[Array, " B"],
        pair_scale: Float[Array, " B"],
    ) -> Branches:
        """What may follow what: the best tokens of every slot, after each of the best tokens of the slot before.

        score(c | prev) = scores[c] + pair_scale * <predecessor[prev] * project(h), successor[c]>, and a softmax over
        the candidates.

        scores: logits, or logits over the temperature with noise; pair_scale is then 1 / T. hidden: the drafter's
          final hidden states of the same slots.
        """
        count = min(self.config.top_k, scores.shape[-1])
        value, token = (x.reshape(*scores.shape[:2], count) for x in top_k(scores.reshape(-1, scores.shape[-1]), count))
        # whatever group a node of depth 1 asks for, the root stands before it
        first = jnp.broadcast_to(root[:, None, None], (len(root), 1, count))
        before = jnp.concatenate([first, token[:, :-1]], axis=1)
        query = self.predecessor_codebook[...][before] * self.hidden_projection(hidden)[:, :, None]
        successor = self.successor_codebook[...][token]
        pair = jnp.einsum("blgr,blkr->blgk", query, successor, preferred_element_type=jnp.float32)
        given = value[:, :, None].astype(jnp.float32) + pair_scale[:, None, None, None] * pair
        logp = jax.nn.log_softmax(given)
        logp, candidate = jax.lax.top_k(jnp.where(jnp.isnan(logp), -jnp.inf, logp), count)
        follower = jnp.broadcast_to(token[:, :, None], logp.shape)
        return Branches(logp, jnp.take_along_axis(follower, candidate, axis=-1), candidate.astype(jnp.int32))
