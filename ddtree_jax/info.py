"""`ddtree-jax info`: parameters, memory, and what fits on a card, from a configuration alone; nothing is allocated."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp

from convert.checkpoint import Directory
from convert.converted import RECORD, open_directory, with_fp8
from ddtree_jax.config import LINEAR, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Target
from ddtree_jax.models.network import NetworkSpec
from ddtree_jax.models.quantised import Quantised
from ddtree_jax.sizes import published

CARDS_GB = (24, 80, 141)
USABLE = 0.9  # of a card's memory: the rest is for programs, temporary buffers and fragmentation
GB = 10**9


@dataclass(frozen=True)
class Memory:
    """Bytes of a target in one dtype, and its number of parameters."""

    parameters: int
    weights: int
    kv_per_token: int
    state_per_sequence: int

    def tokens_on(self, card_gb: float, sequences: int = 1) -> int:
        """Longest context of each of `sequences` sequences beside the weights on one card; 0 when nothing fits."""
        room = card_gb * GB * USABLE - self.weights - sequences * self.state_per_sequence
        return max(int(room // (self.kv_per_token * sequences)), 0) if self.kv_per_token else 0


def memory(config: TargetConfig, dtype: str = "bfloat16", fp8: Quantised | None = None) -> Memory:
    """Sizes by abstract evaluation of the network, with the weights in `fp8` as FP8, and its caches."""
    spec = NetworkSpec(Target, config, jnp.dtype(dtype))
    numbers, leaves = (jax.tree.leaves(s.abstract()[1]) for s in (spec, replace(spec, fp8=fp8)))
    attention, width = config.attention, jnp.dtype(dtype).itemsize
    full = sum(kind != LINEAR for kind in config.layer_types)
    state = 0
    if config.delta:
        d = config.delta
        layer = 4 * d.num_value_heads * d.key_dim * d.value_dim + width * (d.conv_taps - 1) * d.channels
        state = layer * (config.num_layers - full)
    return Memory(
        parameters=sum(leaf.size for leaf in numbers),
        weights=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        kv_per_token=full * 2 * attention.num_kv_heads * attention.head_dim * width,
        state_per_sequence=state,
    )


def describe(name: str, dtype: str, as_json: bool, keep_fp8: bool = False) -> str:
    """The report on a checkpoint directory or a published name; InputError for one that cannot be read, and when
    nothing would stay FP8 that should.
    """
    config = _config(name)
    fp8 = _fp8(name, config, keep_fp8)
    sizes = memory(config, dtype, fp8)
    fits = {f"{card} GB": min(sizes.tokens_on(card), config.max_positions) for card in CARDS_GB}
    if as_json:
        kept = len(fp8.names) if fp8 else 0
        return json.dumps({"name": name, "dtype": dtype, "fp8": kept, **asdict(sizes), "context_that_fits": fits})
    lines = [
        f"{name}: {config.model_type}, {config.num_layers} layers "
        f"({sum(k == LINEAR for k in config.layer_types)} Gated DeltaNet), hidden {config.hidden_size}, {dtype}",
        f"parameters           {sizes.parameters / 1e9:12.3f} billion",
        f"weights              {sizes.weights / GB:12.2f} GB" + (f", {len(fp8.names)} of them FP8" if fp8 else ""),
        f"KV cache             {sizes.kv_per_token / 1024:12.1f} KiB a token",
        f"recurrent state      {sizes.state_per_sequence / 2**20:12.1f} MiB a sequence",
    ]
    lines += [f"on a card of {card:7} {tokens:9,} tokens of context" for card, tokens in fits.items()]
    return "\n".join(lines)


def _config(name: str) -> TargetConfig:
    return TargetConfig.from_hf(Directory(name).config) if os.path.isdir(name) else published(name)


def _fp8(name: str, config: TargetConfig, keep: bool) -> Quantised | None:
    """What is FP8 in a converted directory, or would stay so. A directory may hold no more than a config.json."""
    found = None
    if os.path.isdir(name) and (keep or os.path.exists(os.path.join(name, RECORD))):
        found = with_fp8(open_directory(name), NetworkSpec(Target, config, jnp.dtype("bfloat16")), keep).fp8
    if keep and not found:
        raise InputError(f"{name} has no FP8 weights that could be kept; leave out --keep-fp8")
    return found
