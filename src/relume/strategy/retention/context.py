"""What a retention policy may be made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relume.strategy.foresight.statistics import TokenStatistics
from relume.strategy.profile import Profile
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
    """

    shape: ExpertShape
    num_slots: int
    profile: Profile | None = None
    future: Future | None = None

    def __post_init__(self) -> None:
        if self.profile is not None:
            self.profile.check(self.shape)

    def statistics(self) -> TokenStatistics:
        """Counts to go on from, as a copy of one's own."""
        if self.profile is None:
            return TokenStatistics(self.shape)
        return TokenStatistics.from_arrays(self.shape, self.profile.statistics.to_arrays())
