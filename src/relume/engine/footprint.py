"""What running a model takes besides its experts, byte by byte, from numbers alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch.version import cuda

from relume.config import PREFILL_TOKENS, ModelConfig, require
from relume.engine.memory_plan import MIB
from relume.experts.copies import STAGING_BUFFERS
from relume.machine.pages import PAGE, whole_pages
from relume.model.sizes import ModelSizes

#: Positions of a request that are planned for unless told otherwise.
DEFAULT_CONTEXT = 4096
#: Experts that are read at once.
READER_THREADS = 4

#: Python, torch, transformers and what decoding makes them allocate: on 2026-11-30 were measured, with torch 2.13
#: (resident set after answering with the shipped model, without its weights), 290 MiB if torch was built for CPUs
#: alone and 575 MiB if it was built for CUDA, even where there is none.
RUNTIME_BYTES = (320 if cuda is None else 608) * MIB
#: A tokenizer of 157,000 entries took 216 MiB at its peak on the same day.
TOKENIZER_BYTES_PER_ENTRY = 1536
#: Workspaces and kernels of the CUDA libraries on the device: an assumption, not measured.
CUDA_RUNTIME_BYTES = 512 * MIB

#: The least safety margin. Page tables take 1/512 of what is held (128 MiB for 64 GiB), the rest is for
#: scratch memory of the matrix library's threads and for the allocator's gaps.
LEAST_MARGIN_BYTES = 256 * MIB


@dataclass(frozen=True)
class Workload:
    """What is to run.

    Attributes:
        compute_itemsize, stored_itemsize: bytes of a weight in memory and in the checkpoint.
        context: positions of each request, at most the model's.
        batch: requests that decode together.
        prefill_tokens: of a prompt in one forward.
        reader_threads: each reads one expert at a time.
        on_gpu: whether the model runs on a GPU, with memory of its own.
        slot_bytes: of a quantised expert in a slot; `None` if experts are computed with as other weights are.
        packed_bytes: of a packed expert on disk; `None` if experts are stored as other weights are.
    """

    compute_itemsize: int
    stored_itemsize: int
    context: int
    batch: int = 1
    prefill_tokens: int = PREFILL_TOKENS
    reader_threads: int = READER_THREADS
    on_gpu: bool = False
    slot_bytes: int | None = None
    packed_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            unset = field.name == "on_gpu" or value is None
            require(unset or value >= 1, f"{field.name} is {value}: it must be at least 1")

    def stored_expert_bytes(self, config: ModelConfig) -> int:
        """Of one expert on disk."""
        return self.packed_bytes or config.parameters_per_expert * self.stored_itemsize


def device_parts(config: ModelConfig, sizes: ModelSizes, work: Workload) -> dict[str, int]:
    """Bytes beside the compute, by part: weights that every forward needs, K/V and what a forward allocates."""
    weights = {name: count * work.compute_itemsize for name, count in sizes.parts.items()}
    weights["routers"] = sizes.parts["routers"] * 4  # float32 in every published implementation
    return weights | {
        "kv_cache": config.kv_values_per_token * _positions(config, work) * work.batch * work.compute_itemsize,
        "activations": activation_bytes(config, work),
        # Twice: the logits of all requests, and a softmax of them.
        "logits": 2 * 4 * config.block_length * work.batch * config.vocab_size,
    }


def host_parts(config: ModelConfig, work: Workload) -> dict[str, int]:
    """Bytes that lie in RAM wherever the model runs, by part."""
    expert = work.stored_expert_bytes(config)
    pinned = 0
    if work.on_gpu:
        slot = work.slot_bytes or config.parameters_per_expert * work.compute_itemsize
        pinned = STAGING_BUFFERS * whole_pages(slot)
    staged = work.stored_itemsize * max(config.vocab_size, config.dense_size) * config.hidden_size
    return {
        # Three tensors, none of which starts or ends at a page of the file; beside a GPU pinned slots as well.
        "staging": work.reader_threads * (whole_pages(expert) + 3 * 2 * PAGE + pinned),
        "runtime": RUNTIME_BYTES + TOKENIZER_BYTES_PER_ENTRY * config.vocab_size,
        # While weights are loaded, the largest tensor waits for its conversion or transfer.
        "load_peak": staged if work.on_gpu or work.compute_itemsize != work.stored_itemsize else 0,
    }


def margin_bytes(parts: dict[str, int]) -> int:
    """The safety margin: 5% of what does not depend on context and batch, at least `LEAST_MARGIN_BYTES`."""
    growing = ("kv_cache", "activations", "logits")
    return max(LEAST_MARGIN_BYTES, sum(count for name, count in parts.items() if name not in growing) // 20)


def activation_bytes(config: ModelConfig, work: Workload) -> int:
    """The most that one forward of the layers holds, weights and K/V aside.

    Every request prefills a chunk at once. Normed and routed states are those of all requests; attention and
    the dense layers run request by request.
    """
    item, hidden = work.compute_itemsize, config.hidden_size
    positions = _positions(config, work)
    tokens = min(positions, max(config.block_length, work.prefill_tokens))
    everyone = tokens * work.batch
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    mask = config.num_heads // config.num_kv_heads * tokens * positions * (1 + item)
    norm = tokens * hidden * (8 + item)
    attention = norm + tokens * (qkv * item + heads * (8 + 5 * item)) + mask
    top_k, size = config.router.top_k, config.expert_size
    pairs = everyone * top_k * (4 * hidden + 32)  # float32 outputs of every (token, expert), and their order
    # An expert that every token uses; a grouped product has the rows of all experts.
    busiest = everyone * (top_k if work.on_gpu else 1) * (hidden * (2 * item + 4) + 4 * size * item)
    experts = everyone * hidden * 2 * item + pairs + busiest
    feed_forward = norm + tokens * 4 * max(config.dense_size, config.shared_size) * item
    states = 2 * everyone * hidden * item
    # The stages follow each other, but the allocator keeps what one has freed, in sizes that do not suit the
    # next: measured peaks lie between the largest stage and the sum of all.
    return states + attention + experts + feed_forward


def _positions(config: ModelConfig, work: Workload) -> int:
    """The context in whole blocks."""
    return -(-work.context // config.block_length) * config.block_length
