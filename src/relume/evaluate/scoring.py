"""Scores with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_Z = 1.959964  # 95 per cent, two-sided


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
