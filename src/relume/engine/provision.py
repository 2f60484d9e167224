"""From an engine's configuration to a memory plan and to how the experts are kept."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from relume.checkpoint.pack import Pack
from relume.clock.virtual import VirtualClock
from relume.config import PREFILL_TOKENS, EngineConfig, ModelConfig, require
from relume.core import RelumeError
from relume.engine.footprint import DEFAULT_CONTEXT, READER_THREADS, Workload
from relume.engine.memory_plan import MemoryPlan
from relume.engine.planner import TRANSIT_SLOTS, Planner
from relume.engine.predict import active_experts
from relume.experts.build import ExpertSettings, expert_shape
from relume.experts.packed import slot_format
from relume.machine.hardware import Hardware, load_hardware, measured_hardware
from relume.machine.limits import find_gpus, find_memory
from relume.machine.profile import load_profile
from relume.machine.threads import effective_cores
from relume.machine.work import WorkShape
from relume.model.sizes import ModelSizes
from relume.strategy.budget import ExpertMemory, explicit, parse_size, shared_pool_warning
from relume.strategy.lanes import PREFETCH_SLOTS
from relume.strategy.layer_budgets import BUDGETS
from relume.strategy.profile import Profile
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import Strategy
from relume.strategy.use import ExpertShape
from relume.trace.profile import PROFILE_NAME, cached_profile, read_model_profile

#: What `auto` takes when not all experts fit.
DEFAULT_STRATEGY = "foresight"
#: K/V of the default context take at most this share of the memory.
LARGEST_KV_SHARE = 0.125
LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class MemoryFound:
    """What a plan has to fit in.

    Attributes:
        limit_bytes: of the memory beside the compute.
        host_bytes: of RAM beside a GPU, else `None`.
        source: where the limit is from.
        excessive: more was asked for than this process may ever use.
    """

    limit_bytes: int
    host_bytes: int | None
    source: str
    excessive: bool = False


@dataclass(frozen=True)
class Provision:
    """What an engine gets.

    Attributes:
        memory: what there is.
        planner: of this model and this configuration.
        plan: of its memory.
        strategy: as `Strategy.parse` reads it.
        settings: of its experts.
        work: sizes that take time.
        hardware: that is simulated, if any.
        profile: path of the model's profile; empty if there is none.
        habits: what is in it.
        costs: of the machine that runs or is simulated, where they are known.
        warnings: one line each.
    """

    memory: MemoryFound
    planner: Planner
    plan: MemoryPlan
    strategy: str
    settings: ExpertSettings
    work: WorkShape
    hardware: Hardware | None
    profile: str
    habits: Profile | None
    costs: RefreshCosts | None
    warnings: tuple[str, ...]


def find_memory_for(device: str, asked: str | None) -> MemoryFound:
    """The memory to plan with: what was asked for, else what this process may use.

    Raises:
        RelumeError: no size, or a device that is not here and whose memory was not named.
    """
    limit = None if asked is None else parse_size(asked)
    memory = find_memory()
    if device == "cpu":
        if limit is None:
            source = f"what is free for this process; the limit is {memory.source}"
            return MemoryFound(memory.usable_bytes, None, source)
        return MemoryFound(limit, None, "--memory", excessive=limit > memory.total_bytes)
    if limit is not None:
        return MemoryFound(limit, memory.usable_bytes, "--memory")
    gpus, index = find_gpus(), device.partition(":")[2] or "0"
    if not index.isdecimal() or int(index) >= len(gpus):
        raise RelumeError(f"device {device!r} is not here: plan for it by naming its memory, as --memory 24GiB")
    gpu = gpus[int(index)]
    return MemoryFound(gpu.free_bytes, memory.usable_bytes, f"free on {gpu.name}")


def make_planner(
    config: ModelConfig,
    sizes: ModelSizes,
    engine: EngineConfig,
    compute_dtype: torch.dtype,
    stored_dtype: torch.dtype,
    limit_bytes: int,
    strategy: Strategy | None = None,
    pack: Pack | None = None,
) -> Planner:
    """A planner of what this engine will run; without a strategy, of one that needs nothing of its own."""
    quantised = pack is not None and pack.name != "bf16"
    work = Workload(
        compute_itemsize=compute_dtype.itemsize,
        stored_itemsize=stored_dtype.itemsize,
        context=engine.context or _default_context(config, engine.max_batch, compute_dtype.itemsize, limit_bytes),
        batch=engine.max_batch,
        prefill_tokens=(engine.prefill_blocks or 0) * config.block_length or PREFILL_TOKENS,
        on_gpu=engine.device != "cpu",
        slot_bytes=slot_format(pack, config, compute_dtype).slot_bytes if quantised else None,
        packed_bytes=None if pack is None else pack.expert_bytes,
    )
    planner = Planner(config, sizes, work)
    host_bytes = 0
    if engine.host_memory is not None:
        slot = planner.slot_bytes
        host_bytes = ExpertMemory.parse(engine.host_memory).total_slots(planner.shape, slot) * slot
    ahead = 0 if strategy is None or strategy.prefetch == "none" else PREFETCH_SLOTS
    if ahead:
        work = replace(work, reader_threads=READER_THREADS + 1)
    return replace(
        planner,
        work=work,
        host_tier_bytes=host_bytes,
        transit_slots=TRANSIT_SLOTS + ahead,
        strategy_bytes=0 if strategy is None else strategy.num_bytes(planner.shape),
    )


def provision(
    config: ModelConfig,
    sizes: ModelSizes,
    engine: EngineConfig,
    compute_dtype: torch.dtype,
    stored_dtype: torch.dtype,
    pack: Pack | None = None,
    folder: Path | None = None,
) -> Provision:
    """Plan an engine.

    Args:
        config, sizes: of the model.
        engine: the configuration.
        compute_dtype, stored_dtype: of weights in memory and in the checkpoint.
        pack: how experts are packed, if they are.
        folder: of the checkpoint; a profile that lies there is used unless another is named.

    Raises:
        RelumeError: too little memory, naming the least; an unknown strategy; one that lacks a profile; an unknown
            hardware profile.
    """
    hardware = None if engine.hardware is None else load_hardware(engine.hardware)
    if hardware is not None:
        require(engine.device == "cpu", "simulated hardware decodes on the CPU: leave --device out")
        if not hardware.link_is_disk:  # where the host lane computes
            require(
                engine.host_memory in {None, "100%"},
                f"--hardware {engine.hardware} computes in host memory whatever it holds: leave --host-memory out",
            )
            engine = replace(engine, host_memory="100%")
    memory = find_memory_for(engine.device, engine.memory)
    shape = expert_shape(config)
    everything = shape.num_layers * shape.num_experts
    asked = ExpertMemory.parse(engine.expert_memory)
    layer_slots = None if engine.layer_slots is None else explicit(engine.layer_slots, shape)

    def planner_for(strategy: Strategy | None) -> Planner:
        return make_planner(config, sizes, engine, compute_dtype, stored_dtype, memory.limit_bytes, strategy, pack)

    planner = planner_for(None)
    if layer_slots is not None:
        require(asked.is_auto, "give the expert memory or the slots of each layer, not both")
        require(not engine.shared_pool, "a pool that all layers share has no slots of one layer")
        asked = ExpertMemory(num_bytes=sum(layer_slots) * planner.slot_bytes)
    name = engine.strategy
    if name == "full":
        require(
            asked.is_auto or asked.total_slots(shape, planner.slot_bytes) == everything,
            "the strategy full needs room for every expert: choose another strategy, or give the experts 100%",
        )
        asked = ExpertMemory(share=1.0)
    if name == "auto":
        most = planner.most_slots(memory.limit_bytes)
        wanted = most if asked.is_auto else asked.total_slots(shape, planner.slot_bytes)
        name = "full" if wanted == everything else DEFAULT_STRATEGY
    strategy = Strategy.parse(name)
    planner = planner_for(strategy)
    plan = planner.make_plan(memory.limit_bytes, asked, memory.host_bytes)
    path, profile, warnings = _find_profile(engine.profile, folder, shape)
    total = sum(plan.slots_per_layer)
    work = WorkShape.of(config, compute_dtype.itemsize, planner.slot_bytes)
    costs = strategy.weigh(_refresh_costs(hardware, engine.device, work, profile))
    slots = layer_slots or BUDGETS[strategy.budget](total, shape, profile, costs)
    plan = replace(plan, slots_per_layer=tuple(slots))
    if memory.excessive:
        warnings.append(f"--memory {engine.memory} is more than this process may use here")
    if engine.device == "cpu" and planner.host_experts and hardware is None:
        warnings.append("on a CPU the memory of --host-memory spares more as slots: give it to --expert-memory")
    if engine.device != "cpu" and not planner.host_experts and sum(slots) < everything:
        warnings.append(
            "experts that are not on the GPU are read from disk: hold them in RAM with --host-memory 100%"
        )
    if engine.shared_pool:
        demand = [active_experts(config)] * shape.num_layers if profile is None else profile.mean_active
        warning = shared_pool_warning(sum(slots), np.asarray(demand))
        warnings += [warning] if warning else []
    context = RetentionContext(
        shape, sum(slots), profile, slots=None if engine.shared_pool else tuple(slots), costs=costs
    )
    parts = strategy.make(context)
    warnings += parts.retention.notes
    settings = ExpertSettings(
        slots=sum(slots) if engine.shared_pool else tuple(slots),
        parts=parts,
        num_transit=planner.transit_slots,
        num_ahead=planner.transit_slots - TRANSIT_SLOTS,
        num_readers=READER_THREADS,
        num_host=plan.host_experts,
        direct=engine.reads == "direct" or (engine.reads == "auto" and sum(slots) < everything),
        virtual=None if hardware is None else VirtualClock(hardware, work, shape),
        hardware=this_hardware(),
        link_bandwidth=_link_bandwidth(),
    )
    return Provision(
        memory,
        planner,
        plan,
        name,
        settings,
        work,
        hardware,
        "" if path is None else str(path.resolve()),
        profile,
        costs,
        tuple(warnings),
    )


def _find_profile(
    named: str | None, folder: Path | None, shape: ExpertShape
) -> tuple[Path | None, Profile | None, list[str]]:
    """The profile that was named, else the one beside the checkpoint or in the cache; its path, and warnings.

    Raises:
        RelumeError: that which was named cannot be used.
    """
    if named is not None:
        return Path(named), read_model_profile(Path(named), shape), []
    candidates = [] if folder is None else [folder / PROFILE_NAME]
    with suppress(OSError):  # no home folder
        candidates += [] if folder is None else [cached_profile(folder.name)]
    for path in candidates:
        if path.exists():
            try:
                return path, read_model_profile(path, shape), []
            except RelumeError as error:
                return None, None, [f"{error}; decoding without it"]
    return None, None, []


def _refresh_costs(
    simulated: Hardware | None, device: str, work: WorkShape, profile: Profile | None
) -> RefreshCosts | None:
    """Of the machine that is simulated, or of this one where its processor is the device."""
    hardware = simulated if simulated is not None or device != "cpu" else this_hardware()
    if hardware is None or profile is None or profile.refresh is None:
        return None
    return RefreshCosts.of(hardware, work, profile.refresh)


def this_hardware() -> Hardware | None:
    """This computer as it was measured; `None` if it was not, or not enough of it."""
    profile = load_profile()
    try:
        return None if profile is None else measured_hardware(profile)
    except RelumeError:
        return None


def _link_bandwidth() -> float | None:
    """Bytes per second from pinned memory to the GPU, if that was measured on this computer."""
    profile = load_profile()
    measured = None if profile is None else profile.host_to_device.value
    return None if measured is None else measured * 1e9


def compute_threads() -> int:
    """Threads to compute with: as many as `relume machine` found best, else one a core."""
    profile = load_profile()
    best = None if profile is None else profile.compute_threads.value
    return int(best) if best else effective_cores()


def _default_context(config: ModelConfig, batch: int, itemsize: int, limit_bytes: int) -> int:
    context = min(DEFAULT_CONTEXT, config.max_context)
    position = config.kv_values_per_token * itemsize * batch
    while context > LEAST_CONTEXT and context * position > LARGEST_KV_SHARE * limit_bytes:
        context = max(LEAST_CONTEXT, context // 2)
    return context
