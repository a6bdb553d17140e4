"""`generate()` and `stream()`: prompts in, tokens and figures out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.decode.loop import Report, Request, decode, prefill
from ddtree_jax.decode.sampling import Sampling
from ddtree_jax.decode.state import RoundConfig
from ddtree_jax.decode.stats import Stats, Stopwatch, Timings, as_json
from ddtree_jax.errors import InputError
from ddtree_jax.loading import Model
from ddtree_jax.models.network import Network
from ddtree_jax.text import IncrementalDecoder

METHODS = ("ar", "dflash", "ddtree")
TREES = ("best-first", "spine")
ROUNDS_PER_DISPATCH = 32
STREAM_ROUNDS = 4

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How to generate; see `generate` for the meaning of each."""

    method: str = "ddtree"
    tree_budget: int | Sequence[int] = 16
    tree: str = "best-first"
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] = 0
    couple: bool = False
    cap_block: bool = False
    stop_ids: Sequence[int] | None = None

    def check(self, rows: int) -> None:
        """Raise InputError for the first setting that cannot be."""
        budgets = per_row(self.tree_budget, rows, "tree_budget")
        checks = (
            (self.method in METHODS, f"method {self.method!r} is unknown; use one of {', '.join(METHODS)}"),
            (self.tree in TREES, f"tree {self.tree!r} is unknown; use one of {', '.join(TREES)}"),
            (all(0 <= b <= 4096 for b in budgets), "tree budget should be between 0 and 4096 nodes"),
            (self.max_new_tokens >= 1, "max_new_tokens should be at least 1"),
            (
                self.temperature == 0 or 1e-6 <= self.temperature <= 1e6,
                "temperature should be 0 (greedy) or between 1e-6 and 1e6",
            ),
            (0 <= self.top_k < 2**31, "top_k should be 0 (off) or more, and below 2**31"),
            (0 < self.top_p <= 1, "top_p should be above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p should be between 0 and 1"),
            (self.stop_ids is None or all(0 <= i < 2**31 for i in self.stop_ids), "stop_ids should be token ids"),
            (all(0 <= s < 2**32 for s in per_row(self.seed, rows, "seed")), "seed should be between 0 and 2**32 - 1"),
        )
        problem = next((message for ok, message in checks if not ok), None)
        if problem:
            raise InputError(problem)


@dataclass(frozen=True)
class Result:
    """One prompt's outcome. The fields are those of `--json`.

    output_ids: prompt and output; a stop token is included. text: the output alone, special tokens left out (None
      without a tokenizer).
    finish_reason: "stop" or "length". acceptance_lengths: see `Stats`. Times are those of the whole batch.
    """

    output_ids: list[int]
    text: str | None
    finish_reason: str
    acceptance_lengths: list[int]
    rounds: int
    prompt_tokens: int
    completion_tokens: int
    mean_acceptance_length: float
    acceptance_by_position: list[float]
    mean_tree_nodes: float
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return as_json(self)


@dataclass(frozen=True)
class Piece:
    """One step of a stream: new text (whole characters only) and the ids behind it, of prompt number `index`."""

    index: int
    text: str
    token_ids: list[int]


