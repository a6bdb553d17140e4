"""Targets against Hugging Face's own numbers: tiny checkpoints with recorded logits, hidden states, caches and tokens.

Tolerances are those of reference_models.md 3.4. All float32 passes over a sequence share one compiled program per
checkpoint: two right-padded rows of up to 150 tokens behind any number of committed ones.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import arrays_beside, named_parameters, read_arrays

import ddtree_jax
from convert.checkpoint import Checkpoint
from ddtree_jax.decode.round import root_tree, tree_block
from ddtree_jax.loading import Model
from ddtree_jax.models.blocks import Cache, KVCache, commit
from ddtree_jax.models.network import Network
from ddtree_jax.tree import DraftTree

SIZE, CAPACITY = 150, 192  # tokens a pass; 40 committed ones and a padded pass behind them fit
SPLIT, BLOCK = (40, 3), 16  # where each row's continuation starts, and its size in the recorded run
KEPT_FLOAT32 = r"layers\.\d+\.linear_attn\.(A_log|dt_bias|norm\.weight)"


def slow(name: str):
    return pytest.param(name, marks=pytest.mark.slow)


class Case(NamedTuple):
    """A checkpoint, what was recorded for it, and the tolerance of its logits, hidden states and caches."""

    directory: Path
    model: Model
    recorded: dict[str, np.ndarray]
    atol: float


class Pass(NamedTuple):
    """What a pass over two rows gives: logits, [embeddings, layer outputs.., final hidden states], caches."""

    logits: np.ndarray
    hidden: list[np.ndarray]
    caches: tuple[Cache, ...]


@pytest.fixture(
    scope="module",
    params=["qwen3", "qwen3_5", slow("qwen3_tied"), slow("qwen3_5_tied"), slow("qwen3_5_dv24")],
)
def case(request, golden) -> Case:
    directory = golden(request.param)
    model = ddtree_jax.load(directory, dtype="float32")
    atol = 5e-4 if model.target.config.delta else 1e-4
    return Case(directory, model, arrays_beside(directory), atol)


@pytest.fixture(scope="module")
def prefilled(case) -> Pass:
    """One prefill of the long and the short prompt as a right-padded batch. Both were recorded alone."""
    return run(case.model.target, prompts(case), empty(case.model.target), (0, 0))


def prompts(case: Case) -> list[np.ndarray]:
    return [case.recorded["input_ids_long"][0], case.recorded["input_ids_short"][0]]


def close(actual, desired, atol: float, name: str = "") -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float32), desired, rtol=0, atol=atol, err_msg=name)


@jax.jit
def forward(network: Network, ids, caches, length, count):
    target = network.module()
    hidden, taps, made = target.sequence(ids, caches, length, count, tuple(range(target.config.num_layers - 1)))
    layers = jnp.split(taps, target.config.num_layers - 1, axis=-1)
    return target.logits(hidden), [target.embed(ids), *layers, hidden], target.extend(caches, made, length)


def run(network: Network, rows: list[np.ndarray], caches: tuple[Cache, ...], length: tuple[int, int]) -> Pass:
    """Further tokens of two rows, each behind its own number of committed ones."""
    ids = np.zeros((len(rows), SIZE), np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    count = jnp.array([len(row) for row in rows], jnp.int32)
    logits, hidden, caches = forward(network, jnp.asarray(ids), caches, jnp.array(length, jnp.int32), count)
    return Pass(np.asarray(logits), [np.asarray(x, np.float32) for x in hidden], caches)


@jax.jit(static_argnames=("batch", "capacity"))
def empty(network: Network, batch: int = 2, capacity: int = CAPACITY) -> tuple[Cache, ...]:
    return network.module().init_caches(batch, capacity)


def check_caches(case: Case, prefix: str, caches: tuple[Cache, ...], row: int) -> None:
    """Every tensor recorded under the prefix: keys and values [1, nk, T, D]; state [1, Hv, dk, dv]; of the convolution
    four rows as columns [1, C, 4], of which the next token needs the last three.
    """
    names = [name for name in case.recorded if name.startswith(prefix)]
    assert {type(cache) for cache in caches} == {type(caches[int(n[len(prefix) + 2 :][:2])]) for n in names}
    for name in names:
        layer, part = re.fullmatch(rf"{prefix}_L(\d\d)_(.*)", name).groups()
        cache, expected = caches[int(layer)], case.recorded[name][0]
        if part == "recurrent_state":
            close(cache.state[row], expected, 1e-4, name)
        elif part == "conv_state":
            close(cache.window[row], expected[:, 1:].T, case.atol, name)
        else:
            close(getattr(cache, part)[row, :, : expected.shape[1]], expected, case.atol, name)


def test_logits(case, prefilled):
    close(prefilled.logits[0], case.recorded["logits_long"], case.atol)
    close(prefilled.logits[1, :7], case.recorded["logits_short"], case.atol)


def test_hidden_states(case, prefilled):
    names = [name for name in case.recorded if name.startswith("hidden_")]
    assert {"hidden_00", f"hidden_{case.model.target.config.num_layers:02d}"} <= set(names)
    for name in names:
        close(prefilled.hidden[int(name[-2:])][0], case.recorded[name], case.atol, name)


def test_caches_after_prefill(case, prefilled):
    check_caches(case, "prefill150", prefilled.caches, 0)
    check_caches(case, "prefill7", prefilled.caches, 1)


@pytest.fixture(scope="module")
def split(case) -> tuple[Pass, list[np.ndarray]]:
    """40 tokens of the long row and 3 of the short one committed, and what comes next of each."""
    rows = prompts(case)
    starts = [row[:at] for row, at in zip(rows, SPLIT, strict=True)]
    return run(case.model.target, starts, empty(case.model.target), (0, 0)), [rows[0][40:56], rows[1][3:]]


def check_continuation(case: Case, logits, caches: tuple[Cache, ...]) -> None:
    close(logits[0, :BLOCK], case.recorded["logits_block_40_56"], case.atol)
    close(logits[1, :4], case.recorded["logits_short"][3:], case.atol)
    check_caches(case, "after56", caches, 0)
    check_caches(case, "prefill7", caches, 1)


def test_block_as_sequence(case, split):
    before, rest = split
    after = run(case.model.target, rest, before.caches, SPLIT)
    check_continuation(case, after.logits, after.caches)


def chain(tokens) -> DraftTree:
    """A tree that is one path."""
    depth = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return DraftTree(tokens, depth - 1, depth, -depth.astype(jnp.float32), depth >= 0)


@jax.jit
def verify_and_commit(network: Network, tree: DraftTree, caches, length, count):
    """All nodes of chain-shaped trees, and the caches after the first `count` of them."""
    target, nodes = network.module(), tree.token.shape[1]
    hidden, _, rows = target.verify(tree.token, caches, tree_block(tree, length, nodes - 1))
    path = jnp.broadcast_to(jnp.arange(nodes), tree.token.shape)
    caches = tuple(commit(c, r, path, count, length) for c, r in zip(caches, rows, strict=True))
    return target.logits(hidden), caches


def test_block_as_tree(case, split):
    """The same block as a chain-shaped tree; of the short row's 16 nodes the last 12 are rejected."""
    before, rest = split
    tokens = np.zeros((2, BLOCK), np.int32)
    tokens[0], tokens[1, :4] = rest[0], rest[1]
    length, count = jnp.array(SPLIT, jnp.int32), jnp.array([BLOCK, 4], jnp.int32)
    logits, caches = verify_and_commit(case.model.target, chain(jnp.asarray(tokens)), before.caches, length, count)
    check_continuation(case, logits, caches)


