"""The caches after a round are those of plain decoding, and what has to be float32 is (cases.md B2, B3, B5, B10-B16).

Rounds are forced: their trees hold the tokens that plain decoding gives, down to a chosen depth, among wrong ones.
"""

import dataclasses
from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode import runs
from decode.runs import BUDGET, HORIZON, PLAIN
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from tiny import HYBRID, tiny_target

from ddtree_jax.config import LINEAR
from ddtree_jax.decode import round as round_module
from ddtree_jax.decode.loop import decode_rounds, module
from ddtree_jax.decode.state import RoundConfig
from ddtree_jax.models.blocks import DeltaCache, KVCache, sequence_block
from ddtree_jax.models.delta_net import GatedDeltaNet, unit
from ddtree_jax.ops.chunk_delta import IMPLEMENTATIONS as CHUNK_WRITINGS
from ddtree_jax.ops.chunk_delta import chunk_delta
from ddtree_jax.ops.tree_delta import IMPLEMENTATIONS as TREE_WRITINGS
from ddtree_jax.ops.tree_delta import DeltaFactors, commit_path, replay_path, tree_delta
from ddtree_jax.tree import DraftTree

PROMPT_LENGTHS = (2, 9, 30)
STEPS = 2 * (HORIZON + 1)
TEMPERATURES = (0.0, 1.0, 3.0)


# ---- forced rounds ---------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=["config"])
def forced_round(target, drafter, state, tree, config=RoundConfig(BUDGET, "best-first", HORIZON)):  # noqa: B008
    """A round that verifies `tree`, whatever the drafter thinks."""
    with mock.patch.object(round_module, "propose", lambda *_: (tree, None)):
        return round_module.decode_round(module(target), module(drafter), state, config)[0]


def forced_row(root: int, truth: list[int], depth: int) -> list[list[int]]:
    """Nodes [token, parent, depth] of a tree that holds `truth` down to `depth`, each node after a wrong sibling, and
    wrong tokens below it.
    """
    nodes, at = [[root, -1, 0]], 0
    for d in range(1, min(depth, HORIZON) + 1):
        nodes.append([(truth[d - 1] + 1) % 13, at, d])
        nodes.append([truth[d - 1], at, d])
        at = len(nodes) - 1
    wrong = range(1, min(13, BUDGET + 2 - len(nodes))) if depth < HORIZON else ()
    return nodes + [[(truth[depth] + i) % 13, at, depth + 1] for i in wrong]


def forced_tree(roots, truths, depths) -> DraftTree:
    """The trees of all rows, with pads."""
    trees = np.full((len(roots), BUDGET + 1, 3), (0, -1, 0))
    for tree, *row in zip(trees, roots, truths, depths, strict=True):
        nodes = forced_row(*row)
        tree[: len(nodes)] = nodes
    token, parent, depth = jnp.asarray(np.moveaxis(trees, 2, 0), jnp.int32)
    valid = (parent >= 0) | (jnp.arange(BUDGET + 1) == 0)
    return DraftTree(token, parent, depth, jnp.where(valid, 0.0, -jnp.inf), valid)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A run of plain decoding: its tokens, and its state before every round."""

    tokens: list[list[int]]
    states: list


@cache
def plain() -> Plain:
    """STEPS rounds of plain decoding, the drafter's context kept."""
    prompts, sampling = runs.prompts(8, PROMPT_LENGTHS), runs.sampling(3, TEMPERATURES, seed=(1, 2, 3))
    state = runs.begin(runs.target(), runs.drafter(), prompts, sampling)
    states = [runs.copy(state)]
    for _ in range(STEPS):
        state, report = decode_rounds(runs.target(), runs.drafter(), state, jnp.int32(1), config=PLAIN)
        states.append(runs.copy(state))
    return Plain(runs.outputs(report), states)