def generate(
    model: Model,
    prompts: Sequence[str] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    method: str = "ddtree",
    tree_budget: int | Sequence[int] = 16,
    tree: str = "best-first",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] = 0,
    couple: bool = False,
    cap_block: bool = False,
    stop_ids: Sequence[int] | None = None,
    on_progress: OnProgress | None = None,
) -> list[Result]:
    """Continue every prompt, all in one batch; the method never changes the text, only the speed.

    Args:
      prompts, prompt_ids: strings, or token ids; exactly one of the two.
      method: "ar" one token a pass; "dflash" the drafter's best chain; "ddtree" a tree of `tree_budget` nodes.
      tree_budget: drafted nodes verified a round (0 is plain decoding); a list gives each prompt its own.
      tree: "best-first", or "spine": the best chain first and the rest best-first.
      max_new_tokens: honoured exactly; also ends where the model's context ends.
      temperature: 0 is greedy. top_k (0 off), top_p (1 off), min_p (0 off) filter in this order after temperature.
      seed: of the position-keyed noise; a list gives each prompt its own. One seed, one text: alone, in a batch, with
        any method.
      couple: when sampling, build trees from noise-coupled scores (accepts more, same text).
      cap_block: draft shorter blocks near the limit.
      stop_ids: ids that end the text; default those of the checkpoint. [] never stops.
      on_progress: called with (tokens so far, tokens at most) after every dispatch.

    Returns one Result a prompt. Raises InputError for a mistake in the arguments.
    """
    options = Options(
        method, tree_budget, tree, max_new_tokens, temperature, top_k, top_p, min_p, seed, couple, cap_block, stop_ids
    )
    ids = read_prompts(model, prompts, prompt_ids)
    request = make_request(model, ids, options)
    watch = Stopwatch()
    state, report = prefill(model.target, _drafter(model, request), request)
    jax.block_until_ready(report)
    prefill_seconds, compile_seconds = watch.seconds, watch.compile_seconds
    watch.restart()
    for report in decode(model.target, _drafter(model, request), state, request.config, ROUNDS_PER_DISPATCH):
        if on_progress:
            on_progress(int(np.sum(report.produced)), sum(request.limits))
    timings = Timings(prefill_seconds, watch.seconds, compile_seconds + watch.compile_seconds)
    return [make_result(model, request, report, row, timings) for row in range(len(ids))]


