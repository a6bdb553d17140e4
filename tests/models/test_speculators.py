"""Drafters in the speculators format: their taps, windows, own embedding and head, and reduced vocabulary
(reference_models.md 5.6).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from decode import runs
from hf_directory import drafter_json, speculators_json, stored_tensors, write_json, write_target
from models.test_drafter_parity import CONTEXT, Reference, draft
from recorded import arrays_beside
from safetensors.numpy import save_file
from tiny import DRAFTER, tiny_drafter

import ddtree_jax
from convert.checkpoint import Checkpoint
from convert.conversion import convert, make_job
from convert.weights import skipped
from ddtree_jax.config import BlockRule, DrafterConfig, WindowRule
from ddtree_jax.errors import InputError
from ddtree_jax.loading import Model
from ddtree_jax.models.blocks import KVCache
from ddtree_jax.models.network import Network

COVERED = np.array([0, 1, 2, 4, 7, 11, 12])  # of 13 tokens
WHOLE = dataclasses.replace(DRAFTER, window_rule=WindowRule.ANCHOR, own_embedding=True, own_head=True)
REDUCED = dataclasses.replace(WHOLE, draft_vocab_size=len(COVERED))


def with_covered(network: Network) -> Network:
    """The network with its own map of tokens."""
    return runs.with_leaves(network, "draft_ids", lambda _: jnp.asarray(COVERED, jnp.int32))


def tensors_of(network: Network) -> dict[str, np.ndarray]:
    """As in the file: offsets instead of ids, and a mask that says the same."""
    tensors = stored_tensors(network)
    if (ids := tensors.pop("draft_ids", None)) is not None:
        tensors["d2t"] = np.asarray(ids, np.int64) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(network.config.vocab_size), ids)
    return tensors


def write(directory: Path, network: Network, config: dict | None = None, **tensors: np.ndarray | None) -> Path:
    """The network in the speculators format; tensors may be changed, or left out with None."""
    directory.mkdir(exist_ok=True)
    write_json(directory / "config.json", config or speculators_json(network.config))
    kept = {name: x for name, x in (tensors_of(network) | tensors).items() if x is not None}
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def target() -> Network:
    return runs.target()


@pytest.fixture
def target_directory(tmp_path, target) -> Path:
    write_target(tmp_path / "target", target)
    return tmp_path / "target"


@pytest.mark.parametrize("config", [WHOLE, REDUCED], ids=["whole", "reduced"])
def test_it_loads_from_both_kinds_of_directory(tmp_path, target_directory, config):
    network = tiny_drafter(config=config)
    network = with_covered(network) if config.draft_vocab_size else network
    source = write(tmp_path / "drafter", network)
    convert(make_job(source, tmp_path / "converted", "float32"), verify=True)
    for directory in (source, tmp_path / "converted"):
        read = ddtree_jax.load(target_directory, directory, dtype="float32").drafter
        assert read.config == config
        for ours, written in zip(read.leaves, network.leaves, strict=True):
            np.testing.assert_array_equal(ours, written)


def test_an_embedding_or_head_that_is_not_there_is_the_targets(tmp_path, target_directory):
    shared = dataclasses.replace(WHOLE, own_embedding=False, own_head=False)
    directory = write(tmp_path / "drafter", tiny_drafter(config=shared))
    assert ddtree_jax.load(target_directory, directory, dtype="float32").drafter.config == shared


def first_draft(target: Network, drafter: Network, block: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Noise embeddings and logits of a block that has no context."""
    target, drafter = target.module(), drafter.module()
    noise = drafter.embed(jnp.array([block]), target)
    hidden = drafter.draft(noise, drafter.init_caches(1, 0), jnp.array([0]))
    return np.asarray(noise[0]), np.asarray(drafter.logits(hidden, target)[0])


def test_its_own_embedding_and_head_are_used(target):
    own = tiny_drafter(config=WHOLE)
    block = [3] + [12] * 5
    noise, logits = first_draft(target, own, block)
    np.testing.assert_array_equal(noise, own.module().embed_tokens.weight[...][jnp.array(block)])
    flipped = runs.with_leaves(own, "lm_head", jnp.negative)
    np.testing.assert_allclose(first_draft(target, flipped, block)[1], -logits, atol=1e-5)
    other = first_draft(runs.target(1), own, block)
    np.testing.assert_array_equal(other[1], logits)


