"""How fast a plan will run, predicted from the model's shape and what was measured of this computer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from relume.config import ModelConfig
from relume.engine.footprint import Workload
from relume.engine.memory_plan import MIB, MemoryPlan
from relume.machine.figures import MachineProfile
from relume.model.sizes import ModelSizes

#: Tokens of a block choose alike: beyond the first, each adds as many distinct experts as this share of one that
#: chooses for itself. Solved from LLaDA2.0-mini's published 70 of 256 active experts (top-8, blocks of 32). For
#: the shipped model (top-4, blocks of 16) it gives 19 of 64, where 26 were measured.
_OWN_CHOICE = 0.292

#: Hit rate of LRU by the share of experts that is resident, measured on a block-diffusion model of 6 M parameters
#: (64 experts, top-4, blocks of 16). Retention that knows the decoder hits up to 5 points more.
_HIT_RATES = ((0.0, 0.0), (0.20, 0.36), (0.31, 0.55), (0.41, 0.70), (0.50, 0.83), (0.62, 0.90), (1.0, 1.0))

#: LLaDA2.0-mini's published mean; a shorter block commits at most half of itself.
_TOKENS_PER_ITERATION = 2.6


@dataclass(frozen=True)
class Prediction:
    """Predicted, never measured.

    Attributes:
        tpot_ms: milliseconds for each token of a request; `None` if too little is known.
        reasons: the arithmetic, one sentence each.
    """

    tpot_ms: float | None
    reasons: tuple[str, ...]


def active_experts(config: ModelConfig, requests: int = 1) -> float:
    """Distinct experts of a layer that one iteration of `requests` blocks uses, predicted."""
    router = config.router
    choices = 1 + (config.block_length - 1) * _OWN_CHOICE
    active = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** choices)
    if router.capacity:
        active = min(active, router.capacity * -(-config.block_length // router.capacity_window))
    return router.num_experts * (1 - float((1 - min(1.0, active / router.num_experts)) ** requests))


def hit_rate(share: float, active_share: float) -> float:
    """Share of active experts that are resident, predicted; both arguments are shares of all experts."""
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(_HIT_RATES) if share <= pair[1][0])
    return min(y0 + (y1 - y0) * (share - x0) / (x1 - x0), share / active_share)


def predict(
    config: ModelConfig,
    sizes: ModelSizes,
    work: Workload,
    plan: MemoryPlan,
    profile: MachineProfile | None,
    direct: bool = True,
) -> Prediction:
    """Predict the time of a token.

    An iteration reads the dense weights and K/V, and computes its active experts while the missing ones are read
    from disk, or copied from host memory; `direct` says whether reads go around the page cache.
    """
    router, layers, block = config.router, len(config.moe_layers), config.block_length
    active, alone = active_experts(config, work.batch), active_experts(config)
    hits = hit_rate(plan.resident_share, active / router.num_experts)
    missing = layers * active * (1 - hits)
    copied = missing * plan.host_experts / (layers * router.num_experts)  # any expert may be a held one
    read = missing - copied
    expert_bytes = work.stored_expert_bytes(config)
    rows = block * router.top_k / alone
    reasons = [
        f"An iteration of {_count(work.batch, 'block')} of {block} tokens uses about {active:.0f} of "
        f"{router.num_experts} experts in each of {layers} layers, each for about {rows:.1f} tokens of a block.",
        f"With {plan.resident_share:.0%} of the experts resident, about {hits:.0%} of the active ones are hits "
        f"(as LRU on a small model); {read:.0f} are read from disk, {read * expert_bytes / MIB:.0f} MiB an "
        "iteration" + (f", and {copied:.0f} copied from host memory." if copied else ".")
        if plan.resident_share < 1
        else "All experts are resident: none is read from disk while decoding.",
    ]
    if work.on_gpu:
        return Prediction(None, (*reasons, "Times are predicted for --device cpu only."))
    dtype = "float32" if work.compute_itemsize == 4 else "bfloat16"
    # The table of embeddings is looked up, not read; with a head of its own, it is beside that.
    dense = sizes.outside_experts - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    rates = _rates(profile, dtype, rows, block, sizes.per_expert, dense, direct)
    if profile is None or rates is None:
        lacking = "no bandwidths" if profile is None else f"not all of memory, disk and {dtype} kernels"
        way_out = "run `relume machine`, then the time of a token is predicted"
        return Prediction(None, (*reasons, f"Of this computer, {lacking} were measured: {way_out}."))
    kv_bytes = config.kv_values_per_token * work.compute_itemsize * work.context / 2
    read_ms = (dense * work.compute_itemsize + kv_bytes) / (rates.memory * 1e6)
    dense_ms = work.batch * max(read_ms, rates.dense_ms)
    experts_ms = work.batch * layers * alone * rates.expert_ms
    # A copy takes the memory twice, reading and writing.
    misses_ms = read * expert_bytes / (rates.disk * 1e3) + 2 * copied * plan.bytes_per_slot / (rates.memory * 1e6)
    iteration_ms = dense_ms + max(experts_ms, misses_ms)
    per_iteration = min(_TOKENS_PER_ITERATION, max(1.0, block / 2))
    forwards = 1 / per_iteration + 1 / block
    tpot_ms = iteration_ms * forwards
    reasons += [
        f"Dense weights and K/V: {_count(work.batch, 'request')}, each the longer of {read_ms:.0f} ms to read "
        f"them at {rates.memory:g} GB/s and {rates.dense_ms:.0f} ms to compute, together {dense_ms:.0f} ms.",
        f"Experts: {work.batch * layers * alone:.0f} kernels of {rates.expert_ms:.2f} ms, {experts_ms:.0f} ms"
        + (", as if they were not quantised." if work.slot_bytes else "."),
        f"Misses: {misses_ms:.0f} ms, the disk at {rates.disk:g} MB/s {rates.way}. Reading and computing overlap, "
        f"the longer counts: an iteration takes {iteration_ms:.0f} ms.",
        f"At about {per_iteration:g} tokens an iteration (2.6 is LLaDA2.0-mini's published mean) and one more "
        f"forward a block, a token takes {forwards:.2f} forwards: predicted {tpot_ms:.0f} ms.",
        f"Bandwidths and kernel times were measured on {profile.memory_read.measured_at} on {profile.identity}, "
        f"the disk of {profile.folder}.",
    ]
    return Prediction(tpot_ms, tuple(reasons))


@dataclass(frozen=True)
class _Rates:
    memory: float  # GB/s
    disk: float  # MB/s
    way: str  # of reading from disk
    expert_ms: float
    dense_ms: float


def _rates(
    profile: MachineProfile | None, dtype: str, rows: float, block: int, per_expert: int, dense: int, direct: bool
) -> _Rates | None:
    """What the prediction needs of a profile, `None` if any of it is missing."""
    if profile is None:
        return None
    expert_ms = profile.expert_kernel.estimate_ms(dtype, rows, per_expert)
    # The dense layers are the same kind of product as an expert, over all tokens of the block.
    dense_ms = profile.expert_kernel.estimate_ms(dtype, block, dense)
    reading = profile.disk_read(direct)
    memory, disk = profile.memory_read.value, reading.value
    if expert_ms is None or dense_ms is None or memory is None or disk is None:
        return None
    way = "around the page cache" if reading is profile.disk_direct else "through a page cache that is empty"
    return _Rates(memory, disk, way, expert_ms, dense_ms)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