def stream(
    model: Model,
    prompts: Sequence[str] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Iterator[Piece]:
    """Like `generate`, but yields pieces as they come (whole characters only). Takes the options of `generate`."""
    ids = read_prompts(model, prompts, prompt_ids)
    request = make_request(model, ids, Options(**options))
    return _pieces(model, request)


def _pieces(model: Model, request: Request) -> Iterator[Piece]:
    drafter = _drafter(model, request)
    state, report = prefill(model.target, drafter, request)
    sent = [0] * len(request.prompts)
    decoders = [IncrementalDecoder(model.tokenizer) if model.tokenizer else None for _ in sent]
    yield from _new_pieces(report, sent, decoders)
    for report in decode(model.target, drafter, state, request.config, STREAM_ROUNDS):
        yield from _new_pieces(report, sent, decoders)
    for row, decoder in enumerate(decoders):
        tail = decoder.finish() if decoder else ""
        if tail:
            yield Piece(row, tail, [])


def _new_pieces(report: Report, sent: list[int], decoders: list[IncrementalDecoder | None]) -> Iterator[Piece]:
    """What a report has beyond what was sent; `sent` is brought up to date."""
    tokens, produced = np.asarray(report.tokens), np.asarray(report.produced)
    for row, decoder in enumerate(decoders):
        new = tokens[row, sent[row] : produced[row]].tolist()
        sent[row] = int(produced[row])
        if new:
            yield Piece(row, decoder.push(new) if decoder else "", new)


def read_prompts(
    model: Model, prompts: Sequence[str] | None, prompt_ids: Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """Token ids of every prompt, checked against the model."""
    if prompts is not None and prompt_ids is None:
        if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
            raise InputError("prompts should be a list of strings")
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json; give prompt_ids")
        ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    elif prompts is None and prompt_ids is not None:
        ids = [_whole_numbers(number, row) for number, row in enumerate(prompt_ids)]
    else:
        raise InputError("give either prompts or prompt_ids")
    if not ids:
        raise InputError("there is no prompt")
    for number, row in enumerate(ids):
        _check_prompt(model, number, row)
    return ids


def _whole_numbers(number: int, row: Sequence[SupportsIndex]) -> list[int]:
    """Token ids as Python integers, from any integer type."""
    try:
        return [operator.index(i) for i in row]
    except TypeError:
        raise InputError(f"prompt {number} should be a list of token ids, which are whole numbers") from None


def _check_prompt(model: Model, number: int, ids: list[int]) -> None:
    config = model.target.config
    if not ids:
        raise InputError(f"prompt {number} is empty; give at least one token")
    outside = [i for i in ids if not 0 <= i < config.vocab_size]
    if outside:
        raise InputError(f"prompt {number} has ids outside the vocabulary of {config.vocab_size}: {outside[:5]}")
    if len(ids) >= config.max_positions:
        raise InputError(f"prompt {number} has {len(ids)} tokens; the model's context is {config.max_positions}")


def make_request(model: Model, ids: list[list[int]], options: Options) -> Request:
    """Check the options against the model and turn them into a Request."""
    options.check(len(ids))
    config, budgets = round_config(model, options, len(ids))
    room = model.target.config.max_positions
    return Request(
        prompts=ids,
        limits=[min(options.max_new_tokens, room - len(row)) for row in ids],
        row_budgets=budgets,
        stop_ids=model.stop_ids if options.stop_ids is None else tuple(options.stop_ids),
        sampling=make_sampling(options, len(ids)),
        config=config,
    )


def round_config(model: Model, options: Options, rows: int) -> tuple[RoundConfig, list[int]]:
    """The three methods as one: a budget, a tree shape and a horizon. Also each row's own budget."""
    budgets = per_row(options.tree_budget, rows, "tree_budget")
    plain = RoundConfig(0, "chain", 0), [0] * rows
    if options.method == "ar":
        return plain
    if model.drafter is None:
        raise InputError(f"method {options.method!r} needs a drafter; load one, or use method 'ar'")
    if options.method == "ddtree" and max(budgets) == 0:
        return plain
    horizon = model.drafter.config.horizon
    if options.method == "dflash":
        return RoundConfig(horizon, "chain", horizon, options.couple, options.cap_block), [horizon] * rows
    return RoundConfig(max(budgets), options.tree, horizon, options.couple, options.cap_block), budgets


def make_sampling(options: Options, rows: int) -> Sampling:
    """Per-row sampling settings on the device."""
    keys = jnp.stack([jax.random.key(seed) for seed in per_row(options.seed, rows, "seed")])
    return Sampling(
        key=keys,
        temperature=jnp.full(rows, options.temperature, jnp.float32),
        top_k=jnp.full(rows, options.top_k, jnp.int32),
        top_p=jnp.full(rows, options.top_p, jnp.float32),
        min_p=jnp.full(rows, options.min_p, jnp.float32),
        greedy=options.temperature == 0,
        filtered=options.top_k > 0 or options.top_p < 1 or options.min_p > 0,
    )


def per_row(value: int | Sequence[int] | np.ndarray, rows: int, name: str) -> list[int]:
    """One value a row, from one for all or from a list."""
    values = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * rows
    if len(values) != rows:
        raise InputError(f"{name} has {len(values)} entries for {rows} prompts")
    try:
        return [operator.index(v) for v in values]
    except TypeError:
        raise InputError(f"{name} should be a whole number, or a list with one for each prompt") from None


def _drafter(model: Model, request: Request) -> Network | None:
    """The drafter, unless no round drafts (then its context is not kept either)."""
    return model.drafter if request.config.budget else None


def make_result(model: Model, request: Request, report: Report, row: int, timings: Timings) -> Result:
    """What a row's report says, with its text."""
    produced, rounds = int(report.produced[row]), int(report.rounds[row])
    output = np.asarray(report.tokens)[row, :produced].tolist()
    stats = Stats(np.asarray(report.accepted)[row, :rounds].tolist(), rounds, int(report.nodes[row]))
    seconds = timings.decode_seconds
    return Result(
        output_ids=request.prompts[row] + output,
        text=model.tokenizer.decode(output) if model.tokenizer else None,
        finish_reason="stop" if output[-1] in request.stop_ids else "length",
        acceptance_lengths=stats.acceptance_lengths,
        rounds=rounds,
        prompt_tokens=len(request.prompts[row]),
        completion_tokens=produced,
        mean_acceptance_length=stats.mean_acceptance_length,
        acceptance_by_position=stats.acceptance_by_position(),
        mean_tree_nodes=stats.mean_tree_nodes,
        prefill_seconds=timings.prefill_seconds,
        decode_seconds=seconds,
        compile_seconds=timings.compile_seconds,
        tokens_per_second=(produced - 1) / seconds if seconds > 0 else 0.0,
    )
