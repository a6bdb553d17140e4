"""The same weights give the same bits in any layout that a checkpoint may have: shards, prefixes, wrappers, experts one
by one or fused, any mixture of dtypes, tied heads written out, Hugging Face or converted directories.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoint import DENSE, HYBRID, MOE, NEXT, Tensors, random_tensors
from safetensors.numpy import save_file

from convert.checkpoint import INDEX
from convert.conversion import convert, make_job
from ddtree_jax import load
from ddtree_jax.models.network import Network

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "dense tied": DENSE | {"tie_word_embeddings": True},
    "llama": DENSE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "moe": MOE,
    "hybrid": HYBRID,
    "hybrid tied": HYBRID | {"tie_word_embeddings": True},
    "hybrid moe": HYBRID | EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "next": NEXT | {"norm_topk_prob": True},
}
STORED = (np.float32, np.float16, ml_dtypes.bfloat16)
PARTS = ("gate", "up", "down")
LEFT_OUT = {"mtp.fc.weight": (4, 8), "model.visual.merger.norm.weight": (3,)}


@dataclass(frozen=True)
class Layout:
    """How a checkpoint lies on disk; `order` decides which shard a tensor is in, its dtype, and its place."""

    shards: int  # 0: one file without an index
    prefix: str
    wrapped: bool  # settings under text_config
    fused: bool  # the experts of a layer in two tensors
    head: bool  # a tied head written out
    left_out: bool  # tensors that text decoding does not need
    mixed: bool  # a dtype for every tensor, instead of float32
    converted: bool
    order: int


LAYOUTS = st.builds(
    Layout,
    shards=st.integers(0, 4),
    prefix=st.sampled_from(["model.", "model.language_model.", "language_model.model.", ""]),
    wrapped=st.booleans(),
    fused=st.booleans(),
    head=st.booleans(),
    left_out=st.booleans(),
    mixed=st.booleans(),
    converted=st.booleans(),
    order=st.integers(0, 2**32 - 1),
)


@cache
def weights(family: str) -> Tensors:
    """Float32 tensors, named without prefix, one an expert; every number is one that bfloat16 and float16 have too."""
    coarse = {name: np.round(x * 64) / 64 for name, x in random_tensors(FAMILIES[family]).items()}
    return {name.removeprefix("model."): x.astype(np.float32) for name, x in coarse.items()}


def laid_out(family: str, layout: Layout) -> Tensors:
    """The family's weights by their names on disk, in the layout's order."""
    tensors = dict(weights(family))
    if layout.head and FAMILIES[family]["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    if layout.fused:
        tensors = dict(fused(tensors))
    named = {name if name == "lm_head.weight" else layout.prefix + name: x for name, x in tensors.items()}
    if layout.left_out:
        named |= {name: np.ones(shape, np.float32) for name, shape in LEFT_OUT.items()}
    rng = np.random.default_rng(layout.order)
    kinds = rng.choice(len(STORED) if layout.mixed else 1, len(named))
    stored = [(name, x.astype(STORED[kind])) for (name, x), kind in zip(named.items(), kinds, strict=True)]
    return dict(stored[i] for i in rng.permutation(len(stored)))


def fused(tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """All experts of a layer stacked: gate above up, and down."""
    for name, x in tensors.items():
        before, separator, rest = name.partition(".experts.0.")
        experts = f"{before}.experts"
        count = sum(name.startswith(f"{experts}.") and name.endswith(".down_proj.weight") for name in tensors)
        part = {kind: [tensors.get(f"{experts}.{e}.{kind}_proj.weight") for e in range(count)] for kind in PARTS}
        if separator and rest == "down_proj.weight":
            yield f"{experts}.down_proj", np.stack(part["down"])
            yield f"{experts}.gate_up_proj", np.concatenate([np.stack(part["gate"]), np.stack(part["up"])], axis=1)
        elif ".experts." not in name:
            yield name, x


def write(directory: Path, family: str, layout: Layout) -> None:
    """The checkpoint as a Hugging Face directory."""
    config = FAMILIES[family]
    if layout.wrapped:
        config = {"architectures": ["SomeForConditionalGeneration"], "model_type": "wrapper", "text_config": config}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = laid_out(family, layout)
    if layout.shards == 0:
        save_file(tensors, directory / "model.safetensors")
        return
    rng = np.random.default_rng(layout.order)
    homes = {name: f"part-{rng.integers(layout.shards)}.safetensors" for name in tensors}
    for home in set(homes.values()):
        save_file({name: x for name, x in tensors.items() if homes[name] == home}, directory / home)
    listed = {name: homes[name] for name in rng.permutation(sorted(homes))}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def loaded(family: str, layout: Layout, dtype: str = "float32") -> Network:
    """What `load` makes of the layout."""
    with tempfile.TemporaryDirectory() as place:
        source, destination = Path(place) / "source", Path(place) / "converted"
        source.mkdir()
        write(source, family, layout)
        if not layout.converted:
            return load(source, dtype=dtype).target
        convert(make_job(source, destination, dtype))
        return load(destination, dtype=dtype).target


PLAIN = Layout(0, "model.", False, False, False, False, False, False, 0)


@cache
def expected(family: str) -> tuple[Network, np.ndarray]:
    """The plainest layout's network and logits."""
    network = loaded(family, PLAIN)
    return network, np.asarray(logits(network))


