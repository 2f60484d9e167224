"""Experts of the checkpoint that is packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

from relume.checkpoint.folder import Checkpoint
from relume.config import ModelConfig, PackConfig
from relume.experts.formats import DenseFormat, ExpertFormat
from relume.experts.source import CheckpointExperts
from relume.machine.threads import effective_cores
from relume.machine.workers import one_thread


class SourceExperts:
    """Experts of the source, put into another format side by side."""

    def __init__(
        self, checkpoint: Checkpoint, prefixes: list[str], config: ModelConfig, packing: PackConfig
    ) -> None:
        self._checkpoint, self._prefixes, self._config = checkpoint, prefixes, config
        # Quantising begins with all bits that there are.
        self._dtype = torch.bfloat16 if packing.experts == "bf16" else torch.float32

    def _dense(self, dtype: torch.dtype) -> DenseFormat:
        return DenseFormat(self._config.hidden_size, self._config.expert_size, dtype)

    def source(self, dtype: torch.dtype) -> CheckpointExperts:
        """Where experts come from, into slots of this type."""
        config = self._config
        return CheckpointExperts(
            self._checkpoint, self._prefixes, config.router.num_experts, self._dense(dtype), direct=False
        )

    def records(self, wanted: Iterable[tuple[int, int]], expert_format: ExpertFormat) -> Iterator[torch.Tensor]:
        """`[slot_bytes]` uint8 of each (layer, expert)."""
        dense, source = self._dense(self._dtype), self.source(self._dtype)

        def make(key: tuple[int, int]) -> torch.Tensor:
            weights = dense.views(torch.empty(dense.slot_bytes, dtype=torch.uint8))
            record = torch.zeros(expert_format.slot_bytes, dtype=torch.uint8)
            with one_thread():
                source.read(*key, weights)
                gate_up, down = weights
                expert_format.fill(gate_up, down, expert_format.views(record))
            return record

        cores = effective_cores()
        try:
            with ThreadPoolExecutor(cores) as pool:
                remaining = iter(wanted)
                while keys := list(islice(remaining, cores)):
                    yield from pool.map(make, keys)
        finally:
            source.close()
