"""A picture of one round: what was drafted, what the target chose, what was accepted. For when acceptance is low."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ddtree_jax.decode.loop import prefill, trace_round
from ddtree_jax.errors import InputError
from ddtree_jax.generation import Options, make_request, read_prompts
from ddtree_jax.loading import Model
from ddtree_jax.tree import DraftTree, Walk
from ddtree_jax.tree.draw import draw_tree, host_row


def describe_round(
    model: Model, prompts: list[str] | None = None, prompt_ids: list[list[int]] | None = None, **options: Any
) -> str:
    """The first round after each prompt, drawn as text: every node's token and probability, the accepted path marked.

    Takes the options of `generate`.
    """
    ids = read_prompts(model, prompts, prompt_ids)
    request = make_request(model, ids, Options(**options))
    if not request.config.budget:
        raise InputError("nothing is drafted with these settings; choose a drafter, and a method with a budget above 0")
    state, _ = prefill(model.target, model.drafter, request)
    _, trace = trace_round(model.target, model.drafter, state, request.config)
    rows = [_describe_row(model, host_row(trace.tree, row), host_row(trace.walk, row)) for row in range(len(ids))]
    return "\n\n".join(rows)


def _describe_row(model: Model, tree: DraftTree, walked: Walk) -> str:
    count = int(walked.count)
    text = _token_text(model)
    picture = draw_tree(tree, text, walked.path[:count].tolist())
    chosen = " ".join(json.dumps(text(int(t)), ensure_ascii=False) for t in walked.tokens[:count])
    return (
        f"{picture}\naccepted {count} of {int(tree.valid.sum())} nodes (root included); the target's tokens: {chosen}"
    )


def _token_text(model: Model) -> Callable[[int], str]:
    """Token id -> text; its number where there is no tokenizer."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return str
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
