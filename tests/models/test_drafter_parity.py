"""DFlash drafters against recorded PyTorch numbers: one draft step tensor by tensor, then whole runs with their target.

Also what goes wrong elsewhere (shared cases.md A18, C9 to C11): sliding windows, the size of the block, the root's
slot, and the context after a chunked prefill.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import arrays_beside, named_parameters

import ddtree_jax
from convert.replay import replay
from ddtree_jax.config import BlockRule
from ddtree_jax.decode import loop
from ddtree_jax.decode.round import propose
from ddtree_jax.decode.state import DecodeState, RoundConfig
from ddtree_jax.generation import Options, make_request
from ddtree_jax.loading import Model
from ddtree_jax.models.blocks import KVCache
from ddtree_jax.models.drafter import DrafterLayer
from ddtree_jax.models.network import Network

TARGETS = {"dflash_qwen3": "qwen3", "dflash_qwen3_5_swa": "qwen3_5", "dflash2_qwen3": "qwen3"}
CONTEXT, NEW = 40, 48  # tokens of the recorded prompt, and of the output
SIZE = CONTEXT + NEW
HORIZON = 7


class Case(NamedTuple):
    """A pair, what was recorded for it, and the tolerance of numbers that went through the target."""

    model: Model
    recorded: dict[str, np.ndarray]
    atol: float


class Step(NamedTuple):
    """A draft step, tensor by tensor."""

    taps: jax.Array
    feature: jax.Array
    context: tuple
    noise: jax.Array
    layers: list[jax.Array]
    hidden: jax.Array
    logits: jax.Array


@pytest.fixture(scope="module", params=sorted(TARGETS))
def case(request, golden) -> Case:
    model = ddtree_jax.load(golden(TARGETS[request.param]), golden(request.param), dtype="float32")
    return Case(model, arrays_beside(golden(request.param)), 5e-4 if model.target.config.delta else 1e-4)


def close(actual, desired, atol: float, name: str = "") -> None:
    np.testing.assert_allclose(np.asarray(actual), desired, rtol=0, atol=atol, err_msg=name)


def as_caches(context) -> tuple[KVCache, ...]:
    """Context rows [B, T, nk, D] as caches that hold nothing else."""
    return tuple(KVCache(rows.k.swapaxes(1, 2), rows.v.swapaxes(1, 2)) for rows in context)


@jax.jit
def whole_step(target: Network, drafter: Network, ids, block) -> Step:
    """A draft after the first 40 of `ids`. Taps and context rows are of all ids."""
    target, drafter = target.module(), drafter.module()
    _, taps = target(ids, drafter.config.target_layer_ids)
    context = drafter.context(taps, jnp.arange(ids.shape[1])[None])
    noise, layers = target.embed(block), []
    layer = DrafterLayer.__call__

    def noted(*args):
        layers.append(layer(*args))
        return layers[-1]

    with mock.patch.object(DrafterLayer, "__call__", noted):
        hidden = drafter.draft(noise, as_caches(context), jnp.array([CONTEXT]))
    feature = drafter.hidden_norm(drafter.fc(taps))
    return Step(taps, feature, context, noise, layers, hidden, target.logits(hidden[:, 1:]))


@pytest.fixture(scope="module")
def step(case) -> Step:
    """The recorded step, over the whole text: what follows the 40 tokens must not matter."""
    ids = jnp.concatenate([case.recorded["prompt_ids"], case.recorded["greedy_ids"]])[None]
    return whole_step(case.model.target, case.model.drafter, ids, jnp.asarray(case.recorded["block_ids"])[None])


def test_context(case, step):
    close(step.taps[0, :CONTEXT], case.recorded["target_taps"], case.atol)
    close(step.feature[0, :CONTEXT], case.recorded["ctx_feature"], case.atol)
    for i, rows in enumerate(step.context):
        close(rows.k[0, :CONTEXT], case.recorded[f"ctx_k_L{i}"], case.atol)
        close(rows.v[0, :CONTEXT], case.recorded[f"ctx_v_L{i}"], case.atol)


def test_draft(case, step):
    close(step.noise[0], case.recorded["noise_embedding"], 0)
    assert len(step.layers) == case.model.drafter.config.num_layers
    for i, out in enumerate(step.layers):
        close(out[0], case.recorded[f"layer_out_{i:02d}"], case.atol, f"layer {i}")
    close(step.hidden[0], case.recorded["draft_hidden"], case.atol)
    close(step.logits[0], case.recorded["draft_logits_slots1"], case.atol)


def test_draft_tokens(case, prefilled):
    """The chain that is drafted: each slot's best token, or with a selector the best after the one before."""
    tree, logits = proposal(case.model.target, case.model.drafter, prefilled, RoundConfig(HORIZON, "chain", HORIZON))
    np.testing.assert_array_equal(tree.token[0, 1:], case.recorded["draft_tokens"])
    selects = case.model.drafter.config.selector is not None
    assert selects == (logits[0].argmax(-1).tolist() != case.recorded["draft_tokens"].tolist())


