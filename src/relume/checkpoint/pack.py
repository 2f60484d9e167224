"""What a packed folder says of its experts: `relume_pack.json`.

Beside the usual JSON files, a packed folder holds one safetensors file with everything but the routed experts, and
one file of experts for each MoE layer: records of one size, each in whole pages, in the experts' order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from relume.checkpoint.json_file import exists, read_json
from relume.config import ModelConfig, PackConfig, PackedFormatName, require, require_known, require_types
from relume.core import RelumeError
from relume.machine.pages import whole_pages

PACK_FILE = "relume_pack.json"
#: What is packed so far; its presence without `PACK_FILE` marks a folder that is unfinished.
JOURNAL_FILE = "relume_pack.partial"
VERSION = 1


@dataclass(frozen=True)
class Pack:
    """The experts of a packed folder.

    Attributes:
        name: `bf16`, `int8` or `int4`.
        group_size: inputs that share a scale, of `int4`.
        num_layers, num_experts: MoE layers, and experts of each.
        hidden_size, expert_size: of an expert.
        expert_bytes: of one expert, as in a slot.
        source: name of the folder or hub id that was packed.
        source_dtype: type of its experts.
        fingerprint: of its configuration, its tensors' shapes and a sample of each.
        checksums: CRC-32 of each expert, layer by layer; empty until all are packed.
    """

    name: PackedFormatName
    group_size: int | None
    num_layers: int
    num_experts: int
    hidden_size: int
    expert_size: int
    expert_bytes: int
    source: str
    source_dtype: str
    fingerprint: str
    checksums: tuple[int, ...] = ()

    @property
    def packing(self) -> PackConfig:
        """How the experts are stored."""
        return PackConfig(self.name, self.group_size)

    @property
    def record_bytes(self) -> int:
        """From one expert to the next in a file."""
        return whole_pages(self.expert_bytes)

    @property
    def layer_bytes(self) -> int:
        """Of one file of experts."""
        return self.num_experts * self.record_bytes

    @property
    def num_bytes(self) -> int:
        """Of all files of experts."""
        return self.num_layers * self.layer_bytes

    @property
    def lossless(self) -> bool:
        """Whether the experts are those of the source."""
        return self.name == "bf16" and self.source_dtype == "bfloat16"

    @property
    def files(self) -> list[str]:
        """Names of the files of experts, by layer."""
        return [f"experts-{layer + 1:05d}.relume" for layer in range(self.num_layers)]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave. Raises `RelumeError` for anything else."""
        version = values.get("version")
        require(version == VERSION, f"is of version {version!r}, this relume reads {VERSION}: pack again")
        fields = {key: value for key, value in values.items() if key != "version"}
        require_known("key", fields, cls)
        try:
            pack = cls(**fields | {"checksums": tuple(fields.get("checksums", ()))})
        except TypeError:
            raise RelumeError("is damaged: fetch it again, or pack again") from None
        require_types(pack)
        sizes = (pack.num_layers, pack.num_experts, pack.hidden_size, pack.expert_size, pack.expert_bytes)
        require(
            pack.packing.group_size == pack.group_size and min(sizes) >= 1,
            "describes no packed experts: fetch it again, or pack again",
        )
        return pack

    def check_files(self, folder: Path) -> None:
        """Raise `RelumeError` unless the files of experts are there and complete."""
        require(
            len(self.checksums) == self.num_layers * self.num_experts,
            f"{folder / PACK_FILE}: lacks checksums: fetch it again, or pack again",
        )
        for name in self.files:
            path = folder / name
            size = path.stat().st_size if exists(path) else None
            require(size is not None, f"{path}: these packed experts are missing; fetch them again, or pack again")
            require(
                size == self.layer_bytes,
                f"{path}: has {size} bytes instead of {self.layer_bytes}; fetch it again, or pack again",
            )

    def problems(self, config: ModelConfig) -> list[str]:
        """What does not fit a model's configuration, one text each."""
        wanted = {
            "num_layers": len(config.moe_layers),
            "num_experts": config.router.num_experts,
            "hidden_size": config.hidden_size,
            "expert_size": config.expert_size,
        }
        return [
            f"{PACK_FILE} has {name} {getattr(self, name)} instead of {value}"
            for name, value in wanted.items()
            if getattr(self, name) != value
        ]


def read_pack(folder: Path) -> Pack | None:
    """The pack of a folder; `None` if its experts are not packed.

    Raises:
        RelumeError: packing was not finished, or the description is damaged.
    """
    path = folder / PACK_FILE
    if exists(path):
        try:
            return Pack.from_dict(read_json(path))
        except RelumeError as error:
            text = str(error)
            raise RelumeError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    if exists(folder / JOURNAL_FILE):
        raise RelumeError(f"{folder}: packing it was not finished; run the same relume pack command again")
    return None
