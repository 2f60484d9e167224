"""One row of a simulation: a strategy at a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relume.clock.virtual import VirtualClock
from relume.core import Phase, RelumeError
from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.simulate.recorded import recorded_run
from relume.simulate.replay import Replay, replay_together
from relume.strategy.lanes import PREFETCH_SLOTS, Lanes, TimelessLanes
from relume.strategy.layer_budgets import BUDGETS
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.profile import Profile
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.retention.belady import Future
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import Strategy
from relume.strategy.use import ExpertShape, LayerUse
from relume.trace.file import TraceReader
from relume.trace.profile import read_model_profile
from relume.trace.record import ForwardRecord
from relume.trace.views import phase_of


@dataclass(frozen=True)
class SimulationRow:
    """One strategy at one budget. `None` where the trace holds nothing to measure.

    Attributes:
        strategy: as it was asked for; `belady` is the bound.
        expert_memory: as it was asked for, by memory or by slots of each layer; `recorded` is the trace's own.
        slots_per_layer: mean over layers.
        hit_rate: over denoising forwards; `hit_rate_all` over all.
        utilisation: resident and active / resident, over denoising forwards.
        bytes_per_token: of experts that moved; those loaded before the first forward are `preload_bytes`.
        hosted: share of the misses that were computed where they lie.
        evictions: experts that left.
        prefetch_useful, prefetch_wasted: experts that were brought unasked and hit, or not.
        prefetch_stopped: too many were wasted, and prefetching was turned off.
        tpot_ms: milliseconds per token; `None` where no hardware was named.
        decoding_ms: the same without prompts' prefills; `iteration_ms` of an iteration, with its share of commits.
        seconds: of the whole trace, and for how many of them each lane was busy; `stall` is the device's waiting.
        hardware: that was simulated.
        kind: `simulated`.
    """

    strategy: str
    expert_memory: str
    slots_per_layer: float
    shared: bool
    hit_rate: float | None
    hit_rate_all: float | None
    utilisation: float | None
    bytes_per_token: float | None
    preload_bytes: int
    hosted: float | None
    evictions: int
    prefetch_useful: int
    prefetch_wasted: int
    prefetch_stopped: bool
    tpot_ms: float | None = None
    decoding_ms: float | None = None
    iteration_ms: float | None = None
    seconds: dict[str, float] | None = None
    hardware: str | None = None
    kind: str = "simulated"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """One row to be.

    Attributes:
        strategy: as `Strategy.parse` reads it.
        expert_memory: the budget as it was asked for.
        slots: in all, which the strategy shares among layers, or of each layer.
        hardware: that charges time, if any.
    """

    strategy: str
    expert_memory: str
    slots: int | tuple[int, ...]
    hardware: Hardware | None = None


@dataclass(frozen=True)
class Setting:
    """What all jobs of a simulation have in common.

    Attributes:
        path: of the trace.
        shared: one pool for all layers.
        profile: file of the model's profile, if there is one.
        expert_bytes: of one expert.
        work: sizes that take time on a machine, where they are known.
        as_recorded: decisions that depended on time are taken from the trace.
        costs, intervals: of the recorded run: what its strategy weighed, and what it solved.
    """

    path: Path
    shared: bool
    profile: Path | None
    expert_bytes: int
    work: WorkShape | None = None
    as_recorded: bool = False
    costs: RefreshCosts | None = None
    intervals: tuple[int, ...] = ()

    def costs_on(self, hardware: Hardware | None, profile: Profile | None) -> RefreshCosts | None:
        """What strategies may weigh: of the machine that charges time, or as recorded."""
        if self.as_recorded:
            return self.costs
        if hardware is None or self.work is None or profile is None or profile.refresh is None:
            return None
        return RefreshCosts.of(hardware, self.work, profile.refresh)

    def rows(self, jobs: Sequence[Job], future: Future | None, tick: Callable[[int], None]) -> list[SimulationRow]:
        """Replay jobs together; `tick` is told how many of them took another forward."""
        reader = TraceReader(self.path)
        shape = reader.metadata.shape
        profile = None if self.profile is None else read_model_profile(self.profile, shape)
        runs = [Run(self, job, shape, profile, future) for job in jobs]
        if runs:
            replay_together(reader, runs, shape, lambda: tick(len(runs)))
        return [run.row(self.expert_bytes) for run in runs]


class Run:
    """A job on its way through the trace.

    Raises:
        RelumeError: the strategy lacks something, or the budget makes no sense for it.
    """

    def __init__(
        self, setting: Setting, job: Job, shape: ExpertShape, profile: Profile | None, future: Future | None
    ) -> None:
        self._setting, self._job = setting, job
        strategy = Strategy.parse(job.strategy)
        asked = job.slots
        costs = strategy.weigh(setting.costs_on(job.hardware, profile))
        budget = BUDGETS[strategy.budget]
        self._budget = budget(asked, shape, profile, costs) if isinstance(asked, int) else list(asked)
        total = sum(self._budget)
        self._clock: VirtualClock | None = None
        self._prefill_s = 0.0
        lanes: Lanes = TimelessLanes()
        if job.hardware is not None:
            if setting.work is None:
                raise RelumeError("the trace does not say how large its model is: name a shape with --work")
            lanes = self._clock = VirtualClock(job.hardware, setting.work, shape, PREFETCH_SLOTS)
        layer_slots = None if setting.shared else tuple(self._budget)
        intervals = setting.intervals if setting.as_recorded else ()
        context = RetentionContext(shape, total, profile, future, layer_slots, costs, intervals)
        slots: list[int] | int = total if setting.shared else self._budget
        if setting.as_recorded and strategy.retention != "belady":  # the bound decides for itself
            self.replay = recorded_run(strategy, context, slots)
        else:
            self.replay = Replay(Placement(ResidentPool(shape, slots), strategy.make(context), lanes))

    def forward(self, record: ForwardRecord, uses: Sequence[LayerUse]) -> None:
        """Take one forward, of which `uses` are the layers."""
        before = 0.0 if self._clock is None else self._clock.now
        self.replay.forward(record, uses)
        if self._clock is not None and phase_of(record) is Phase.PREFILL:
            self._prefill_s += self._clock.now - before

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of its strategy."""
        return self.replay.placement.retention.notes

    def row(self, expert_bytes: int) -> SimulationRow:
        """What came of it."""
        result, clock = self.replay.result(), self._clock
        misses = int(result.misses.sum())
        timed: dict[str, Any] = {}
        if clock is not None:
            assert self._job.hardware is not None
            decoding_s = clock.now - self._prefill_s
            iterations = int(result.denoising.sum())
            timed = {
                "tpot_ms": 1000 * clock.now / result.num_tokens if result.num_tokens else None,
                "decoding_ms": 1000 * decoding_s / result.num_tokens if result.num_tokens else None,
                "iteration_ms": 1000 * decoding_s / iterations if iterations else None,
                "seconds": {
                    "all": clock.now,
                    "device": clock.device_s,
                    "host": clock.host_s,
                    "link": clock.link_s,
                    "stall": clock.stall_s,
                },
                "hardware": self._job.hardware.name,
            }
        return SimulationRow(
            strategy=self._job.strategy,
            expert_memory=self._job.expert_memory,
            slots_per_layer=sum(self._budget) / len(self._budget),
            shared=self._setting.shared,
            hit_rate=result.hit_rate,
            hit_rate_all=result.hit_rate_all,
            utilisation=result.utilisation,
            bytes_per_token=result.bytes_per_token(expert_bytes),
            preload_bytes=result.preloads * expert_bytes,
            hosted=int(result.hosted.sum()) / misses if misses else None,
            evictions=result.evictions,
            prefetch_useful=result.useful,
            prefetch_wasted=result.wasted,
            prefetch_stopped=result.prefetch_stopped,
            **timed,
        )
