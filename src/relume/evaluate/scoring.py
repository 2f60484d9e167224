"""Scores with their uncertainty, alone and against another's on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_Z = 1.959964  # 95 per cent, two-sided
#: Resamples of a bootstrap, and the quantiles between which 95 per cent of them lie.
NUM_RESAMPLES = 10_000
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Score:
    """How many of how many answers were exact."""

    num_right: int
    num_prompts: int

    @property
    def exact_match(self) -> float:
        """Share of exact answers, 0..1."""
        return self.num_right / max(1, self.num_prompts)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 per cent interval of the share (E. B. Wilson, 1927)."""
        n, p = max(1, self.num_prompts), self.exact_match
        centre = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __add__(self, other: Score) -> Score:
        """Both samples together."""
        return Score(self.num_right + other.num_right, self.num_prompts + other.num_prompts)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "exact_match": self.exact_match,
            "interval_95": list(self.interval),
            "num_right": self.num_right,
            "num_prompts": self.num_prompts,
        }


@dataclass(frozen=True)
class Comparison:
    """Exact match against a base's over the same prompts. Intervals are 95 per cent, from a paired bootstrap.

    Attributes:
        points, points_interval: exact match less the base's, in percentage points.
        relative, relative_interval: exact match / the base's; `None` if the base has no right answer. Resamples
            in which it has none are left out.
    """

    points: float
    points_interval: tuple[float, float]
    relative: float | None
    relative_interval: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def bootstrap_means(values: np.ndarray, rng: np.random.Generator, resamples: int = NUM_RESAMPLES) -> np.ndarray:
    """Means `[resamples, k]` of rows drawn with replacement from `values` `[n, k]`, whole rows each time.

    Equal rows are drawn together: how often each kind occurs in n draws is multinomial, and there are few kinds.
    """
    kinds, counts = np.unique(values, axis=0, return_counts=True)
    drawn = rng.multinomial(len(values), counts / len(values), size=resamples)
    means: np.ndarray = drawn @ kinds / len(values)
    return means


def interval_of(resampled: np.ndarray) -> tuple[float, float]:
    """The percentile interval of resampled figures."""
    low, high = np.quantile(resampled, _QUANTILES)
    return float(low), float(high)


def compare(right: Sequence[float], base: Sequence[float], rng: np.random.Generator) -> Comparison:
    """Compare answers with a base's.

    Args:
        right: of each prompt, whether it was answered exactly; a share if answers of several are mixed.
        base: the base's, of the same prompts in the same order.
        rng: of the resamples.

    Raises:
        ValueError: they are of different lengths, or empty.
    """
    if len(right) != len(base) or not len(right):
        raise ValueError(f"{len(right)} answers cannot be paired with {len(base)}: answer the same prompts")
    pairs = np.column_stack((right, base)).astype(np.float64)
    total, base_total = pairs.sum(axis=0).tolist()
    means, base_means = bootstrap_means(pairs, rng).T
    points = interval_of(100.0 * (means - base_means))
    relative = relative_interval = None
    if base_total:
        some = base_means > 0.0
        relative, relative_interval = total / base_total, interval_of(means[some] / base_means[some])
    return Comparison(100.0 * (total - base_total) / len(pairs), points, relative, relative_interval)