@jax.jit
def one_by_one(network: Network, ids, caches):
    """Plain decoding over given tokens: a tree of one node, verified and committed, for each."""
    target = network.module()

    def step(carry, token):
        caches, length = carry
        tree = root_tree(token)
        hidden, _, rows = target.verify(tree.token, caches, tree_block(tree, length, 0))
        path, one = jnp.zeros_like(tree.token), jnp.ones_like(length)
        caches = tuple(commit(c, r, path, one, length) for c, r in zip(caches, rows, strict=True))
        return (caches, length + 1), target.logits(hidden)[0, 0]

    (caches, _), logits = jax.lax.scan(step, (caches, jnp.zeros(1, jnp.int32)), ids[:, None])
    return logits, caches


def test_stepwise(case):
    ids = jnp.asarray(case.recorded["input_ids_long"][0])
    logits, caches = one_by_one(case.model.target, ids, empty(case.model.target, batch=1))
    # the committed cut has the logits of the whole pass only, at most 7e-5 from the recorded steps
    close(logits, case.recorded.get("logits_stepwise_long", case.recorded["logits_long"]), case.atol)
    check_caches(case, "prefill150", caches, 0)


def test_greedy_tokens(case):
    ids = [row.tolist() for row in prompts(case)]
    results = ddtree_jax.generate(case.model, prompt_ids=ids, method="ar", max_new_tokens=32, stop_ids=[])
    for prompt, result, name in zip(ids, results, ("greedy32_long", "greedy32_short"), strict=True):
        assert result.output_ids == prompt + case.recorded[name].tolist(), name
        assert result.finish_reason == "length" and result.acceptance_lengths == [1] * 31