def check_caches(caches: tuple[KVCache, ...], step: Step, length: int, atol: float) -> None:
    for cache, rows in zip(caches, step.context, strict=True):
        close(cache.k[0, :, :length], rows.k[0, :length].swapaxes(0, 1), atol)
        close(cache.v[0, :, :length], rows.v[0, :length].swapaxes(0, 1), atol)


def test_trace(case, step):
    """The recorded loop, round by round; afterwards the context that was written piece by piece is that of one go."""
    prompt = case.recorded["prompt_ids"].tolist()
    options = dict(method="dflash", max_new_tokens=NEW, cap_block=True)
    (rounds,), state = replay(case.model, [prompt], keep_logits=True, **options)
    assert len(rounds) == len(case.recorded["trace"])
    for ours, row in zip(rounds, case.recorded["trace"], strict=True):
        n, block, target = len(ours.tokens), row[3 : 4 + HORIZON], row[4 + HORIZON :]
        assert [ours.start, n, len(ours.path) - 1] == row[:3].tolist()
        assert ours.tokens == block[:n].tolist() and (block[n:] == -1).all()
        assert ours.logits.argmax(-1).tolist() == target[:n].tolist()
    assert np.asarray(state.progress.tokens)[0, :NEW].tolist() == case.recorded["spec_ids"].tolist()
    assert int(state.length[0]) == SIZE - 1
    check_caches(state.draft_caches, step, SIZE - 1, case.atol)


@pytest.mark.parametrize(
    "options",
    [
        dict(method="ddtree", tree_budget=[4, 16, 64]),
        pytest.param(dict(method="ddtree", tree_budget=[4, 16, 64], tree="spine"), marks=pytest.mark.slow),
        pytest.param(dict(method="dflash"), marks=pytest.mark.slow),
        pytest.param(dict(method="dflash", cap_block=True), marks=pytest.mark.slow),
    ],
    ids=["best-first", "spine", "chain", "capped chain"],
)
def test_generate(case, options):
    """In one device loop. With three tree budgets there are three rows, and 64 is the compiled budget."""
    prompt = case.recorded["prompt_ids"].tolist()
    rows = len(options.get("tree_budget", "1"))
    results = ddtree_jax.generate(case.model, prompt_ids=[prompt] * rows, max_new_tokens=NEW, **options)
    for result in results:
        assert result.output_ids == prompt + case.recorded["spec_ids"].tolist()
        assert sum(result.acceptance_lengths) >= NEW - 1 > sum(result.acceptance_lengths[:-1])
    if "cap_block" in options:
        assert results[0].acceptance_lengths == (case.recorded["trace"][:, 2] + 1).tolist()


@pytest.fixture(scope="module")
def prefilled(case) -> DecodeState:
    """The pair after the prompt. Nothing here donates it."""
    return prefill(case)


def prefill(case: Case) -> DecodeState:
    options = Options(method="dflash", max_new_tokens=NEW)
    request = make_request(case.model, [case.recorded["prompt_ids"].tolist()], options)
    return loop.prefill(case.model.target, case.model.drafter, request)[0]


@jax.jit(static_argnames="config")
def proposal(target: Network, drafter: Network, state: DecodeState, config: RoundConfig):
    return propose(target.module(), drafter.module(), state, config)


def draft_logits(case: Case, state: DecodeState, budget: int = HORIZON) -> np.ndarray:
    config = RoundConfig(budget, "best-first", HORIZON)
    tree, logits = proposal(case.model.target, case.model.drafter, state, config)
    assert tree.token.shape == (1, 1 + budget)
    return np.asarray(logits)


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_budget_does_not_change_the_block(case, prefilled, budget):
    """cases.md C9: whatever the tree, seven masks are drafted, with the recorded logits."""
    close(draft_logits(case, prefilled, budget)[0], case.recorded["draft_logits_slots1"], case.atol)