def force(state, depths, **changes):
    """A forced round on a state of the plain run; `depths` accepted nodes below the root in each row."""
    state = runs.with_progress(runs.copy(state), **changes)
    produced = np.asarray(state.progress.produced)
    truths = [row[n:] for row, n in zip(plain().tokens, produced, strict=True)]
    return forced_round(runs.target(), runs.drafter(), state, forced_tree(state.root.tolist(), truths, depths))


def check_caches(state, produced):
    """Row b holds what plain decoding holds after `produced[b]` tokens: the kept text without its last token."""
    assert state.progress.produced.tolist() == list(produced)
    for row, count in enumerate(produced):
        expected = plain().states[count - 1]
        length = PROMPT_LENGTHS[row] + count - 1
        assert int(state.length[row]) == length == int(expected.length[row])
        assert int(state.root[row]) == plain().tokens[row][count - 1]
        for mine, theirs in ((state.caches, expected.caches), (state.draft_caches, expected.draft_caches)):
            pairs = zip(runs.kept_slots(mine, row, length), runs.kept_slots(theirs, row, length), strict=True)
            for got, wanted in pairs:
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)  # values up to 5, two float32 programs
        written = np.asarray(state.progress.tokens[row, :count])
        assert written.tolist() == plain().tokens[row][:count]


@pytest.mark.parametrize("depths", [(0, 0, 0), (1, 1, 1), (5, 5, 5), (0, 1, 5), (5, 0, 2), (3, 4, 0)])
def test_caches_after_a_round(depths):
    """None, one, some, all nodes accepted, alike in all rows and not (B3)."""
    state = force(plain().states[0], depths)
    check_caches(state, [1 + d + 1 for d in depths])
    assert state.progress.accepted[:, 0].tolist() == [d + 1 for d in depths]
    again = force(state, depths[::-1])  # a round after that reads what this one wrote
    check_caches(again, [2 + d + 1 + e for d, e in zip(depths, depths[::-1], strict=True)])


def test_caches_after_the_limit():
    """The limit cuts the path where it is, not where the round ends; a limit past the path cuts nothing."""
    state = force(plain().states[0], (5, 5, 5), limit=jnp.array([2, 4, 7]))
    check_caches(state, (2, 4, 7))
    assert state.progress.done.tolist() == [True, True, True]
    assert state.progress.accepted[:, 0].tolist() == [6, 6, 6]
    state = force(plain().states[0], (5, 3, 1), limit=jnp.array([8, 6, 5]))
    check_caches(state, (7, 5, 3))
    assert not state.progress.done.any()


def test_caches_after_a_stop_inside_the_path():
    """The text ends with the stop token, wherever the path leads; other rows go on."""
    tokens = plain().tokens
    stop = tokens[0][2]  # accepted at depth 2
    kept = [next((i + 1 for i, t in enumerate(row[1:7], 1) if t == stop), 7) for row in tokens]
    state = force(plain().states[0], (5, 5, 5), stop_ids=plain().states[0].progress.stop_ids.at[0].set(stop))
    assert kept[0] == 3
    check_caches(state, kept)
    assert state.progress.done.tolist() == [row[n - 1] == stop for row, n in zip(tokens, kept, strict=True)]


def test_rows_that_are_done_stay_as_they_are():
    """Their states bit for bit, while others go on."""
    first = force(plain().states[0], (5, 2, 2), limit=jnp.array([3, 10, 4]))
    assert first.progress.done.tolist() == [True, False, True]
    second = force(first, (4, 4, 4))
    check_caches(second, (3, 9, 4))
    for row, length in ((0, 4), (2, 33)):
        before, after = (runs.kept_slots(s.caches, row, length) for s in (first, second))
        for x, y in zip(before, after, strict=True):
            np.testing.assert_array_equal(x, y)
    for field in ("rounds", "nodes", "produced"):
        first_field, second_field = (getattr(s.progress, field) for s in (first, second))
        assert first_field[jnp.array([0, 2])].tolist() == second_field[jnp.array([0, 2])].tolist()


