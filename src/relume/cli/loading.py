"""Loading an engine with a progress bar."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relume.cli.options import options_of
from relume.cli.terminal import byte_progress, note
from relume.config import DTypeName, EngineConfig, ReadMode, require

if TYPE_CHECKING:
    from relume.engine.engine import Engine

_HELP = {
    "dtype": "float32, bfloat16, or auto: the checkpoint's.",
    "device": "cpu or cuda.",
    "prefill_blocks": "Blocks of the prompt in one forward; by default as many as hold 512 tokens.",
    "strategy": "What decides which experts stay: full, lru, foresight, ..., with changes as oled:dispatch=host.",
    "tide_interval": "Iterations between refreshes of the strategy tide; by default solved from a profile.",
    "expert_memory": "Of resident experts: auto, a share as 40%, a size as 8GiB, or experts a layer as 100.",
    "layer_slots": "Resident experts of each MoE layer instead, separated by commas.",
    "shared_pool": "Let all layers share the slots.",
    "profile": "A file of `relume trace profile`, which some strategies need.",
    "memory": "All that relume may take, as 8GiB; by default what this process may use (of RAM, or the GPU).",
    "context": "Positions of each request to plan for; by default 4096, less if memory is short.",
    "reads": "Read experts direct (past the page cache) or buffered; auto: direct unless all are resident.",
    "host_memory": "Experts to hold in RAM besides, as --expert-memory: beside a GPU, to spare the disk.",
    "num_threads": "Threads that compute; by default one a core.",
    "hardware": "Charge the time of rtx4090, a100-40, ... instead: every time is then simulated.",
    "routing": "How tokens choose experts: native, dmoe:p=0.6, top-k:4, ...; by default as the model was trained.",
    "revision": "Branch, tag or commit of a hub id.",
    "offline": "Use only what was downloaded before.",
}

#: Among several routings, the one that the model is made for.
OWN = "own"


@dataclass(frozen=True)
class LoadOptions:
    """Options of every command that loads a model; raises `RelumeError` for values that no engine takes."""

    dtype: DTypeName = "auto"
    device: str = "cpu"
    prefill_blocks: int | None = None
    strategy: str = "auto"
    tide_interval: int | None = None
    expert_memory: str = "auto"
    layer_slots: str | None = None
    shared_pool: bool = False
    profile: str | None = None
    memory: str | None = None
    context: int | None = None
    reads: ReadMode = "auto"
    host_memory: str | None = None
    num_threads: int | None = None
    hardware: str | None = None
    routing: str | None = None
    revision: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        from relume.machine.hardware import load_hardware
        from relume.routing.choice import RoutingChoice
        from relume.strategy.budget import ExpertMemory, parse_size
        from relume.strategy.strategies import Strategy

        if self.tide_interval is not None:
            tide = self.strategy != "auto" and Strategy.parse(self.strategy).retention == "tide"
            require(tide, f"--tide-interval is for --strategy tide, not for {self.strategy}")
            given = "interval" in Strategy.parse(self.strategy).parameters
            require(
                not given, f"--tide-interval and --strategy {self.strategy} both give an interval: leave one out"
            )
            require(self.tide_interval >= 1, f"--tide-interval is {self.tide_interval}: it must be at least 1")
            object.__setattr__(self, "strategy", f"{self.strategy}:interval={self.tide_interval}")
        if self.strategy != "auto":
            Strategy.parse(self.strategy)
        if self.hardware is not None:
            load_hardware(self.hardware)
        for routing in self.routings:
            if routing is not None:
                RoutingChoice.parse(routing)
        self.engine()  # building it checks the values
        ExpertMemory.parse(self.expert_memory)
        if self.host_memory is not None:
            ExpertMemory.parse(self.host_memory)
        if self.memory is not None:
            parse_size(self.memory)

    @property
    def routings(self) -> tuple[str | None, ...]:
        """That were asked for; `None` is the model's own."""
        return (self.routing,)

    def engine(self, max_batch: int = 1) -> EngineConfig:
        """The engine's configuration, for so many requests at a time."""
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        given = {name: value for name, value in dataclasses.asdict(self).items() if name in known}
        return EngineConfig(**given, max_batch=max_batch)


loading_options = options_of(LoadOptions, "loading", _HELP)


@dataclass(frozen=True)
class RoutingsOptions(LoadOptions):
    """The same where `routing` names several, separated by commas; `own` is the model's own."""

    @property
    def routings(self) -> tuple[str | None, ...]:
        """That were asked for, each once; `None` is the model's own."""
        names = [name.strip() for name in (self.routing or OWN).split(",")]
        return tuple(None if name == OWN else name for name in dict.fromkeys(names))

    def one(self, routing: str | None) -> LoadOptions:
        """Options for one of them."""
        # The strategy has taken the interval in already.
        return LoadOptions(**dataclasses.asdict(self) | {"routing": routing, "tide_interval": None})


routings_options = options_of(
    RoutingsOptions,
    "loading",
    _HELP
    | {"routing": "Routings, separated by commas: native, dmoe:p=0.6, ...; own, the default, is the model's."},
)


def open_engine(model: str, options: LoadOptions, max_batch: int = 1) -> Engine:
    """An engine without its weights yet."""
    from relume.engine.engine import Engine

    engine = options.engine(max_batch)
    return Engine.open(model, engine, revision=options.revision, offline=options.offline)


def read_weights(engine: Engine) -> None:
    """Read the weights of an opened engine, with a progress bar; says aloud what is slower than it could be."""
    with byte_progress("loading") as progress:
        engine.read_weights(progress)
    for fallback in engine.fallbacks:
        note(fallback)
