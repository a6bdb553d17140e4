"""How far two sets of numbers are apart, and how far they may be (reference_models.md 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddtree_jax.config import TargetConfig

LARGEST, RMS = 12.0, 2.5  # of the logits for which the tolerances were measured; larger numbers may differ more


@dataclass(frozen=True)
class Tolerance:
    """Bounds on differences. In float32 the largest counts; in bfloat16 the mean does, because a few positions (where a
    router flips, or a norm divides by little) decide the largest.

    layer_max: of any hidden state or module output. layer_mean: likewise, as a part of its root mean square.
    """

    layer_max: float = np.inf
    layer_mean: float = np.inf
    logits_max: float = np.inf
    logits_p99: float = np.inf
    logits_mean: float = np.inf
    agreement: float = 0.0
    greedy: bool = False

    @classmethod
    def of(cls, config: TargetConfig, *dtypes: str) -> Tolerance:
        """For a model that ran in these dtypes: that of PyTorch, and ours."""
        if set(dtypes) == {"float32"}:
            atol = 5e-4 if config.delta else 1e-4
            return cls(layer_max=atol, logits_max=atol, greedy=True)
        if config.delta or config.moe:
            return cls(layer_mean=0.1, logits_p99=1.5, logits_mean=0.15, agreement=0.90)
        return cls(layer_mean=0.05, logits_p99=0.35, logits_mean=0.05, agreement=0.95)


@dataclass(frozen=True)
class Difference:
    """Of two arrays, absolute. `used`: which part of the tolerance it takes; above 1 (or not a number) is too much."""

    max: float
    mean: float
    used: float

    @property
    def ok(self) -> bool:
        """Whether it is within tolerance."""
        return self.used <= 1


def difference(ours: np.ndarray, theirs: np.ndarray, tolerance: Tolerance) -> Difference:
    """Of a hidden state or module output [T, H]."""
    gap = np.abs(ours.astype(np.float64) - theirs)
    used = (np.max(gap) / _grown(theirs, tolerance.layer_max), np.mean(gap) / (tolerance.layer_mean * _rms(theirs)))
    return Difference(float(np.max(gap)), float(np.mean(gap)), float(np.max(used)))


def _grown(theirs: np.ndarray, bound: float) -> float:
    """A bound on the largest difference, for arrays with larger numbers than those it was measured on."""
    return bound * max(1.0, float(np.max(np.abs(theirs))) / LARGEST)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) or 1.0


@dataclass(frozen=True)
class LogitsDifference:
    """Of logits [T, V]: absolute differences; KL divergence from PyTorch's distribution, nats a position; how often the
    first choice is PyTorch's, and which part of its five first choices is among ours.
    """

    max: float
    p99: float
    mean: float
    kl_mean: float
    kl_max: float
    top1: float
    top5: float
    problems: tuple[str, ...]


def logits_difference(ours: np.ndarray, theirs: np.ndarray, tolerance: Tolerance) -> LogitsDifference:
    """Compare logits [T, V]."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    gap = np.abs(ours - theirs)
    kl = divergence(theirs, ours)
    found = dict(max=float(gap.max()), p99=float(np.quantile(gap, 0.99)), mean=float(gap.mean()))
    agreed = first_choices(ours, theirs)
    wider = max(1.0, _rms(theirs) / RMS)
    bounds = dict(
        max=_grown(theirs, tolerance.logits_max), p99=tolerance.logits_p99 * wider, mean=tolerance.logits_mean * wider
    )
    problems = [f"logits {k} {found[k]:.2g}, allowed {bounds[k]:.2g}" for k in found if not found[k] <= bounds[k]]
    if not agreed >= tolerance.agreement:
        problems.append(f"first choices agree at {agreed:.1%} of positions, {tolerance.agreement:.0%} should")
    return LogitsDifference(
        **found,
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=agreed,
        top5=shared_choices(ours, theirs, 5),
        problems=tuple(problems),
    )


def divergence(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """KL(theirs || ours) of every row of logits, float64 [T]."""
    p, q = log_softmax(theirs), log_softmax(ours)
    return np.sum(np.exp(p) * (p - q), axis=-1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [.., V], float64."""
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def first_choices(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Part of the positions at which our best token is one of theirs: of bfloat16 logits that tie, each is right."""
    chosen = np.take_along_axis(theirs, ours.argmax(-1)[:, None], axis=-1)[:, 0]
    return float(np.mean(chosen == theirs.max(-1)))


def shared_choices(ours: np.ndarray, theirs: np.ndarray, k: int) -> float:
    """Mean part of their k best tokens that are among our k best."""
    k = min(k, ours.shape[-1])
    a, b = (np.argpartition(-x, k - 1, axis=-1)[:, :k] for x in (ours, theirs))
    return float(np.mean([np.isin(row, other).mean() for row, other in zip(b, a, strict=True)]))
