"""Experts of a packed folder: their formats, and reading them."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from relume.checkpoint.files import Pause
from relume.checkpoint.pack import PACK_FILE, Pack
from relume.config import ModelConfig, PackConfig
from relume.core import RelumeError
from relume.experts.formats import DenseFormat, ExpertFormat, Views
from relume.experts.int4 import Int4Format
from relume.experts.int8 import Int8Format
from relume.experts.source import ExpertSource, open_files
from relume.experts.staging import StagedReads


def packed_format(packing: PackConfig, hidden: int, size: int) -> ExpertFormat:
    """The format in which experts of `hidden` and `size` are stored.

    Raises:
        RelumeError: sizes that the format cannot hold.
    """
    if packing.experts == "int4":
        assert packing.group_size is not None
        return Int4Format(hidden, size, packing.group_size)
    return Int8Format(hidden, size) if packing.experts == "int8" else DenseFormat(hidden, size, torch.bfloat16)


def slot_format(pack: Pack | None, config: ModelConfig, dtype: torch.dtype) -> ExpertFormat:
    """The format of slots: packed experts as they are stored, unquantised ones in the type of the computation."""
    if pack is None or pack.name == "bf16":
        return DenseFormat(config.hidden_size, config.expert_size, dtype)
    return packed_format(pack.packing, pack.hidden_size, pack.expert_size)


def pack_problems(pack: Pack, config: ModelConfig) -> list[str]:
    """What does not fit a model's configuration or the format's own size, one text each."""
    problems = pack.problems(config)
    if not problems:
        expected = packed_format(pack.packing, pack.hidden_size, pack.expert_size).slot_bytes
        if pack.expert_bytes != expected:
            problems.append(f"{PACK_FILE} has expert_bytes {pack.expert_bytes} instead of {expected}")
    return problems


class PackedExperts(ExpertSource):
    """Reads records and verifies their checksums.

    Args:
        folder: that holds the files of experts.
        pack: what it says of them.
        direct: bypass the page cache, where the file system allows it.
    """

    def __init__(self, folder: Path, pack: Pack, direct: bool) -> None:
        super().__init__()
        self._paths = [folder / name for name in pack.files]
        self._pack = pack
        self._format = packed_format(pack.packing, pack.hidden_size, pack.expert_size)
        assert self._format.slot_bytes == pack.expert_bytes  # see `pack_problems`
        self._reads = StagedReads(open_files(self._paths[0], direct, self.fallbacks), pack.expert_bytes)

    def read(self, layer: int, expert: int, views: Views, pause: Pause | None = None) -> int:
        """See `ExpertSource.read`."""
        pack, offset = self._pack, expert * self._pack.record_bytes
        data = self._reads.read(self._paths[layer], offset, pack.expert_bytes, f"expert {expert}", pause)
        if zlib.crc32(data.numpy().data) != pack.checksums[layer * pack.num_experts + expert]:
            place = self.place(layer, expert)
            raise RelumeError(f"{place} is damaged, its checksum differs; fetch the file again, or pack again")
        for out, stored in zip(views, self._format.views(data), strict=True):
            out.copy_(stored)
        return pack.expert_bytes

    def place(self, layer: int, expert: int) -> str:
        """See `ExpertSource.place`."""
        return f"{self._paths[layer]}: expert {expert} at byte {expert * self._pack.record_bytes}"

    def close(self) -> None:
        """Close the files of experts."""
        self._reads.close()