def test_the_window_holds_the_path_and_nothing_else():
    """The first layer's convolution rows depend on a token alone: the window is the rows of the last three, exactly."""
    state = force(plain().states[0], (5, 1, 0))
    network = runs.target().module()
    layer = network.layers[0]
    for row, depth in enumerate((5, 1, 0)):
        text = runs.prompts(8, PROMPT_LENGTHS)[row] + plain().tokens[row]
        end = PROMPT_LENGTHS[row] + 1 + depth
        rows = layer.linear_attn.in_proj_qkv(layer.input_layernorm(network.embed(jnp.array([text[:end]]))))
        expected = np.concatenate([np.zeros((3, rows.shape[2])), rows[0]])[-3:]
        np.testing.assert_allclose(state.caches[0].window[row], expected, atol=1e-6)


# ---- several tokens at once, padding ---------------------------------------------------------------------------------

WIDTH = 16


@jax.jit
def extend(target, ids, caches, length, count):
    """`count` further tokens of every row (ids [B, WIDTH], right-padded) after `length`."""
    network = target.module()
    hidden, _, made = network.sequence(ids, caches, length, count)
    return network.extend(caches, made, length), network.logits(hidden)


def feed(target, texts, chunks):
    """The caches after texts[b] was fed in chunks of at most chunks[i] tokens, and the logits of every token."""
    rows = len(texts)
    caches = target.module().init_caches(rows, 48)
    length, logits = np.zeros(rows, np.int32), [[] for _ in texts]
    for chunk in chunks:
        count = np.minimum([len(t) - n for t, n in zip(texts, length, strict=True)], chunk).astype(np.int32)
        ids = np.full((rows, WIDTH), 7, np.int32)  # the padding is a real token
        for row in range(rows):
            ids[row, : count[row]] = texts[row][length[row] : length[row] + count[row]]
        caches, out = extend(target, jnp.asarray(ids), caches, jnp.asarray(length), jnp.asarray(count))
        for row in range(rows):
            logits[row] += list(np.asarray(out[row, : count[row]]))
        length = length + count
    assert length.tolist() == [len(t) for t in texts]
    return caches, logits