def test_a_reduced_vocabulary_drafts_only_its_tokens(target):
    drafter = with_covered(tiny_drafter(config=REDUCED))
    _, logits = first_draft(target, drafter, [3] + [12] * 5)
    assert logits.shape == (6, 13)
    assert (np.isfinite(logits) == np.isin(np.arange(13), COVERED)).all()
    module = drafter.module()
    noise = module.embed_tokens(jnp.array([[3] + [12] * 5]))
    hidden = module.draft(noise, module.init_caches(1, 0), jnp.array([0]))
    expected = np.asarray(hidden[0]) @ np.asarray(module.lm_head.weight[...]).T
    np.testing.assert_allclose(logits[:, COVERED], expected, atol=1e-5)


def test_the_text_is_plain_decodings(target):
    """With a reduced vocabulary, greedy and sampled, coupled or not; nodes are tokens that it covers."""
    model = Model(target, with_covered(tiny_drafter(config=REDUCED)), None, ())
    prompts = runs.prompts(3, (5, 17))
    for options in (dict(temperature=0.0), dict(temperature=2.0, seed=[3, 4]), dict(temperature=2.0, couple=True)):
        given = dict(prompt_ids=prompts, max_new_tokens=24, **options)
        plain = ddtree_jax.generate(model, method="ar", **{k: v for k, v in given.items() if k != "couple"})
        tree = ddtree_jax.generate(model, tree_budget=12, **given)
        assert [r.output_ids for r in tree] == [r.output_ids for r in plain]
    assert max(max(r.acceptance_lengths) for r in tree) > 2


class AnchorReference(Reference):
    """The window of speculators: context rows from the block's first position minus W on, the whole block."""

    def mask(self, i, query, key):
        block = key[None, :] >= CONTEXT
        seen = (query[:, None] >= key[None, :]) | ~block if self.causal[i] else np.ones((len(query), len(key)), bool)
        return seen if self.windows[i] is None else seen & (block | (key[None, :] >= CONTEXT - self.windows[i]))


@pytest.mark.parametrize("window", [16, 5])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_windows_begin_at_the_anchor(golden, window, causal):
    directory = golden("dflash_qwen3_5_swa")
    recorded = arrays_beside(directory)
    drafter = ddtree_jax.load(golden("qwen3_5"), directory, dtype="float32").drafter
    rules = ((BlockRule.CAUSAL if causal else BlockRule.BIDIRECTIONAL),) * 2 + (BlockRule.BIDIRECTIONAL,)
    masks = dict(rules=rules, windows=(window, window, None), window_rule=WindowRule.ANCHOR)
    config = dataclasses.replace(drafter.config, **masks)
    changed = dataclasses.replace(drafter, spec=dataclasses.replace(drafter.spec, config=config))
    context = [(recorded[f"ctx_k_L{i}"], recorded[f"ctx_v_L{i}"]) for i in range(3)]
    caches = tuple(KVCache(*(jnp.asarray(x).swapaxes(0, 1)[None] for x in rows)) for rows in context)
    noise = recorded["noise_embedding"]
    expected = AnchorReference(drafter, (causal, causal, False), (window, window, None))(noise, context)
    ours = np.asarray(draft(changed, jnp.asarray(noise)[None], caches)[0])
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert np.abs(expected - recorded["draft_hidden"]).max() > 1e-3  # not the rule that was recorded


# ---- what is refused -----------------------------------------------------------------------------------------------


def reduced() -> Network:
    return with_covered(tiny_drafter(config=REDUCED))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": np.full(7, 9, np.int64)}, "draft vocabulary: d2t does not map one to one into the 13 tokens"),
        ({"d2t": -np.arange(7), "t2d": None}, "one to one"),
        ({"d2t": np.full(7, -1, np.int64), "t2d": None}, "one to one"),
        ({"d2t": np.arange(6)}, "shape: d2t is \\[6\\], should be \\[7\\]"),
        ({"d2t": np.zeros(7, np.float32)}, "not whole numbers: d2t is float32"),
        ({"d2t": None}, "missing: d2t"),
        ({"t2d": np.arange(13) < 7}, "draft vocabulary: t2d marks other tokens than d2t maps to"),
        ({"t2d": np.ones(12, bool)}, "draft vocabulary: t2d is bool \\[12\\], should be bool \\[13\\]"),
        ({"t2d": np.isin(np.arange(13), COVERED).astype(np.int64)}, "t2d is int64 \\[13\\], should be bool"),
        ({"d2t": None}, "t2d marks only some tokens, and there is no d2t"),
        ({"d2t": np.zeros(0, np.int64)}, "shape: d2t is \\[0\\], should be \\[7\\]$"),
        ({"d2t": np.zeros((7, 1), np.int64)}, "shape: d2t is \\[7, 1\\], should be \\[7\\]$"),
        ({"d2t": np.array(3)}, "shape: d2t is \\[\\], should be \\[7\\]$"),
        ({"t2d.more": np.ones(13, bool)}, "unknown: t2d.more"),
        ({"lm_head.weight": None}, "a draft vocabulary of 7 tokens needs a head of its own"),
        ({"lm_head.weight": np.zeros((13, 48), np.float32)}, "lm_head.weight is \\[13, 48\\], should be \\[7, 48\\]"),
        ({"more.weight": np.zeros(3, np.float32)}, "unknown: more.weight"),
    ],
)
def test_files_that_are_refused(tmp_path, target_directory, tensors, message):
    directory = write(tmp_path / "drafter", reduced(), **tensors)
    with pytest.raises(InputError, match=message):
        ddtree_jax.load(target_directory, directory, dtype="float32")