def test_root_changes_the_draft(case, prefilled):
    """cases.md C10: slot 0 is the root's embedding, not a mask."""
    ours = draft_logits(case, prefilled)
    for other in (case.recorded["block_ids"][0] + 1, case.model.drafter.config.mask_token_id):
        changed = draft_logits(case, dataclasses.replace(prefilled, root=jnp.array([other])))
        assert (np.abs(changed - ours).max(axis=(0, 2)) > 0.05).all()  # in every slot


def test_chunked_prefill(case, prefilled, step):
    """cases.md C11: the context of a prompt that came in three pieces is that of one piece."""
    with mock.patch.object(loop, "PREFILL_SIZES", (16,)):
        state = prefill(case)
    assert int(state.length[0]) == CONTEXT
    check_caches(state.draft_caches, step, CONTEXT, case.atol)
    close(draft_logits(case, state), draft_logits(case, prefilled), case.atol)


class Reference:
    """The draft pass in float64 with a dense mask over context and block, written from reference_models.md 5.1."""

    def __init__(self, drafter: Network, causal: tuple[bool, ...], windows: tuple[int | None, ...]):
        self.config, self.causal, self.windows = drafter.config, causal, windows
        self.weights = {name: np.asarray(value, np.float64) for name, value in named_parameters(drafter).items()}

    def __call__(self, noise: np.ndarray, context: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        x = noise.astype(np.float64)
        for i, (keys, values) in enumerate(context):
            x = x + self.attention(i, self.norm(x, f"layers.{i}.input_layernorm"), keys, values)
            u = self.norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = self.linear(u, f"layers.{i}.mlp.gate_proj"), self.linear(u, f"layers.{i}.mlp.up_proj")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"layers.{i}.mlp.down_proj")
        return self.norm(x, "norm")

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x, name):
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_eps)
        return x / scale * self.weights[f"{name}.weight"]

    def rotate(self, x, position):
        half = x.shape[-1] // 2
        angle = position[:, None, None] * self.config.attention.rope.theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    def attention(self, i, u, keys, values):
        c, name = self.config.attention, f"layers.{i}.self_attn"
        q, k, v = (self.linear(u, f"{name}.{p}_proj").reshape(len(u), -1, c.head_dim) for p in "qkv")
        at = len(keys) + np.arange(len(u))
        q, k = (self.rotate(self.norm(x, f"{name}.{p}_norm"), at) for x, p in ((q, "q"), (k, "k")))
        k, v = (np.repeat(np.concatenate(x), c.num_heads // c.num_kv_heads, axis=1) for x in ((keys, k), (values, v)))
        scores = np.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5
        scores = np.where(self.mask(i, at, np.arange(len(k))), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return self.linear(out.reshape(len(u), -1), f"{name}.o_proj")

    def mask(self, i, query, key):
        behind, causal, window = query[:, None] - key[None, :], self.causal[i], self.windows[i]
        allowed = behind >= 0 if causal else np.ones_like(behind, bool)
        if window is None:
            return allowed
        return allowed & (behind < window) & (causal | (-behind < window))


@jax.jit
def draft(drafter: Network, noise, caches):
    return drafter.module().draft(noise, caches, jnp.array([CONTEXT]))


@pytest.mark.parametrize("window", [16, 5, None])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_sliding_window(golden, window, causal):
    """cases.md A18: both causal rules, a window shorter than the context and one shorter than the block."""
    directory = golden("dflash_qwen3_5_swa")
    recorded = arrays_beside(directory)
    drafter = ddtree_jax.load(golden("qwen3_5"), directory, dtype="float32").drafter
    rule = dict(causal=(causal, causal, False), windows=(window, window, None))
    rules = tuple(BlockRule.CAUSAL if c else BlockRule.BIDIRECTIONAL for c in rule["causal"])
    config = dataclasses.replace(drafter.config, rules=rules, windows=rule["windows"])
    changed = dataclasses.replace(drafter, spec=dataclasses.replace(drafter.spec, config=config))
    context = [(recorded[f"ctx_k_L{i}"], recorded[f"ctx_v_L{i}"]) for i in range(3)]
    noise = recorded["noise_embedding"]
    caches = tuple(KVCache(*(jnp.asarray(x).swapaxes(0, 1)[None] for x in rows)) for rows in context)
    expected = Reference(drafter, **rule)(noise, context)
    close(draft(changed, jnp.asarray(noise)[None], caches)[0], expected, 1e-4)
    is_recorded = drafter.config == config
    assert is_recorded == (causal and window == 16)
    assert (np.abs(expected - recorded["draft_hidden"]).max() < 1e-4) == is_recorded