def check_same(one, other, lengths):
    for row, length in enumerate(lengths):
        for a, b in zip(*(runs.kept_slots(run[0], row, length) for run in (one, other)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one[1][row], other[1][row], atol=1e-4)


def test_several_tokens_after_a_cache():
    """10 tokens, then 5 at once, is 10 and 5 times 1; and is 15 at once (B2)."""
    texts = runs.prompts(9, (15, 15, 15))
    at_once = feed(runs.target(), texts, (10, 5))
    check_same(at_once, feed(runs.target(), texts, (10, 1, 1, 1, 1, 1)), (15, 15, 15))
    check_same(at_once, feed(runs.target(), texts, (15,)), (15, 15, 15))
    check_same(at_once, feed(runs.target(), texts, [1] * 15), (15, 15, 15))


def test_padding_never_enters_a_state():
    """Rows with 0, 3 and 7 pads, in batches with different ones (B5)."""
    texts = runs.prompts(10, (16, 13, 9))
    together = feed(runs.target(), texts, (16,))
    check_same(together, feed(runs.target(), texts, (9, 1, 3, 3)), (16, 13, 9))
    caches, logits = feed(runs.target(), texts[::-1], (16,))
    check_same(together, (jax.tree.map(lambda x: x[::-1], caches), logits[::-1]), (16, 13, 9))


def test_the_gradient_of_a_zero_row_is_finite():
    """The norm of q and k has its epsilon inside the root (B5)."""
    gradient = jax.grad(lambda x: unit(x).sum())(jnp.zeros((2, 3)))
    np.testing.assert_allclose(gradient, np.full((2, 3), 1e3), rtol=1e-5)


# ---- axes and dtypes -------------------------------------------------------------------------------------------------


def test_the_state_has_the_key_axis_first():
    """dk = 16 and dv = 24 here, so a mix-up of the two cannot pass (B13); the capacity is not among the sizes (B15)."""
    network = runs.target().module()
    caches = network.init_caches(5, 7)
    assert [type(c) for c in caches] == [DeltaCache, DeltaCache, DeltaCache, KVCache]
    assert caches[0].state.shape == (5, 4, 16, 24)
    assert caches[0].window.shape == (5, 3, 2 * 2 * 16 + 4 * 24)
    assert caches[3].k.shape == caches[3].v.shape == (5, 2, 7, 32)
    flipped = [dataclasses.replace(c, state=c.state.swapaxes(2, 3)) for c in caches[:3]] + [caches[3]]
    ids, zero = jnp.ones((5, 4), jnp.int32), jnp.zeros(5, jnp.int32)
    jax.eval_shape(network.sequence, ids, caches, zero, zero + 4)
    with pytest.raises(TypeError, match="dk|dv"):
        jax.eval_shape(network.sequence, ids, flipped, zero, zero + 4)


FLOAT32_LEAVES = ("A_log", "dt_bias", "['linear_attn']['norm']")


def test_a_bfloat16_model_keeps_its_decay_in_float32():
    """`A_log`, `dt_bias`, the gated norm's weight and the recurrent state (B10, B11); everything else is bfloat16."""
    network = tiny_target(0, HYBRID, jnp.bfloat16)
    leaves = jax.tree_util.tree_leaves_with_path(network.spec.abstract()[1])
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in leaves}
    kept = {path for path in dtypes if any(name in path for name in FLOAT32_LEAVES)}
    assert len(kept) == 3 * 3
    assert {path for path, dtype in dtypes.items() if dtype == jnp.float32} == kept
    assert {dtype for path, dtype in dtypes.items() if path not in kept} == {jnp.dtype(jnp.bfloat16)}
    assert [x.dtype for x in network.leaves] == list(dtypes.values())
    caches = network.module().init_caches(1, 4)
    assert caches[0].state.dtype == jnp.float32
    assert {caches[0].window.dtype, caches[3].k.dtype, caches[3].v.dtype} == {jnp.dtype(jnp.bfloat16)}


def test_a_bfloat16_prefill_leaves_a_float32_state():
    network = tiny_target(0, HYBRID, jnp.bfloat16).module()
    ids, zero = jnp.ones((1, 4), jnp.int32), jnp.zeros(1, jnp.int32)
    hidden, _, made = jax.eval_shape(lambda: network.sequence(ids, network.init_caches(1, 0), zero, zero + 4))
    assert hidden.dtype == jnp.bfloat16
    assert [m.state.dtype for m in made[:3]] == [jnp.float32] * 3
    assert [m.window.dtype for m in made[:3]] == [jnp.bfloat16] * 3


def delta_layer(dtype=jnp.bfloat16) -> GatedDeltaNet:
    return GatedDeltaNet(HYBRID.delta, HYBRID.hidden_size, eps=1e-6, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))


@jax.jit
def run_delta_layer(a_log, x):
    """Gates, output and cache after it of a bfloat16 layer with this A_log, over x [2, 5, H] from a state of ones."""
    layer = delta_layer()
    layer.A_log[...] = jnp.full(4, a_log)
    cache = DeltaCache(jnp.ones((2, 4, 16, 24)), jnp.zeros((2, 3, 160), jnp.bfloat16))
    zero = jnp.zeros(2, jnp.int32)
    return layer._gates(x), layer.sequence(x, cache, sequence_block(zero, zero + 5, 5))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("a_log", [-30.0, 2.8, 20.0])
def test_gates_stay_finite(a_log, scale):
    """Activations and A_log far outside what training gives: no -inf, no NaN, no growth (B11)."""
    x = scale * jax.random.normal(jax.random.key(0), (2, 5, 48), jnp.bfloat16)
    (g, beta), (out, after) = run_delta_layer(a_log, x)
    assert g.dtype == beta.dtype == after.state.dtype == jnp.float32
    assert np.isfinite(g).all() and (g <= 0).all()
    assert (beta >= 0).all() and (beta <= 1).all()
    assert np.isfinite(np.asarray(out, np.float32)).all() and np.isfinite(after.state).all()