def test_a_map_without_t2d_is_enough(tmp_path, target_directory):
    directory = write(tmp_path / "drafter", reduced(), t2d=None)
    assert ddtree_jax.load(target_directory, directory).drafter.config == REDUCED


def test_the_whole_vocabulary_may_have_a_t2d_that_marks_it(tmp_path, target_directory):
    whole = tiny_drafter(config=WHOLE)
    directory = write(tmp_path / "drafter", whole, t2d=np.ones(13, bool))
    assert ddtree_jax.load(target_directory, directory).drafter.config == WHOLE
    assert skipped(Checkpoint(directory), WHOLE) == {"t2d": 1}
    write(directory, whole, t2d=np.arange(13) < 12)
    with pytest.raises(InputError, match="t2d marks only some tokens, and there is no d2t"):
        ddtree_jax.load(target_directory, directory)


def test_without_a_head_t2d_is_an_unknown_tensor(tmp_path, target_directory):
    shared = dataclasses.replace(WHOLE, own_embedding=False, own_head=False)
    directory = write(tmp_path / "drafter", tiny_drafter(config=shared), t2d=np.ones(13, bool))
    with pytest.raises(InputError, match="unknown: t2d$"):
        ddtree_jax.load(target_directory, directory)


TENSORS = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_hidden_state_layer_ids": None}, "target_layer_ids should be list, found None"),
        ({"mask_token_id": ...}, "mask_token_id is missing"),
        ({"draft_vocab_size": 14}, "draft_vocab_size = 14 is above vocab_size = 13"),
        ({"sample_from_anchor": True}, "sample_from_anchor = True is not implemented"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type = 'eagle3' is not implemented"),
        ({"sliding_window_non_causal": "no"}, "sliding_window_non_causal should be bool, found 'no'"),
        ({"transformer_layer_config": 3}, "transformer_layer_config should be an object"),
    ],
)
def test_configs_that_are_refused(changes, message):
    config = {key: value for key, value in (speculators_json(WHOLE) | changes).items() if value is not ...}
    with pytest.raises(InputError, match=message):
        DrafterConfig.from_hf(config, TENSORS)


def test_config():
    """Taps count from the embedding, a block has 8 slots by default, and the architecture may have either name."""
    config = speculators_json(WHOLE)
    assert config["aux_hidden_state_layer_ids"] == [1, 2] and WHOLE.target_layer_ids == (0, 1)
    assert DrafterConfig.from_hf(config, TENSORS) == WHOLE
    assert DrafterConfig.from_hf(config | {"architectures": ["DFlashDraftModel"]}, TENSORS) == WHOLE
    short = {key: value for key, value in config.items() if key != "block_size"}
    assert DrafterConfig.from_hf(short, TENSORS).block_size == 8
    lifted = DrafterConfig.from_hf(config | {"sliding_window_non_causal": True}, TENSORS)
    assert lifted.rules == (BlockRule.BIDIRECTIONAL,) * 2


def test_a_tap_of_the_embedding_is_refused(tmp_path, target_directory):
    """hidden_states[0] is no layer's output."""
    config = speculators_json(WHOLE) | {"aux_hidden_state_layer_ids": [0, 2]}
    directory = write(tmp_path / "drafter", tiny_drafter(config=WHOLE), config)
    with pytest.raises(InputError, match="tap layers \\[-1\\] are outside"):
        ddtree_jax.load(target_directory, directory)


def test_other_formats_do_not_bring_a_head(tmp_path, target_directory):
    """In a DFlash checkpoint a head would be ignored by everyone else; here it is an unknown tensor."""
    directory = write(tmp_path / "drafter", tiny_drafter(config=WHOLE), drafter_json(DRAFTER))
    with pytest.raises(InputError, match="unknown: embed_tokens.weight, lm_head.weight"):
        ddtree_jax.load(target_directory, directory)