def test_right_padding_equals_recorded_left_padding(case):
    """Recorded with 5 padding tokens on the left of the second row, and positions that start behind them."""
    ids, real = case.recorded["pad_input_ids"], case.recorded["pad_attention_mask"].astype(bool)
    out = run(case.model.target, [ids[b][real[b]] for b in (0, 1)], empty(case.model.target), (0, 0))
    for row in (0, 1):
        expected = case.recorded["pad_logits_mask_pos"][row][real[row]]
        close(out.logits[row, : len(expected)], expected, case.atol)


@pytest.fixture(scope="module")
def bfloat16(case) -> Network:
    return ddtree_jax.load(case.directory, dtype="bfloat16").target


def test_bfloat16_logits(case, bfloat16):
    """Random weights of width 64 are noisy in bfloat16, so only the distribution of the differences is bounded."""
    logits = run(bfloat16, prompts(case), empty(bfloat16), (0, 0)).logits[0]
    expected = case.recorded["logits_long_bf16"]
    difference = np.abs(logits - expected)
    # recorded logits are rounded to bfloat16 and tie, so every one of the largest counts as their choice
    chosen = np.take_along_axis(expected, logits.argmax(-1)[:, None], -1)[:, 0]
    agreement = np.mean(chosen == expected.max(-1))
    hybrid = case.model.target.config.delta is not None
    mean, quantile, most, agree = (0.15, 0.99, 1.5, 0.90) if hybrid else (0.05, 1.0, 0.35, 0.95)
    assert difference.mean() <= mean and np.quantile(difference, quantile) <= most and agreement >= agree


def test_parameters_that_stay_float32(case, bfloat16):
    """Decay, step bias and the gated norm, with the values of the file: their bfloat16 roundings would be a change."""
    checkpoint, half = Checkpoint(case.directory), named_parameters(bfloat16)
    kept = {name for name, value in half.items() if value.dtype == jnp.float32}
    assert kept == {name for name in half if re.fullmatch(KEPT_FLOAT32, name)}
    assert len(kept) == 3 * case.model.target.config.layer_types.count("linear_attention")
    assert {half[name].dtype for name in half.keys() - kept} == {jnp.dtype("bfloat16")}
    for name in kept:
        np.testing.assert_array_equal(half[name], checkpoint.read(f"model.{name}"), err_msg=name)


def test_caches_of_a_bfloat16_model(bfloat16):
    for cache in empty(bfloat16):
        exact = dataclasses.asdict(cache).pop("state", None)
        assert exact is None or exact.dtype == jnp.float32
        half = [cache.k, cache.v] if isinstance(cache, KVCache) else [cache.window]
        assert {x.dtype for x in half} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "dflash_qwen3", "dflash_qwen3_5_swa", "dflash2_qwen3"])
def test_committed_cut_is_the_recorded_truth(shared, root, name):
    whole, cut = shared / "golden" / "hf" / name, root / "tests" / "data" / "golden" / name
    for file in ("config.json", "model.safetensors"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes(), file
    recorded, kept = arrays_beside(whole), read_arrays(cut.with_name(f"{name}.npz"))
    for key, value in kept.items():
        np.testing.assert_array_equal(value, recorded[key], err_msg=key)