def test_decay_over_4096_steps():
    """What is left of a state after 4096 steps, against float64 of the stored A_log: bfloat16 is off by 3% (B10)."""
    a_log, bias = np.float32(-1.2345678), np.float32(-3.3333333)
    layer = delta_layer()
    layer.A_log[...], layer.dt_bias[...] = jnp.full(4, a_log), jnp.full(4, bias)
    layer.in_proj_a.weight[...] = jnp.zeros((4, 48), jnp.bfloat16)
    g, _ = layer._gates(jnp.ones((1, 1, 48), jnp.bfloat16))
    exact = -np.exp(np.float64(a_log)) * np.log1p(np.exp(np.float64(bias)))
    np.testing.assert_allclose(np.exp(4096 * np.float64(g[0, 0, 0])), np.exp(4096 * exact), rtol=1e-3)
    rounded = -np.exp(np.float64(jnp.bfloat16(a_log))) * np.log1p(np.exp(np.float64(jnp.bfloat16(bias))))
    assert abs(np.exp(4096 * (rounded - exact)) - 1) > 0.03


# ---- precision -------------------------------------------------------------------------------------------------------


def products(jaxpr):
    """The precision of every dot_general in a jaxpr and those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))):
            if isinstance(value, ClosedJaxpr):
                value = value.jaxpr
            if isinstance(value, Jaxpr):
                yield from products(value)


def precisions(function, *args):
    """All of them, with nothing asked for by default (tests otherwise run at the highest)."""
    with jax.default_matmul_precision("default"):
        return list(products(jax.make_jaxpr(function)(*args).jaxpr))


HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def delta_arguments(tokens):
    key, value, gate = (jnp.ones((1, tokens, *shape)) for shape in ((2, 16), (4, 24), (4,)))
    return key, key, value, -gate, gate, jnp.ones((1, 4, 16, 24))


@pytest.mark.parametrize("writing", TREE_WRITINGS)
def test_tree_products_ask_for_the_highest_precision(writing):
    """B16: on a GPU fp32 products are TF32 unless they ask."""
    parent, depth = jnp.array([[-1, 0, 0, 1]]), jnp.array([[0, 1, 1, 2]])
    run = partial(tree_delta, max_depth=2, implementation=writing)
    found = precisions(run, *delta_arguments(4), parent, depth)
    assert len(found) >= 2 and set(found) == {HIGHEST}


@pytest.mark.parametrize("writing", CHUNK_WRITINGS)
def test_chunk_products_ask_for_the_highest_precision(writing):
    found = precisions(partial(chunk_delta, implementation=writing), *delta_arguments(70))
    assert len(found) >= 2 and set(found) == {HIGHEST}


def test_commit_products_ask_for_the_highest_precision():
    _, key, value, g, beta, state = delta_arguments(4)
    path, count = jnp.array([[0, 1]]), jnp.array([2])
    for found in (
        precisions(commit_path, state, DeltaFactors(key, value, g), path, count),
        precisions(replay_path, state, key, value, g, beta, path, count),
    ):
        assert found and set(found) == {HIGHEST}


def test_only_projections_of_a_delta_layer_use_the_default():
    """The five matrices of a layer follow the default precision; nothing else does."""
    layer = delta_layer(jnp.float32)
    cache = DeltaCache(jnp.zeros((1, 4, 16, 24)), jnp.zeros((1, 3, 160)))
    zero = jnp.zeros(1, jnp.int32)
    found = precisions(lambda x: layer.sequence(x, cache, sequence_block(zero, zero + 4, 4)), jnp.ones((1, 4, 48)))
    assert len([p for p in found if p != HIGHEST]) == 5
    assert len(found) > 10


def test_every_linear_layer_of_the_model_is_of_this_kind():
    assert HYBRID.layer_types.count(LINEAR) == 3
    network = runs.target().module()
    assert [layer.linear for layer in network.layers] == [True, True, True, False]
