"""Programs that tests/test_parallel.py runs in processes with eight forced devices: `python mesh_programs.py NAME`."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from hf_directory import write_pair
from tiny import DENSE, DRAFTER, HYBRID, tiny_drafter, tiny_target

from convert.conversion import convert, make_job
from ddtree_jax import generate, load, parallel
from ddtree_jax.config import FULL, LINEAR, AttentionConfig, DeltaConfig, MoeConfig, RopeConfig, TargetConfig
from ddtree_jax.decode import loop
from ddtree_jax.generation import Options, make_request
from ddtree_jax.loading import Model

VOCAB = 16
HEADS = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=16, rope=RopeConfig(1e4, 8), gated=True)
SHORT = dataclasses.replace(HYBRID, vocab_size=VOCAB, layer_types=(LINEAR, FULL))
CONFIGS = {
    # everything divides by eight
    "wide": dataclasses.replace(
        SHORT,
        attention=HEADS,
        delta=DeltaConfig(num_key_heads=8, num_value_heads=16, key_dim=8, value_dim=12, conv_taps=4),
    ),
    # two key heads on eight devices: attention and delta layers stay whole, the rest is split
    "narrow": SHORT,
    "experts": dataclasses.replace(
        DENSE,
        vocab_size=VOCAB,
        layer_types=(FULL, FULL),
        moe=MoeConfig(num_experts=16, top_k=3, expert_size=24, shared_size=32, normalise=True),
        moe_layers=(True, True),
    ),
}
PROMPTS = [[1, 2, 3], [5, 4, 3, 2, 1, 0, 7]]
SETTINGS = (
    dict(tree_budget=12),
    dict(tree_budget=12, temperature=1.5, couple=True, top_k=9, seed=[5, 6]),
)


def pair(config: TargetConfig) -> Model:
    drafter = tiny_drafter(1, dataclasses.replace(DRAFTER, vocab_size=VOCAB, target_layer_ids=(0,)))
    return Model(tiny_target(0, config), drafter, None, ())


def texts(model: Model) -> list[list[list[int]]]:
    return [
        [r.output_ids for r in generate(model, prompt_ids=PROMPTS, max_new_tokens=16, **settings)]
        for settings in SETTINGS
    ]


def placed(model: Model, devices: int) -> Model:
    mesh = parallel.make_mesh(devices)
    assert model.drafter is not None
    return dataclasses.replace(model, target=model.target.place(mesh), drafter=model.drafter.place(mesh))


def tokens() -> dict[str, bool]:
    """Whether a pair on eight devices gives the tokens of the pair on one, by configuration."""
    same = {}
    for name, config in CONFIGS.items():
        model = pair(config)
        whole = texts(model)
        same[name] = texts(placed(model, 8)) == whole
    return same


def loaded() -> dict[str, bool]:
    """Whether directories load onto two devices as they load onto one: the same texts, and nothing whole but norms."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        write_pair(home)
        convert(make_job(home / "target", home / "converted", "float32"))
        plain = texts(load(home / "target", home / "drafter", dtype="float32"))
        same = {}
        for kind in ("target", "converted"):
            model = load(home / kind, home / "drafter", dtype="float32", tensor_parallel=2)
            same[kind] = texts(model) == plain
            wide = [x for x in model.target.leaves if x.size > 3000]
            same[kind + " split"] = not any(x.sharding.is_fully_replicated for x in wide)
        return same


def layout() -> dict[str, object]:
    """Of the wide pair on eight devices after two dispatches: which leaves are split, and what a device holds."""
    model = placed(pair(CONFIGS["wide"]), 8)
    request = make_request(model, PROMPTS, Options(tree_budget=12, max_new_tokens=40))
    state, _ = loop.prefill(model.target, model.drafter, request)
    for _ in range(2):
        state, report = loop.decode_rounds(model.target, model.drafter, state, np.int32(3), config=request.config)

    def share(x: jax.Array) -> float:
        return x.addressable_shards[0].data.size / x.size

    names = model.target.spec.parameters()
    return {
        "weights": {name: share(x) for name, x in zip(names, model.target.leaves, strict=True)},
        "caches": [share(x) for cache in (*state.caches, *state.draft_caches) for x in jax.tree.leaves(cache)],
        "report": [x.sharding.is_fully_replicated for x in jax.tree.leaves(report)],
        "compilations": loop.decode_rounds._cache_size(),
    }


def process() -> dict[str, object]:
    """One of several processes that decode together: PORT COUNT NUMBER."""
    port, count, number = map(int, sys.argv[2:5])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    model = placed(pair(CONFIGS["wide"]), len(jax.devices()))
    return {"devices": len(jax.devices()), "local": len(jax.local_devices()), "texts": texts(model)}


def alone() -> dict[str, object]:
    """What the processes of `process` should say."""
    return {"texts": texts(pair(CONFIGS["wide"]))}


if __name__ == "__main__":
    print(json.dumps({f.__name__: f for f in (tokens, loaded, layout, process, alone)}[sys.argv[1]]()))
