"""Measures of disagreement, on numbers small enough to work out by hand."""

import dataclasses
import math

import numpy as np
import pytest
from tiny import DENSE, HYBRID

from convert.agreement import (
    Tolerance,
    difference,
    divergence,
    first_choices,
    logits_difference,
    shared_choices,
)
from convert.compare import GreedyReport, LayerReport, Report, finite
from ddtree_jax.config import MoeConfig

EXACT = Tolerance.of(DENSE, "float32", "float32")


def test_tolerances_follow_the_dtypes_and_the_architecture():
    """reference_models.md 3.4."""
    assert (EXACT.layer_max, EXACT.logits_max, EXACT.greedy) == (1e-4, 1e-4, True)
    assert Tolerance.of(HYBRID, "float32", "float32").logits_max == 5e-4
    half = Tolerance.of(DENSE, "bfloat16", "float32")
    assert half == Tolerance.of(DENSE, "float32", "bfloat16") == Tolerance.of(DENSE, "bfloat16", "bfloat16")
    assert (half.logits_mean, half.agreement, half.greedy) == (0.05, 0.95, False)
    experts = dataclasses.replace(DENSE, moe=MoeConfig(4, 2, 8, None, True))
    for noisy in (HYBRID, experts):
        assert Tolerance.of(noisy, "bfloat16", "bfloat16").logits_mean == 0.15


def test_difference():
    theirs = np.array([[1.0, -2.0], [0.0, 4.0]], np.float32)
    found = difference(theirs + np.array([[0, 0], [0, 5e-5]]), theirs, EXACT)
    assert found.max == pytest.approx(5e-5) and found.mean == pytest.approx(1.25e-5)
    assert found.used == pytest.approx(0.5) and found.ok
    assert not difference(theirs + 1.1e-4, theirs, EXACT).ok


def test_large_numbers_may_differ_more():
    theirs = np.array([[1200.0]])
    assert difference(theirs + 9.9e-3, theirs, EXACT).ok
    assert not difference(theirs + 1.01e-2, theirs, EXACT).ok


def test_bfloat16_bounds_the_mean_relative_to_the_size():
    half = Tolerance.of(DENSE, "bfloat16", "bfloat16")
    theirs = np.full((4, 10), 0.1)
    one_off = theirs.copy()
    one_off[0, 0] += 0.19  # mean 0.00475, allowed 0.05 * 0.1
    assert difference(one_off, theirs, half).used == pytest.approx(0.95)
    assert not difference(theirs * 1.051, theirs, half).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_within_tolerance(bad):
    theirs = np.ones((2, 3))
    ours = theirs.copy()
    ours[1, 2] = bad
    for tolerance in (EXACT, Tolerance.of(DENSE, "bfloat16", "bfloat16")):
        with np.errstate(invalid="ignore"):
            assert not difference(ours, theirs, tolerance).ok
            assert logits_difference(ours, theirs, tolerance).problems


def test_divergence():
    theirs, ours = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert divergence(theirs, ours) == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3)])
    assert divergence(theirs + 3, theirs) == pytest.approx([0.0], abs=1e-12)


def test_first_choices_take_any_of_a_tie():
    theirs = np.array([[1.0, 2.0, 2.0], [3.0, 0.0, 0.0]])
    assert first_choices(np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]]), theirs) == 1.0
    assert first_choices(np.array([[5.0, 1.0, 2.0], [1.0, 0.0, 0.0]]), theirs) == 0.5


def test_shared_choices():
    theirs = np.array([[6.0, 5, 4, 3, 2, 1, 0]])
    assert shared_choices(theirs, theirs, 5) == 1.0
    assert shared_choices(-theirs, theirs, 5) == pytest.approx(3 / 5)
    assert shared_choices(theirs[:, :2], theirs[:, :2], 5) == 1.0


def test_logits_problems():
    theirs = np.eye(4) * 3
    assert logits_difference(theirs, theirs, EXACT).problems == ()
    (problem,) = logits_difference(theirs + 2e-4, theirs, EXACT).problems
    assert problem == "logits max 0.0002, allowed 0.0001"
    half = Tolerance.of(DENSE, "bfloat16", "bfloat16")
    assert any("first choices agree at 0.0%" in p for p in logits_difference(-theirs, theirs, half).problems)


def make_report(greedy: GreedyReport, layers=(), tolerance=EXACT) -> Report:
    logits = logits_difference(np.eye(4) + 1e-5, np.eye(4), tolerance)
    return Report({}, "float32", 4, None, list(layers), logits, greedy, tolerance)


def test_greedy_tokens_have_to_be_the_same_unless_they_nearly_tie():
    assert make_report(GreedyReport(8, 8, None)).ok
    assert make_report(GreedyReport(8, 3, margin=1e-6)).ok
    assert make_report(GreedyReport(8, 3, margin=1e-2)).problems == ["greedy token 3 differs (PyTorch's margin 0.01)"]
    half = Tolerance.of(DENSE, "bfloat16", "float32")
    assert make_report(GreedyReport(8, 3, margin=1e-2), tolerance=half).ok


def test_the_part_at_fault():
    good, bad = (
        difference(np.ones((1, 1)), np.ones((1, 1)), EXACT),
        difference(np.ones((1, 1)), np.zeros((1, 1)), EXACT),
    )
    layers = [
        LayerReport(0, "full", good, good, good, good),
        LayerReport(1, "full", bad, bad, good, bad),
        LayerReport(2, "full", bad, good, good, good),
    ]
    report = make_report(GreedyReport(0, 0, None), layers)
    assert report.first_layer.index == 1 and [layer.part for layer in layers] == [None, "feed-forward", None]
    assert report.problems == ["layer 1 (full) is the first to leave tolerance, by itself: its feed-forward"]
    downstream = make_report(GreedyReport(0, 0, None), layers[2:])
    assert downstream.problems[0].endswith("; given PyTorch's input it does not")
    assert LayerReport(3, "full", bad, bad, bad, bad).part == "mixer"


def test_json_has_no_infinities():
    assert finite({"a": [math.inf, 1.0], "b": (math.nan, "x", None, True)}) == {
        "a": [None, 1.0],
        "b": [None, "x", None, True],
    }
