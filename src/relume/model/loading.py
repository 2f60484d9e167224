"""From a checkpoint folder to a transformer, holding no more than the weights and one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from relume.checkpoint.folder import Checkpoint, stored_dtype
from relume.checkpoint.tensor_file import TensorReader
from relume.config import ModelConfig
from relume.core import Progress, RelumeError
from relume.experts.executor import ExpertExecutor
from relume.experts.store import ResidentExperts
from relume.machine.memory import is_out_of_memory
from relume.model.family import Family, Parts
from relume.model.transformer import Transformer


@dataclass(frozen=True)
class LoadedModel:
    """A transformer, and what reading it took."""

    transformer: Transformer
    expert_bytes: int
    bytes_read: int


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
    progress: Progress,
    exact_batches: bool = True,
) -> LoadedModel:
    """Read all weights. Each goes straight to its place; only a tensor of another dtype is staged."""
    total = checkpoint.num_bytes
    read = 0

    def advance(num_bytes: int) -> None:
        nonlocal read
        read += num_bytes
        progress(num_bytes, total)

    reader = TensorReader()
    try:
        weights = {
            name: _load_weight(name, parts, checkpoint, reader, dtype, device, advance)
            for name, parts in family.weights(config).items()
        }
        experts = ResidentExperts(config, dtype, device)
        for layer in config.moe_layers:
            experts.load(layer, family.experts_prefix.format(layer=layer), checkpoint, reader, advance)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RelumeError(
            f"{checkpoint.folder}: its {total / 2**30:.1f} GiB of weights do not fit in memory as "
            f"{str(dtype).removeprefix('torch.')} ({error})"
        ) from None
    finally:
        reader.close()
    executor = ExpertExecutor(experts, config.router.num_experts)
    return LoadedModel(Transformer(config, weights, executor, exact_batches), experts.num_bytes, read)


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
