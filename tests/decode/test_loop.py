"""The loop on the device: nothing compiles after the first rounds, no cache is copied, the host is not called; prefill
in any chunks gives the same state.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode import runs
from decode.runs import BUDGET, HORIZON
from tiny import DENSE, DRAFTER, HYBRID, tiny_drafter

from ddtree_jax.config import RopeConfig
from ddtree_jax.decode import loop
from ddtree_jax.decode.loop import Request, bucket, decode, decode_rounds, prefill, prefill_plan, start
from ddtree_jax.decode.state import RoundConfig
from ddtree_jax.decode.stats import COMPILE_CLOCK, Stopwatch
from ddtree_jax.models.blocks import KVCache

TREE = RoundConfig(BUDGET, "spine", HORIZON, couple=True)

# ---- compilation -----------------------------------------------------------------------------------------------------

PROGRAMS = (loop._allocate, loop.read_chunk, loop.write_chunk, loop.first_token, loop.decode_rounds)


def generate(seed: int, lengths, limits) -> int:
    """One batch from prompts to its last token, as `generation.generate` does it; returns the rounds of all rows."""
    settings = runs.sampling(3, (0.0, 1.0, 0.5 + seed), top_k=seed, min_p=0.01 * seed, seed=(seed, 1, 2))
    request = Request(runs.prompts(seed, lengths), list(limits), [BUDGET, seed % 5, 0], (11,) * seed, settings, TREE)
    state, report = prefill(runs.target(), runs.drafter(), request)
    for report in decode(runs.target(), runs.drafter(), state, TREE, 5 + seed):
        assert (np.asarray(report.produced) <= limits).all()
    return int(report.rounds.sum())


def test_nothing_compiles_after_the_first_batch():
    """Other prompts, lengths, limits, seeds, budgets, temperatures, filters, stop ids: the same programs."""
    generate(0, (3, 5, 7), (200, 200, 200))
    sizes, watch = [program._cache_size() for program in PROGRAMS], Stopwatch()
    compiled = COMPILE_CLOCK.seconds
    rounds = generate(0, (40, 1, 30), (200, 193, 200)) + generate(3, (64, 2, 9), (1, 200, 7))
    assert rounds >= 200
    assert [program._cache_size() for program in PROGRAMS] == sizes
    assert COMPILE_CLOCK.seconds == compiled
    assert watch.compile_seconds == 0.0 and watch.seconds > 0.0


def test_the_compile_clock_sees_a_compilation():
    watch = Stopwatch()
    jax.jit(lambda x: x * 1.2345 + 6.789)(jnp.ones(3))
    assert 0.0 < watch.compile_seconds
    watch.restart()
    assert watch.compile_seconds == 0.0


# ---- memory, host calls ----------------------------------------------------------------------------------------------

SLOTS = 6144


def wide(config):
    """Heads so wide that a cache outweighs all else that grows with the context: scores, masks."""
    return dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, head_dim=128, rope=RopeConfig(1e4, 32))
    )


def caches_of(state):
    return [*state.caches, *state.draft_caches]


def size_of(x) -> int:
    return x.size * x.dtype.itemsize


def abstract_state(target, drafter, batch, config):
    """The shapes of a state of SLOTS slots; nothing is allocated."""
    sampling = runs.sampling(batch, 1.0)
    request = Request([[1]] * batch, [SLOTS - 200] * batch, [config.budget] * batch, (), sampling, config)
    return jax.eval_shape(lambda: start(target, drafter, request))


def check_in_place(compiled, caches):
    """Every cache is updated where it lies, and nothing as large as one is held beside them."""
    memory = compiled.memory_analysis()
    arrays = jax.tree.leaves(caches)
    assert memory.alias_size_in_bytes >= sum(map(size_of, arrays))
    kv = [size_of(c.k) for c in caches if isinstance(c, KVCache)]
    assert memory.temp_size_in_bytes < 0.3 * min(kv), f"{memory.temp_size_in_bytes} beside caches of {kv}"


def check_stays_on_the_device(compiled):
    text = compiled.as_text()
    assert "while(" in text or "while (" in text
    found = re.findall(r"callback|infeed|outfeed|host-transfer|is_host_transfer=true|\b(?:send|recv)(?:-done)?\(", text)
    assert not found, set(found)


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        pytest.param(HYBRID, 3, id="hybrid-3"),
        pytest.param(DENSE, 1, id="dense-1"),
        pytest.param(HYBRID, 1, id="hybrid-1", marks=pytest.mark.slow),
        pytest.param(DENSE, 3, id="dense-3", marks=pytest.mark.slow),
    ],
)
def test_rounds_copy_no_cache_and_call_no_host(config, batch):
    target = runs.target(0, wide(config))
    drafter = tiny_drafter(1, dataclasses.replace(wide(DRAFTER), block_size=4))
    round_config = RoundConfig(4, "best-first", 3, couple=True)
    state = abstract_state(target, drafter, batch, round_config)
    compiled = decode_rounds.lower(target, drafter, state, jnp.int32(8), config=round_config).compile()
    check_in_place(compiled, caches_of(state))
    check_stays_on_the_device(compiled)


def test_prefill_copies_no_cache():
    target = runs.target(0, wide(HYBRID))
    drafter = tiny_drafter(1, wide(DRAFTER))
    state = abstract_state(target, drafter, 2, TREE)
    ids, last, lengths, begin = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 48)), jnp.array([3, 4]), jnp.int32(0)
    read = loop.read_chunk.lower(target, drafter, state, last, ids, lengths, begin)
    kv = [c for c in caches_of(state) if isinstance(c, KVCache)]
    assert read.compile().memory_analysis().temp_size_in_bytes < 0.3 * size_of(kv[0].k)
    _, made, features = jax.eval_shape(loop.read_chunk, target, drafter, state, last, ids, lengths, begin)
    state, rows = loop.take_delta(state, made)
    write = loop.write_chunk.lower(target, drafter, state, rows, features, lengths, begin)
    check_in_place(write.compile(), caches_of(state))


def test_a_donated_state_is_gone():
    """Rounds take their state's buffers; reports outlive them."""
    state = runs.begin(runs.target(), runs.drafter(), runs.prompts(0, (3, 5, 7)), runs.sampling(3))
    after, report = decode_rounds(runs.target(), runs.drafter(), state, jnp.int32(1), config=TREE)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.caches) + jax.tree.leaves(state.draft_caches))
    decode_rounds(runs.target(), runs.drafter(), after, jnp.int32(1), config=TREE)
    assert not any(x.is_deleted() for x in jax.tree.leaves(report))
    assert (np.asarray(report.rounds) == 1).all()


