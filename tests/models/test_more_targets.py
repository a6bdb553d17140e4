"""Llama, mixtures of experts and Qwen3-Next against Hugging Face's recorded numbers, and a drafter with YaRN.

Tolerances are those of reference_models.md 3.4. test_target_parity does more (blocks, trees, padding, bfloat16) for
the architectures that share this code.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import arrays_beside

import ddtree_jax
from ddtree_jax.loading import Model
from ddtree_jax.models.blocks import Cache, KVCache
from ddtree_jax.models.layers import rope_angles, rope_frequencies
from ddtree_jax.models.network import Network

SIZE = 150
HORIZON = 7


def slow(name: str):
    return pytest.param(name, marks=pytest.mark.slow)


class Case(NamedTuple):
    """A target, what was recorded for it, and the tolerance of its logits, hidden states and caches."""

    model: Model
    recorded: dict[str, np.ndarray]
    atol: float


class Pass(NamedTuple):
    """A prefill: logits, [embeddings, layer outputs.., final hidden states], caches."""

    logits: jax.Array
    hidden: list[jax.Array]
    caches: tuple[Cache, ...]


@pytest.fixture(scope="module", params=["llama", slow("qwen3_moe"), slow("qwen3_next"), slow("qwen3_5_moe")])
def case(request, golden) -> Case:
    directory = golden(request.param)
    model = ddtree_jax.load(directory, dtype="float32")
    return Case(model, arrays_beside(directory), 5e-4 if model.target.config.delta else 1e-4)


@pytest.fixture(scope="module")
def prefilled(case) -> Pass:
    """The long prompt."""
    return forward(case.model.target, jnp.asarray(case.recorded["input_ids_long"], jnp.int32))


@jax.jit
def forward(network: Network, ids) -> Pass:
    target = network.module()
    inner = target.config.num_layers - 1
    zero, count = jnp.zeros(1, jnp.int32), jnp.full(1, SIZE)
    caches = target.init_caches(1, SIZE)
    hidden, taps, made = target.sequence(ids, caches, zero, count, tuple(range(inner)))
    states = [target.embed(ids), *jnp.split(taps, inner, axis=-1), hidden]
    return Pass(target.logits(hidden), states, target.extend(caches, made, zero))


def close(actual, desired, atol: float, name: str = "") -> None:
    np.testing.assert_allclose(np.asarray(actual), desired, rtol=0, atol=atol, err_msg=name)


def test_logits(case, prefilled):
    close(prefilled.logits[0], case.recorded["logits_long"], case.atol)


def test_hidden_states(case, prefilled):
    names = [name for name in case.recorded if name.startswith("hidden_")]
    assert len(names) == case.model.target.config.num_layers + 1 == 5
    for name in names:
        close(prefilled.hidden[int(name[-2:])][0], case.recorded[name], case.atol, name)


def test_caches(case, prefilled):
    """Keys and values [1, nk, T, D]; delta states; the last three of the convolution's four columns [1, C, 4]."""
    names = [name for name in case.recorded if name.startswith("prefill150_")]
    assert len(names) == 2 * case.model.target.config.num_layers
    for name in names:
        layer, part = re.fullmatch(r"prefill150_L(\d\d)_(.*)", name).groups()
        cache, expected = prefilled.caches[int(layer)], case.recorded[name][0]
        if part == "recurrent_state":
            close(cache.state[0], expected, 1e-4, name)
        elif part == "conv_state":
            close(cache.window[0], expected[:, 1:].T, case.atol, name)
        else:
            close(getattr(cache, part)[0], expected, case.atol, name)


def test_greedy_tokens(case):
    """32 tokens after the long and after the short prompt, in one batch: prefill, then a tree of one node a round."""
    prompts = [case.recorded[f"input_ids_{name}"][0].tolist() for name in ("long", "short")]
    results = ddtree_jax.generate(case.model, prompt_ids=prompts, method="ar", max_new_tokens=32, stop_ids=[])
    for prompt, result, name in zip(prompts, results, ("long", "short"), strict=True):
        assert result.output_ids == prompt + case.recorded[f"greedy32_{name}"].tolist(), name


@pytest.fixture(scope="module")
def yarn(golden) -> Case:
    """A drafter whose rope is stretched 64 times."""
    directory = golden("dflash_yarn")
    return Case(ddtree_jax.load(golden("qwen3"), directory, dtype="float32"), arrays_beside(directory), 1e-4)


def test_yarn_frequencies(yarn):
    rope = yarn.model.drafter.config.attention.rope
    frequencies, amplitude = rope_frequencies(rope)
    np.testing.assert_allclose(frequencies, yarn.recorded["rope_inv_freq"], rtol=1e-6)
    assert amplitude == pytest.approx(0.1 * np.log(64) + 1)
    cos, sin = rope_angles(jnp.arange(64)[None], rope, jnp.float32)[:, 0]
    half = rope.rotary_dim // 2
    close(cos, yarn.recorded["rope_cos64"][:, :half], 1e-5)
    close(sin, yarn.recorded["rope_sin64"][:, :half], 1e-5)


@jax.jit
def draft(target: Network, drafter: Network, taps, noise):
    target, drafter = target.module(), drafter.module()
    context = drafter.context(taps, jnp.arange(taps.shape[1])[None])
    caches = tuple(KVCache(rows.k.swapaxes(1, 2), rows.v.swapaxes(1, 2)) for rows in context)
    hidden = drafter.draft(noise, caches, jnp.array([taps.shape[1]]))
    return context, hidden, target.logits(hidden[:, 1:])


def test_yarn_draft(yarn):
    taps, noise = (jnp.asarray(yarn.recorded[name])[None] for name in ("target_taps", "noise_embedding"))
    context, hidden, logits = draft(yarn.model.target, yarn.model.drafter, taps, noise)
    for i, rows in enumerate(context):
        close(rows.k[0], yarn.recorded[f"ctx_k_L{i}"], yarn.atol)
        close(rows.v[0], yarn.recorded[f"ctx_v_L{i}"], yarn.atol)
    close(hidden[0], yarn.recorded["draft_hidden"], yarn.atol)
    close(logits[0], yarn.recorded["draft_logits_slots1"], yarn.atol)
    assert logits[0].argmax(-1).tolist() == yarn.recorded["draft_tokens"].tolist() and len(logits[0]) == HORIZON


@pytest.mark.slow
def test_yarn_pair(yarn):
    """Untrained, so nothing is accepted; the text is the target's all the same."""
    prompt = yarn.recorded["prompt_ids"].tolist()
    (result,) = ddtree_jax.generate(yarn.model, prompt_ids=[prompt], method="dflash", max_new_tokens=48, stop_ids=[])
    assert result.output_ids == prompt + yarn.recorded["spec_ids"].tolist()
    assert result.acceptance_lengths[:-1] == (yarn.recorded["trace"][:, 2] + 1).tolist()[: result.rounds - 1]
