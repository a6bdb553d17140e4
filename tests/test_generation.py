"""`generate` and `stream`: where a text ends, what a result says, and every mistake in the arguments (cases.md D5, E1).

One small pair, two prompts a call: all calls of a method run the same compiled programs.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hf_directory import SMALL_DRAFTER, SMALL_TARGET, VOCAB, byte_tokenizer, random_network

import ddtree_jax
from ddtree_jax import InputError, generate, stream
from ddtree_jax.generation import Options, Piece, Result, per_row
from ddtree_jax.loading import Model
from ddtree_jax.text import Tokenizer

CONTEXT = 60
PROMPTS = [[5, 6, 7, 8], [200, 100]]
BUDGET = 8
MASK = SMALL_DRAFTER.mask_token_id
METHODS = ("ar", "dflash", "ddtree")
# At this temperature the noise decides, for the coupled draft as for the target: paths of every depth are accepted.
SAMPLED = dict(temperature=5.0, couple=True)


@cache
def model() -> Model:
    """The small pair, a context of 60 tokens, nothing that stops it."""
    target = random_network(dataclasses.replace(SMALL_TARGET, max_positions=CONTEXT), 0)
    return Model(target, random_network(SMALL_DRAFTER, 1), None, ())


def run(**options: Any) -> list[Result]:
    """Both prompts, or others, to 24 tokens unless told otherwise."""
    options = dict(prompt_ids=PROMPTS, tree_budget=BUDGET, max_new_tokens=24) | options
    return generate(options.pop("model", model()), **options)


def completions(results: list[Result]) -> list[list[int]]:
    return [result.output_ids[result.prompt_tokens :] for result in results]


@cache
def plain(method: str = "ar") -> list[list[int]]:
    """The greedy tokens of both prompts."""
    return completions(run(method=method))


def check_figures(result: Result, prompt: list[int]) -> None:
    """The numbers of a result agree with each other."""
    assert result.prompt_tokens == len(prompt)
    assert result.output_ids[: len(prompt)] == prompt
    assert result.completion_tokens == len(result.output_ids) - len(prompt)
    lengths = result.acceptance_lengths
    assert len(lengths) == result.rounds
    assert all(1 <= n <= SMALL_DRAFTER.block_size for n in lengths)
    # The first token comes from the prompt; the last round may reach past the end.
    assert sum(lengths[:-1]) < result.completion_tokens - 1 <= sum(lengths) or not lengths
    assert result.mean_acceptance_length == pytest.approx(sum(lengths) / len(lengths) if lengths else 0.0)
    assert result.acceptance_by_position == [
        pytest.approx(sum(n > d for n in lengths) / len(lengths)) for d in range(1, max(lengths, default=1))
    ]
    assert result.prefill_seconds > 0 and result.decode_seconds >= 0 and result.compile_seconds >= 0
    if result.decode_seconds:
        assert result.tokens_per_second == pytest.approx((result.completion_tokens - 1) / result.decode_seconds)


# ---- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_greedy_methods_agree(method):
    assert plain(method) == plain("ar")
    assert [len(row) for row in plain(method)] == [24, 24]


def test_sampled_methods_agree():
    """Also with the same seed in another row, and with other budgets (D5)."""
    expected = completions(run(method="ar", temperature=5.0, seed=[3, 4]))
    results = run(**SAMPLED, seed=[3, 4])
    assert completions(results) == expected
    assert completions(run(**SAMPLED, seed=[3, 4], tree_budget=[BUDGET, 0])) == expected
    assert completions(run(**SAMPLED, seed=[4, 3], prompt_ids=PROMPTS[::-1]))[::-1] == expected
    assert expected != completions(run(method="ar", temperature=5.0, seed=[3, 5]))
    assert expected[0] == completions(run(method="ar", temperature=5.0, seed=[3, 5]))[0]
    assert max(results[0].acceptance_lengths + results[1].acceptance_lengths) == SMALL_DRAFTER.block_size


def test_seeds_use_all_their_bits():
    outputs = [completions(run(method="ar", temperature=5.0, seed=[s, 2**32 - 1])) for s in (0, 2**31)]
    assert outputs[0][0] != outputs[1][0]
    assert outputs[0][1] == outputs[1][1]
    assert outputs[0][1] not in (outputs[0][0], outputs[1][0])


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_figures_of_a_tree():
    results = run(**SAMPLED, tree_budget=[BUDGET, 3])
    for result, prompt, budget in zip(results, PROMPTS, (BUDGET, 3), strict=True):
        check_figures(result, prompt)
        assert result.mean_tree_nodes == budget + 1
        assert result.mean_acceptance_length > 1.2
        assert result.finish_reason == "length" and result.text is None


def test_figures_of_plain_decoding():
    for result, prompt in zip(run(method="ar"), PROMPTS, strict=True):
        check_figures(result, prompt)
        assert result.rounds == 23 and result.acceptance_lengths == [1] * 23
        assert result.mean_acceptance_length == result.mean_tree_nodes == 1.0
        assert result.acceptance_by_position == []


def test_figures_of_one_token():
    """No round at all."""
    for result, prompt in zip(run(max_new_tokens=1), PROMPTS, strict=True):
        check_figures(result, prompt)
        assert (result.rounds, result.acceptance_lengths, result.completion_tokens) == (0, [], 1)
        assert result.mean_acceptance_length == result.mean_tree_nodes == result.tokens_per_second == 0.0


def test_json_has_every_field():
    result = run(**SAMPLED)[0]
    record = result.to_json()
    assert set(record) == {field.name for field in dataclasses.fields(Result)}
    assert record["output_ids"] == result.output_ids
    assert record["mean_acceptance_length"] == round(result.mean_acceptance_length, 6)


def test_a_budget_of_zero_is_plain_decoding():
    results = run(tree_budget=0)
    assert completions(results) == plain()
    assert {n for result in results for n in result.acceptance_lengths} == {1}


def test_rows_have_their_own_budgets():
    wide, none = run(**SAMPLED, tree_budget=[BUDGET, 0])
    assert set(none.acceptance_lengths) == {1} and none.mean_tree_nodes == 1.0
    assert max(wide.acceptance_lengths) > 1 and wide.mean_tree_nodes == BUDGET + 1


def test_progress_is_told():
    told = []
    results = run(max_new_tokens=40, on_progress=lambda done, most: told.append((done, most)))
    assert {most for _, most in told} == {80}
    done = [n for n, _ in told]
    assert done == sorted(done) and done[-1] == sum(r.completion_tokens for r in results) == 80


# ---- where a text ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_limit_is_exact(method):
    for limit in range(1, 13):
        results = run(method=method, max_new_tokens=limit)
        assert completions(results) == [row[:limit] for row in plain()]
        for result, prompt in zip(results, PROMPTS, strict=True):
            check_figures(result, prompt)
            assert result.finish_reason == "length"


def test_every_limit_is_exact_inside_an_accepted_path():
    whole = completions(run(**SAMPLED))
    for limit in range(1, 13):
        results = run(**SAMPLED, max_new_tokens=limit)
        assert completions(results) == [row[:limit] for row in whole]
        for result, prompt in zip(results, PROMPTS, strict=True):
            check_figures(result, prompt)


def test_near_the_limit_a_shorter_block_changes_nothing():
    whole = completions(run(**SAMPLED))
    for limit in (2, 5, 24):
        assert completions(run(**SAMPLED, cap_block=True, max_new_tokens=limit)) == [row[:limit] for row in whole]


def test_the_context_is_a_limit():
    """Each row ends where its own context does."""
    prompts = [list(range(50)), list(range(100, 159))]
    results = run(prompt_ids=prompts)
    assert [len(result.output_ids) for result in results] == [CONTEXT, CONTEXT]
    assert [result.completion_tokens for result in results] == [10, 1]
    assert {result.finish_reason for result in results} == {"length"}
    with pytest.raises(InputError, match="prompt 1 has 60 tokens; the model's context is 60"):
        run(prompt_ids=[[1], [1] * CONTEXT])


def accepted_at_depth_two() -> tuple[int, int, Result]:
    """(seed, place, result) of a first row in which the token at `place` was accepted at depth 2, more of the path came
    after it, and no earlier token is the same.
    """
    for seed in range(40):
        result = run(**SAMPLED, seed=seed)[0]
        output = completions([result])[0]
        place = 0  # of the root of the round
        for length in result.acceptance_lengths[:-1]:
            if length >= 4 and output[place + 2] not in output[: place + 2]:
                return seed, place + 2, result
            place += length
    raise AssertionError("no such path in any run")


def test_a_stop_inside_an_accepted_path_ends_the_text():
    """E1. The walk went on to depth 3; the text does not, and all counts are those of the text."""
    seed, place, whole = accepted_at_depth_two()
    output = completions([whole])[0]
    result, other = run(**SAMPLED, seed=seed, stop_ids=[output[place]])
    assert completions([result])[0] == output[: place + 1]
    assert result.finish_reason == "stop"
    assert result.completion_tokens == place + 1
    check_figures(result, PROMPTS[0])
    assert result.acceptance_lengths == whole.acceptance_lengths[: result.rounds]
    assert sum(result.acceptance_lengths) > place
    assert other.completion_tokens == 24 or other.finish_reason == "stop"
    options = dict(tree_budget=BUDGET, max_new_tokens=24, stop_ids=[output[place]])
    pieces = [p for p in stream(model(), prompt_ids=PROMPTS, **SAMPLED, **options, seed=seed) if p.index == 0]
    assert sum((p.token_ids for p in pieces), []) == output[: place + 1]


def test_a_stop_within_the_limit_wins():
    """Also as the very last token that the limit allows; just behind the limit it is not seen (F2)."""
    seed, place, whole = accepted_at_depth_two()
    output = completions([whole])[0]
    for limit, reason in ((place, "length"), (place + 1, "stop"), (place + 2, "stop"), (24, "stop")):
        result = run(**SAMPLED, seed=seed, stop_ids=[output[place]], max_new_tokens=limit)[0]
        assert completions([result])[0] == output[: min(limit, place + 1)]
        assert result.finish_reason == reason


def test_a_stop_as_the_first_token():
    first = plain()[0][0]
    result = run(stop_ids=[first])[0]
    assert completions([result]) == [[first]]
    assert (result.finish_reason, result.rounds) == ("stop", 0)


def test_stop_ids_default_to_those_of_the_checkpoint():
    stop = plain()[0][3]
    stopping = dataclasses.replace(model(), stop_ids=(stop, 1))
    end = plain()[0].index(stop) + 1
    result = run(model=stopping)[0]
    assert completions([result])[0] == plain()[0][:end]
    assert result.finish_reason == "stop"
    assert completions(run(model=stopping, stop_ids=[])) == plain()  # [] never stops
    assert completions(run(model=stopping, stop_ids=[VOCAB + 5])) == plain()


def test_the_mask_token_is_a_token_like_any_other():
    """In a prompt and in an output: nothing filters it away."""
    prompts = [[MASK, 5, MASK], [7, MASK]]
    for seed in range(60):
        sampled = dict(prompt_ids=prompts, seed=seed, max_new_tokens=50)
        results = run(method="ar", temperature=5.0, **sampled)
        if MASK in sum(completions(results), []):
            break
    assert [result.output_ids[: len(p)] for result, p in zip(results, prompts, strict=True)] == prompts
    assert MASK in sum(completions(results), [])
    speculative = run(**SAMPLED, **sampled)
    assert [r.output_ids for r in speculative] == [r.output_ids for r in results]
    assert [r.completion_tokens for r in speculative] == [50, 50]


# ---- text and streams ------------------------------------------------------------------------------------------------


@cache
def with_text() -> Model:
    """The same pair with a byte tokenizer, so that outputs are any bytes: halves of characters, special tokens."""
    return dataclasses.replace(model(), tokenizer=Tokenizer(byte_tokenizer()), stop_ids=(0, 2))


@pytest.mark.parametrize("options", [dict(), SAMPLED | dict(seed=[7, 8]), dict(method="ar", max_new_tokens=1)])
def test_pieces_together_are_the_result(options):
    """Ids and text, prompt by prompt; whole characters only, so text may lag behind its ids."""
    options = dict(tree_budget=BUDGET, max_new_tokens=50) | options
    results = generate(with_text(), ["né", "🎉"], **options)
    pieces = list(stream(with_text(), ["né", "🎉"], **options))
    assert {piece.index for piece in pieces} == {0, 1}
    assert all(piece.token_ids or piece.text for piece in pieces)
    for row, result in enumerate(results):
        assert result.text is not None
        assert "".join(p.text for p in pieces if p.index == row) == result.text
        assert sum((p.token_ids for p in pieces if p.index == row), []) == completions([result])[0]
        assert result.text == with_text().tokenizer.decode(completions([result])[0])
    if options["max_new_tokens"] > 20:
        assert len(pieces) > 4


def test_a_stream_without_a_tokenizer_has_ids_alone():
    pieces = list(stream(model(), prompt_ids=PROMPTS, tree_budget=BUDGET, max_new_tokens=24))
    assert pieces[0] == Piece(0, "", [plain()[0][0]])  # the first tokens come before any round
    assert pieces[1] == Piece(1, "", [plain()[1][0]])
    for row in range(2):
        assert sum((p.token_ids for p in pieces if p.index == row), []) == plain()[row]
    assert {p.text for p in pieces} == {""}


def test_texts_are_encoded():
    result = generate(with_text(), ["né", "x"], tree_budget=BUDGET, max_new_tokens=24)[0]
    ids = with_text().tokenizer.encode("né")
    assert result.prompt_tokens == len(ids) == 3
    assert result.output_ids[:3] == ids


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method="tree"), "method 'tree' is unknown; use one of ar, dflash, ddtree"),
        (dict(tree="chain"), "tree 'chain' is unknown; use one of best-first, spine"),
        (dict(tree_budget=-1), "tree budget should be between 0 and 4096"),
        (dict(tree_budget=4097), "tree budget should be between 0 and 4096"),
        (dict(tree_budget=[4, -1]), "tree budget should be between 0 and 4096"),
        (dict(tree_budget=[4]), "tree_budget has 1 entries for 2 prompts"),
        (dict(max_new_tokens=0), "max_new_tokens should be at least 1"),
        (dict(temperature=math.nan), "temperature should be"),
        (dict(temperature=math.inf), "temperature should be"),
        (dict(temperature=-0.1), "temperature should be"),
        (dict(top_k=-1), "top_k should be 0"),
        (dict(top_p=0.0), "top_p should be above 0"),
        (dict(top_p=1.1), "top_p should be above 0"),
        (dict(top_p=math.nan), "top_p should be above 0"),
        (dict(min_p=-0.1), "min_p should be between 0 and 1"),
        (dict(min_p=1.1), "min_p should be between 0 and 1"),
        (dict(min_p=math.nan), "min_p should be between 0 and 1"),
        (dict(seed=-1), "seed should be between 0 and"),
        (dict(seed=2**32), "seed should be between 0 and"),
        (dict(seed=[1, 2, 3]), "seed has 3 entries for 2 prompts"),
        (dict(stop_ids=[-1]), "stop_ids should be token ids"),
        (dict(prompt_ids=[[], [1]]), "prompt 0 is empty; give at least one token"),
        (
            dict(prompt_ids=[[1], [5, VOCAB, -1]]),
            rf"prompt 1 has ids outside the vocabulary of {VOCAB}: \[{VOCAB}, -1\]",
        ),
        (dict(prompt_ids=[]), "there is no prompt"),
        (dict(prompt_ids=None), "give either prompts or prompt_ids"),
        (dict(prompts=["x", "y"]), "give either prompts or prompt_ids"),
        (dict(prompts="xy", prompt_ids=None), "prompts should be a list of strings"),
        (dict(prompts=["x", "y"], prompt_ids=None), "no tokenizer.json; give prompt_ids"),
    ],
)
def test_mistakes_are_refused_in_one_line(options, message):
    """Before anything is run, by `stream` too and at its call."""
    for function in (generate, stream):
        with pytest.raises(InputError, match=message) as error:
            function(model(), **(dict(prompt_ids=PROMPTS) | options))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_drafting_needs_a_drafter(method):
    alone = dataclasses.replace(model(), drafter=None)
    with pytest.raises(InputError, match=f"method '{method}' needs a drafter"):
        generate(alone, prompt_ids=PROMPTS, method=method)
    assert completions(run(model=alone, method="ar")) == plain()


def test_an_empty_text_is_an_empty_prompt():
    with pytest.raises(InputError, match="prompt 1 is empty"):
        generate(with_text(), ["x", ""])


def test_one_value_or_one_a_row():
    assert per_row(3, 2, "x") == [3, 3]
    assert per_row([3, 4], 2, "x") == [3, 4]
    assert per_row(np.array([3, 4]), 2, "x") == [3, 4]


def test_the_defaults_are_fine():
    Options().check(1)
    Options(tree_budget=4096, top_p=1.0, min_p=1.0, temperature=0.0, seed=[0, 2**32 - 1], stop_ids=[]).check(2)


def test_the_public_names_are_these():
    assert ddtree_jax.generate is generate and ddtree_jax.stream is stream
    assert ddtree_jax.Result is Result and ddtree_jax.Piece is Piece and ddtree_jax.Model is Model
