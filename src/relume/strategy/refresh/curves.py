"""Misses and promotions by interval and slots, as traces show them: TIDE's f(tau) and drift, measured."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

#: Intervals that are measured and solved over: 1 to 31 iterations, as TIDE's authors try.
INTERVALS = np.arange(1, 32)
#: Slots that are measured, as shares of a layer's experts; in between it is interpolated.
SHARES = (0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0)
#: Kinds of forwards: a refresh that opens a block, a later one, an iteration without one, and a finished block's
#: commit.
KINDS = ("opening", "refreshing", "frozen", "committing")


@dataclass(frozen=True, eq=False)  # known by identity, so that what was solved for it can be remembered
class RefreshCurves:
    """What interval refresh does to a model's residents: means over a trace, by kind of forward.

    K kinds as in `KINDS`, T intervals as in `INTERVALS`, S numbers of slots.

    Attributes:
        slots: `[S]` int64, ascending, from none to all experts.
        share: `[K, T]`, forwards of the kind / iterations.
        hits: `[K, T, S, layers]`, active experts that are resident.
        brought: `[K, T, S, layers]`, experts that a refresh promotes; it demotes as many.
        missed: `[K, T, S, layers]`, active experts that are neither.
        brought_sd, missed_sd: `[K, T, S, layers]`, standard deviations of them over forwards.
        missed_error: `[T, S]`, standard error of an iteration's misses over all layers, from block to block.
        hit_tokens, missed_tokens: that use a resident expert, and one that is not, mean over all of them.
        tokens, rows, start: of an iteration: tokens, masked positions among them, and where in the canvas it is.
        num_iterations: that were seen.
    """

    slots: np.ndarray
    share: np.ndarray
    hits: np.ndarray
    brought: np.ndarray
    missed: np.ndarray
    brought_sd: np.ndarray
    missed_sd: np.ndarray
    missed_error: np.ndarray
    hit_tokens: float
    missed_tokens: float
    tokens: float
    rows: float
    start: float
    num_iterations: int

    def __post_init__(self) -> None:
        if list(self.slots) != sorted(set(self.slots.tolist())):
            raise ValueError(f"slots are {self.slots.tolist()}: they must rise")
        size = (len(KINDS), len(INTERVALS), len(self.slots), self.num_layers)
        expected: dict[str, tuple[int, ...]] = {"share": size[:2], "missed_error": size[1:3]}
        expected |= dict.fromkeys(("hits", "brought", "missed", "brought_sd", "missed_sd"), size)
        for name, shape in expected.items():
            found = getattr(self, name).shape
            if found != shape:
                raise ValueError(f"{name} has the shape {found}, not {shape}")

    @classmethod
    def names(cls) -> list[str]:
        """Of its fields."""
        return [field.name for field in fields(cls)]

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.hits.shape[-1])

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return int(self.slots[-1])

    @property
    def refreshing(self) -> np.ndarray:
        """`[T]`, share of the iterations that refresh."""
        return np.asarray(self.share[:2].sum(axis=0))

    def at(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """`hits`, `brought`, `missed` and the deviations `[K, T, layers]` for `slots` `[layers]`.

        Between two measured numbers of slots it goes straight.
        """
        right = np.clip(np.searchsorted(self.slots, slots), 1, len(self.slots) - 1)
        low, high = self.slots[right - 1], self.slots[right]
        share = np.clip((slots - low) / (high - low), 0.0, 1.0)
        layers = np.arange(len(slots))
        return {
            name: (1.0 - share) * (values := getattr(self, name))[:, :, right - 1, layers]
            + share * values[:, :, right, layers]
            for name in ("hits", "brought", "missed", "brought_sd", "missed_sd")
        }

    def promoted(self, slots: np.ndarray) -> np.ndarray:
        """`[T, layers]`, experts that a refresh promotes on average."""
        brought = self.at(slots)["brought"][:2]
        return np.asarray((brought * self.share[:2, :, None]).sum(axis=0) / self.refreshing[:, None])

    def scaled(self, ratio: float) -> RefreshCurves:
        """The same with another drift: promotions, and the misses that a refresh would remove, times `ratio`.

        What misses even right after a refresh, because the slots are too few, stays as it is.
        """
        opening, refreshing, frozen, _ = range(len(KINDS))
        active = self.hits + self.brought + self.missed
        brought, missed = self.brought.copy(), self.missed.copy()
        for kind in (opening, refreshing):
            brought[kind] = np.minimum(brought[kind] * ratio, active[kind] - missed[kind])
        least = np.minimum(missed[refreshing], missed[frozen])
        missed[frozen] = np.minimum(least + (missed[frozen] - least) * ratio, active[frozen])
        return replace(self, hits=active - brought - missed, brought=brought, missed=missed)

    @cached_property
    def drift(self) -> tuple[np.ndarray, np.ndarray]:
        """`[S]` each: TIDE's d, fitted to the promotions by eq. 5, and the error of the fit.

        Eq. 5 says that after tau iterations `slots * (1 - (1 - d)^tau)` of a layer's residents are replaced. The
        error is the root mean square of the differences, as a share of the slots, over all intervals, each
        weighted by how often it refreshes.
        """
        candidates = np.linspace(0.0, 1.0, 1001)
        curves = 1.0 - (1.0 - candidates[:, None]) ** INTERVALS  # [candidates, T]
        weights = self.refreshing / self.refreshing.sum()
        fitted = []
        for number in np.maximum(self.slots, 1):
            seen = self.promoted(np.full(self.num_layers, number)).mean(axis=1) / number
            errors = ((curves - seen) ** 2 * weights).sum(axis=1)
            best = int(errors.argmin())
            fitted.append((candidates[best], np.sqrt(errors[best])))
        drifts, rms = np.array(fitted).T
        return drifts, rms