# ---- dispatches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds_per_dispatch", [1, 7, 1000])
def test_reports_grow_and_end_complete(rounds_per_dispatch):
    """However many rounds a dispatch has; the last report is the whole output."""
    target, drafter = runs.target(), runs.drafter()
    state = runs.begin(
        target, drafter, runs.prompts(2, (4, 9, 2)), runs.sampling(3, 1.0, seed=(1, 2, 3)), limits=(20, 3, 31)
    )
    complete = runs.finish(target, drafter, runs.copy(state), TREE)
    reports = list(decode(target, drafter, state, TREE, rounds_per_dispatch))
    assert runs.outputs(reports[-1]) == runs.outputs(complete)
    assert runs.acceptance(reports[-1]) == runs.acceptance(complete)
    for earlier, later in zip(reports, reports[1:], strict=False):
        for a, b in zip(runs.outputs(earlier), runs.outputs(later), strict=True):
            assert a == b[: len(a)]
        assert (np.asarray(later.rounds) <= np.asarray(earlier.rounds) + rounds_per_dispatch).all()
    most = int(complete.rounds.max())
    assert len(reports) == max(-(-most // rounds_per_dispatch), 1)


def test_no_round_is_run_when_all_rows_are_done():
    state = runs.begin(runs.target(), runs.drafter(), runs.prompts(2, (4, 9, 2)), runs.sampling(3), limits=1)
    report = runs.finish(runs.target(), runs.drafter(), state, TREE)
    assert report.produced.tolist() == [1, 1, 1]
    assert report.rounds.tolist() == [0, 0, 0]


# ---- prefill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "plan"),
    [
        (1, [(0, 64)]),
        (64, [(0, 64)]),
        (65, [(0, 256)]),
        (256, [(0, 256)]),
        (150, [(0, 256)]),
        (257, [(0, 256), (256, 64)]),
        (400, [(0, 256), (256, 256)]),
        (600, [(0, 1024)]),
        (1024, [(0, 1024)]),
        (1025, [(0, 1024), (1024, 64)]),
        (1100, [(0, 1024), (1024, 256)]),
        (3000, [(0, 1024), (1024, 1024), (2048, 1024)]),
    ],
)
def test_prefill_plan(longest, plan):
    assert prefill_plan(longest) == plan


@pytest.mark.parametrize(
    ("size", "smallest", "expected"),
    [(0, 64, 64), (1, 64, 64), (64, 64, 64), (65, 64, 96), (96, 64, 96), (97, 64, 128), (129, 64, 192), (193, 64, 256)]
    + [(1000, 256, 1024), (1025, 256, 1536), (1537, 256, 2048), (3, 8, 8), (9, 8, 12)],
)
def test_bucket(size, smallest, expected):
    assert bucket(size, smallest) == expected


def test_buckets_waste_less_than_half():
    sizes = {bucket(n, 64) for n in range(65, 5000)}
    assert all(n <= bucket(n, 64) < 1.5 * n for n in range(65, 5000))
    assert len(sizes) <= 14


def test_a_state_has_room_for_the_padding_and_the_last_round():
    """Capacity: all chunks, and every prompt with its limit and a whole path behind it."""
    for prompts, limits in ([[[1]], [300]], [[[1] * 200], [10]], [[[1] * 250, [2]], [1, 250]]):
        sampling = runs.sampling(len(prompts))
        request = Request(prompts, limits, [BUDGET] * len(prompts), (), sampling, TREE)
        state = jax.eval_shape(lambda request=request: start(runs.target(), runs.drafter(), request))
        slots = state.caches[3].k.shape[2]
        assert {c.k.shape[2] for c in state.draft_caches} == {slots}
        assert slots >= max(len(p) + n for p, n in zip(prompts, limits, strict=True)) + HORIZON + 1
        assert slots >= 256 and state.progress.tokens.shape[1] >= max(limits)


def states_by_sizes(monkeypatch, sizes, lengths, config):
    """The state after prompts of these lengths, prefilled in chunks of these sizes, and a trace of the first draft."""
    monkeypatch.setattr(loop, "PREFILL_SIZES", sizes)
    settings = runs.sampling(len(lengths), 1.0)
    request = Request(runs.prompts(3, lengths), [40] * len(lengths), [BUDGET] * len(lengths), (), settings, TREE)
    return prefill(runs.target(0, config), runs.drafter(), request)[0]


@pytest.mark.parametrize(
    "config", [pytest.param(HYBRID, id="hybrid"), pytest.param(DENSE, id="dense", marks=pytest.mark.slow)]
)
def test_prefill_in_chunks_is_prefill_at_once(monkeypatch, config):
    """Rows that end in the first, a middle and the last chunk; also the drafter's context (C11)."""
    lengths = (1, 100, 230)
    at_once = states_by_sizes(monkeypatch, (256,), lengths, config)
    for sizes in ((64,), (64, 256)):
        chunked = states_by_sizes(monkeypatch, sizes, lengths, config)
        check_same_state(chunked, at_once, lengths)


def check_same_state(one, other, lengths):
    assert one.length.tolist() == list(lengths) == other.length.tolist()
    assert one.root.tolist() == other.root.tolist()
    for row, length in enumerate(lengths):
        for a, b in ((one.caches, other.caches), (one.draft_caches, other.draft_caches)):
            for x, y in zip(runs.kept_slots(a, row, length), runs.kept_slots(b, row, length), strict=True):
                np.testing.assert_allclose(x, y, atol=2e-4)  # two float32 programs on a hybrid: reference_models.md 3.4


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1024, 900, 3), (1100, 1025, 1023), (2500, 64, 65)])
def test_prefill_in_the_real_buckets(monkeypatch, lengths):
    at_once = states_by_sizes(monkeypatch, (3072,), lengths, HYBRID)
    real = states_by_sizes(monkeypatch, (64, 256, 1024), lengths, HYBRID)
    check_same_state(real, at_once, lengths)


@pytest.mark.parametrize("config", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_prefill_is_the_plain_forward(config):
    """The first token, against whole sequences without caches."""
    target, prompts = runs.target(1, config), runs.prompts(4, (64, 33, 2))
    state = runs.begin(target, runs.drafter(), prompts, runs.sampling(3))
    ids = np.zeros((3, 64), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    logits = jax.jit(lambda network, ids: network.module().logits(network.module()(ids)[0]))(target, jnp.asarray(ids))
    assert state.root.tolist() == [int(jnp.argmax(logits[row, len(p) - 1])) for row, p in enumerate(prompts)]
    assert state.progress.tokens[:, 0].tolist() == state.root.tolist()