@jax.jit
def logits(network: Network) -> jax.Array:
    module = network.module()
    return module.logits(module(jnp.arange(10)[None])[0])


def check(family: str, layout: Layout) -> None:
    """The layout gives the plainest one's parameters and logits, bit by bit."""
    network, wanted = expected(family)
    found = loaded(family, layout)
    assert len(found.leaves) == len(network.leaves)
    for a, b in zip(found.leaves, network.leaves, strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert found.spec == network.spec
    assert np.asarray(logits(found)).tobytes() == wanted.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_the_same_weights_gives_the_same_logits(family: str):
    @settings(max_examples=12)
    @given(layout=LAYOUTS)
    def run(layout: Layout) -> None:
        check(family, layout)

    run()
    assert np.std(expected(family)[1]) > 0.05  # numbers that a mistake would move


def packed(tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Delta projections as Qwen3-Next has them: q, k, v and z of one key head, then of the next; b and a likewise."""
    groups = {"in_proj_qkv": ("qkvz", ("qkv", "z")), "in_proj_b": ("ba", ("b", "a"))}
    for name, x in tensors.items():
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        if part in groups:
            kind, sources = groups[part]
            rows = np.concatenate([tensors[f"{prefix}.in_proj_{source}.weight"] for source in sources])
            yield f"{prefix}.in_proj_{kind}.weight", by_key_head(rows, kind)
        elif part not in ("in_proj_z", "in_proj_a"):
            yield name, x


def by_key_head(rows: np.ndarray, kind: str) -> np.ndarray:
    """Rows sorted by kind -> rows sorted by key head, of the two that these models have."""
    heads, wide = 2, kind == "qkvz"
    sizes = (2 * 8, 2 * 8, 4 * 12, 4 * 12) if wide else (4, 4)
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    return np.concatenate([half for head in range(heads) for half in (np.split(p, heads)[head] for p in parts)])


def test_packed_and_separate_delta_projections_give_the_same_logits(tmp_path: Path):  # cases.md A20
    """Qwen3-Next and Qwen3.5-MoE are one network with two layouts."""
    config = FAMILIES["next"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = dict(packed(weights("hybrid moe")))
    assert tensors["layers.0.linear_attn.in_proj_qkvz.weight"].shape == (128, 40)
    save_file(tensors, tmp_path / "model.safetensors")
    found = load(tmp_path, dtype="float32").target
    network, wanted = expected("hybrid moe")
    for a, b in zip(found.leaves, network.leaves, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.asarray(logits(found)).tobytes() == wanted.tobytes()
