"""Pairs of random weights at published or small sizes, made where they are used: the host never holds them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.layers import INIT_STD
from ddtree_jax.models.network import Network, NetworkSpec
from ddtree_jax.sizes import DRAFTERS, SIZES, published, published_drafter

# Hybrids that a CPU runs: tiny has every part of a round and no work to speak of; 100M has 96 million parameters.
SMALL: dict[str, dict[str, Any]] = {
    "tiny": SIZES["Qwen3.5-0.8B"]
    | dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=32)
    | dict(num_attention_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    | dict(linear_num_key_heads=2, linear_num_value_heads=4),
    "100M": SIZES["Qwen3.5-0.8B"]
    | dict(vocab_size=32768, hidden_size=640, intermediate_size=1920, num_hidden_layers=12, head_dim=128)
    | dict(linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=8),
}
SMALL_DRAFTERS: dict[str, dict[str, Any]] = {
    name: dict(
        architectures=["DFlashDraftModel"],
        num_hidden_layers=2,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        rope_theta=1e7,
        block_size=16,
        dflash_config=dict(mask_token_id=0, target_layer_ids=list(range(0, config["num_hidden_layers"] - 1, 3))),
    )
    for name, config in SMALL.items()
}


@dataclass(frozen=True)
class Pair:
    """A target and its drafter on the device."""

    target: Network
    drafter: Network

    def flat(self) -> Pair:
        """The pair with final norms that give zeros, so that all logits are equal: the target chooses token 0, which is
        also what the drafter proposes first. So a round accepts the chain of a spine tree to its end.
        """
        return Pair(_flat(self.target), _flat(self.drafter))


def known(size: str) -> str:
    """A size as the tables spell it; InputError for one that they lack."""
    names = {name.lower(): name for name in (*DRAFTERS, *SMALL)}
    if size.lower() not in names:
        raise InputError(f"unknown size {size!r}; use one of {', '.join(names.values())}")
    return names[size.lower()]


def hf_config(size: str) -> dict[str, Any]:
    """What the config.json of a target of this size says."""
    return (SIZES | SMALL)[known(size)]


def configs(size: str) -> tuple[TargetConfig, DrafterConfig]:
    """Both configurations."""
    name = known(size)
    if name in SMALL:
        return TargetConfig.from_hf(SMALL[name]), DrafterConfig.from_hf(SMALL_DRAFTERS[name])
    return published(name), published_drafter(name)


def random_pair(size: str, dtype: str) -> Pair:
    """Random weights for both networks."""
    drafter = NetworkSpec(Drafter, configs(size)[1], jnp.dtype(dtype))
    return Pair(random_network(target_spec(size, dtype), 0), random_network(drafter, 1))


def target_spec(size: str, dtype: str) -> NetworkSpec:
    """What the target is, before its weights are made."""
    return NetworkSpec(Target, configs(size)[0], jnp.dtype(dtype))


def random_network(spec: NetworkSpec, seed: int) -> Network:
    """Matrices from N(0, 0.02), vectors of ones; one small program a shape, none holds more than its own array."""
    shapes = list(spec.parameters().values())
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))  # the fastest to draw from
    return Network(tuple(_leaf(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)), spec)


@partial(jax.jit, static_argnames=["shape", "dtype"])
def _leaf(key, shape, dtype):
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    return jnp.asarray(INIT_STD, dtype) * jax.random.normal(key, shape, dtype)


def _flat(network: Network) -> Network:
    """With the final norm's weight such that its output is zero."""
    place = list(network.spec.parameters()).index("norm.weight")
    zero_centred = isinstance(network.config, TargetConfig) and network.config.zero_centred_norm
    leaves = list(network.leaves)
    leaves[place] = jnp.full_like(leaves[place], -1 if zero_centred else 0)
    return dataclasses.replace(network, leaves=tuple(leaves))
