"""What a retention policy may be made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relume.strategy.foresight.statistics import TokenStatistics
from relume.strategy.profile import Profile
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.refresh.curves import RefreshCurves
from relume.strategy.use import ExpertShape

if TYPE_CHECKING:
    from relume.strategy.retention.belady import Future


@dataclass(frozen=True)
class RetentionContext:
    """What is known before the first forward.

    Attributes:
        shape: of the model.
        num_slots: experts that can be resident at once, over all layers.
        profile: of the model, if there is one.
        future: the whole trace's uses; only a replay has it.
        slots: of each layer; `None` if all layers share them.
        costs: of the machine, for strategies that weigh them, where they are known.
        intervals: of each layer, as a recorded run solved them, for a replay; empty if there are none.
    """

    shape: ExpertShape
    num_slots: int
    profile: Profile | None = None
    future: Future | None = None
    slots: tuple[int, ...] | None = None
    costs: RefreshCosts | None = None
    intervals: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.profile is not None:
            self.profile.check(self.shape)

    @property
    def curves(self) -> RefreshCurves | None:
        """What interval refresh does to the model's residents, if a profile says so."""
        return None if self.profile is None else self.profile.refresh

    @property
    def why_no_refresh_plan(self) -> str:
        """What is missing to solve an interval."""
        if self.curves is None:
            return "there is no profile (--profile)"
        return "layers share their slots" if self.slots is None else "the costs of this machine are not known"

    def statistics(self) -> TokenStatistics:
        """Counts to go on from, as a copy of one's own."""
        if self.profile is None:
            return TokenStatistics(self.shape)
        return TokenStatistics.from_arrays(self.shape, self.profile.statistics.to_arrays())
