"""From a checkpoint folder to a transformer, holding no more than the weights and one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from relume.checkpoint.folder import Checkpoint, stored_dtype
from relume.checkpoint.tensor_file import TensorReader
from relume.config import ModelConfig
from relume.core import Progress, RelumeError
from relume.experts.build import ExpertSettings, build_expert_memory
from relume.experts.executor import ExpertExecutor
from relume.experts.grouped import grouped_for
from relume.experts.host_lane import HostLane
from relume.experts.memory import ExpertMemory
from relume.machine.memory import is_out_of_memory
from relume.machine.workers import Workers
from relume.model.family import Family, Parts
from relume.model.transformer import Transformer
from relume.routing.choice import NATIVE, RoutingChoice


@dataclass(frozen=True)
class LoadedModel:
    """A transformer, and what reading it took.

    Attributes:
        transformer: ready to run.
        experts: its routed experts.
        bytes_read: from disk, before the first forward.
    """

    transformer: Transformer
    experts: ExpertMemory
    workers: Workers
    host: HostLane
    bytes_read: int

    def close(self) -> None:
        """End its threads and close its files."""
        self.experts.close()
        self.host.close()
        self.workers.close()


def compute_dtype(checkpoint: Checkpoint, wanted: str) -> torch.dtype:
    """`float32` or `bfloat16`; `auto` takes bfloat16 unless the checkpoint is in float32."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
    return (
        torch.float32 if stored_dtype(checkpoint.config, checkpoint.tensors) == torch.float32 else torch.bfloat16
    )


def load_model(
    checkpoint: Checkpoint,
    family: Family,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    settings: ExpertSettings,
    num_threads: int,
    progress: Progress,
    exact_batches: bool = True,
    routing: RoutingChoice = NATIVE,
) -> LoadedModel:
    """Read what every forward needs, and the experts that the strategy wants at once.

    Each weight goes straight to its place; only a tensor of another dtype is staged.
    """
    prefixes = [family.experts_prefix.format(layer=layer) for layer in config.moe_layers]
    dense = family.weights(config)
    dense_bytes = sum(checkpoint.tensors[official].num_bytes for parts in dense.values() for official, _ in parts)
    stored_expert = checkpoint.expert_bytes(prefixes[0]) if prefixes else 0
    total = dense_bytes + stored_expert * (settings.num_host + settings.num_preloaded)
    read = 0

    def advance(num_bytes: int) -> None:
        nonlocal read
        read += num_bytes
        progress(num_bytes, total)

    reader = TensorReader()
    memory: ExpertMemory | None = None
    try:
        weights = {
            name: _load_weight(name, parts, checkpoint, reader, dtype, device, advance)
            for name, parts in dense.items()
        }
        memory = build_expert_memory(checkpoint, prefixes, config, dtype, device, settings)
        memory.preload(advance)
        workers = Workers(num_threads if device.type == "cpu" else 1)
    except BaseException as error:
        if memory is not None:
            memory.close()
        if not is_out_of_memory(error):
            raise
        raise RelumeError(
            f"{checkpoint.folder}: its {total / 2**30:.1f} GiB of weights do not fit in memory as "
            f"{str(dtype).removeprefix('torch.')} ({error}): give the experts less with --expert-memory"
        ) from None
    finally:
        reader.close()
    host = HostLane(1 if device.type == "cpu" else num_threads)
    grouped = grouped_for(memory.arena, dtype, device, memory.loader.source.fallbacks)
    executor = ExpertExecutor(memory, config.router.num_experts, config.num_dense_layers, workers, host, grouped)
    transformer = Transformer(config, weights, executor, workers, exact_batches, routing)
    return LoadedModel(transformer, memory, workers, host, read)


def _load_weight(
    name: str,
    parts: Parts,
    checkpoint: Checkpoint,
    reader: TensorReader,
    dtype: torch.dtype,
    device: torch.device,
    advance: Callable[[int], None],
) -> torch.Tensor:
    # Routing is float32 in every published implementation, whatever the checkpoint's dtype.
    kept = torch.float32 if name.endswith((".router", ".router_bias")) else dtype
    rows = sum(shape[0] for _, shape in parts)
    weight = torch.empty((rows, *parts[0][1][1:]), dtype=kept, device=device)
    for (official, shape), out in zip(parts, weight.split([shape[0] for _, shape in parts]), strict=True):
        entry = checkpoint.tensors[official]
        assert entry.shape == shape
        reader.read(entry, out)
        advance(entry.num_bytes)
    return weight
