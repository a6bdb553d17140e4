"""Our side of a comparison: the same numbers that `reference.py` records, from our modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ddtree_jax.models.blocks import sequence_block
from ddtree_jax.models.layers import rope_angles
from ddtree_jax.models.network import Network

Named = dict[str, np.ndarray]


def whole(network: Network, ids: np.ndarray) -> Named:
    """One pass of the model: logits [T, V] and hidden_00 .. hidden_NN [T, H], as `reference.py` names them."""
    with jax.default_matmul_precision("highest"):
        return _rows(_whole(network, jnp.asarray(ids, jnp.int32)[None]))


def alone(network: Network, inputs: Mapping[int, np.ndarray]) -> Named:
    """Layers on their own: each is given a hidden state [T, H], by layer number, that was recorded.

    hidden_II is what layer II-1 makes of it (the last layer's after the final norm), mixer_II and mlp_II what its
    modules do. An error in one layer so shows in that layer alone.
    """
    given = {i: jnp.asarray(x)[None] for i, x in inputs.items()}
    with jax.default_matmul_precision("highest"):
        return _rows(_alone(network, given))


def draft(target: Network, drafter: Network, taps: np.ndarray, noise: np.ndarray) -> Named:
    """One draft: taps [T, n*H] are the target's of T committed tokens, noise [B, H] the block's embeddings.

    ctx_feature [T, H]; ctx_k_LI and ctx_v_LI [T, nk, D], the context rows of layer I; layer_out_II and draft_hidden
    (after the final norm) [B, H]; logits [B-1, V] of all slots but the root's.
    """
    with jax.default_matmul_precision("highest"):
        return _rows(_draft(target, drafter, jnp.asarray(taps)[None], jnp.asarray(noise)[None]))


def _rows(batch: Mapping[str, jax.Array]) -> Named:
    """The one row of every array, float32."""
    return {name: np.asarray(x[0], np.float32) for name, x in batch.items()}


@jax.jit
def _whole(network: Network, ids: Int[Array, "B T"]) -> dict[str, jax.Array]:
    target = network.module()
    inner = target.config.num_layers - 1
    hidden, taps = target(ids, tuple(range(inner)))
    states = [target.embed(ids), *(jnp.split(taps, inner, axis=-1) if inner else []), hidden]
    return {f"hidden_{i:02d}": x for i, x in enumerate(states)} | {"logits": target.logits(hidden)}


@jax.jit
def _alone(network: Network, inputs: Mapping[int, Float[Array, "B T H"]]) -> dict[str, jax.Array]:
    target = network.module()
    batch, size, _ = next(iter(inputs.values())).shape
    block = sequence_block(jnp.zeros(batch, jnp.int32), jnp.full(batch, size, jnp.int32), size)
    angles = rope_angles(block.position, target.config.attention.rope, target.dtype)
    caches = target.init_caches(batch, 0)
    made: dict[str, jax.Array] = {}
    for i, x in inputs.items():
        watch(target.layers[i], i, made)
        out, _ = target.layers[i](x.astype(target.dtype), caches[i], block, angles)
        made[f"hidden_{i + 1:02d}"] = target.norm(out) if i + 1 == target.config.num_layers else out
    return made


@jax.jit
def _draft(
    target: Network, drafter: Network, taps: Float[Array, "B T features"], noise: Float[Array, "B N H"]
) -> dict[str, jax.Array]:
    module, head = drafter.module(), target.module()
    taps, noise = taps.astype(module.dtype), noise.astype(module.dtype)
    size = jnp.full(taps.shape[0], taps.shape[1], jnp.int32)
    position = jnp.broadcast_to(jnp.arange(taps.shape[1]), taps.shape[:2])
    rows = module.context(taps, position)
    caches = module.extend(module.init_caches(taps.shape[0], taps.shape[1]), rows, jnp.zeros_like(size))
    made = {"ctx_feature": module.hidden_norm(module.fc(taps))}
    for i, row in enumerate(rows):
        made |= {f"ctx_k_L{i}": row.k, f"ctx_v_L{i}": row.v}
    # what goes into the norm of a layer is what came out of the one before
    for i, layer in enumerate(list(module.layers)[1:]):
        layer.input_layernorm = _noting_input(f"layer_out_{i:02d}", layer.input_layernorm, made)
    module.norm = _noting_input(f"layer_out_{len(module.layers) - 1:02d}", module.norm, made)
    hidden = module.draft(noise, caches, size)
    return made | {"draft_hidden": hidden, "logits": module.logits(hidden[:, 1:], head)}


def _noting_input(name: str, call: Callable[..., Any], made: dict[str, jax.Array]) -> Callable[..., Any]:
    def noted(x: jax.Array) -> Any:
        made[name] = x
        return call(x)

    return noted


def watch(layer: Any, index: int, made: dict[str, jax.Array]) -> None:
    """Have the layer's next pass put what its mixer and feed-forward give out into `made`. The layer is a view inside a
    trace (`Network.module`), so nothing outlives it.
    """

    def keep(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            out = call(*args)
            made[f"{name}_{index:02d}"] = out[0] if isinstance(out, tuple) else out
            return out

        return watched

    if layer.linear:
        layer.linear_attn = SimpleNamespace(sequence=keep("mixer", layer.linear_attn.sequence))
    else:
        layer.self_attn = keep("mixer", layer.self_attn)
    layer.mlp = keep("mlp", layer.mlp)
