"""A checkpoint folder in the official layout: its JSON files and the tensors that its index names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relume.checkpoint.json_file import exists, read_json
from relume.checkpoint.pack import Pack, read_pack
from relume.checkpoint.tensor_file import DTYPES, TensorEntry, read_header
from relume.core import RelumeError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Checkpoint:
    """A folder's configuration and the entries of all tensors, by official name. Nothing is read yet.

    The experts of a packed folder are in its `pack` instead of among the tensors.
    """

    folder: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    pack: Pack | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors and packed experts."""
        packed = 0 if self.pack is None else self.pack.num_bytes
        return packed + sum(entry.num_bytes for entry in self.tensors.values())

    def expert(self, prefix: str, expert: int) -> tuple[TensorEntry, TensorEntry, TensorEntry]:
        """Gate [I, H], up [I, H] and down [H, I] of one expert, whether stored one by one or stacked.

        Raises:
            RelumeError: the experts are packed.
        """
        if self.pack is not None:
            raise RelumeError(
                f"{self.folder}: its experts are packed as {self.pack.name}; give what it was packed from, "
                f"{self.pack.source}"
            )
        gate, up, down = (self._projection(prefix, expert, projection) for projection in PROJECTIONS)
        return gate, up, down

    def expert_bytes(self, prefix: str) -> int:
        """Bytes that are read to have one of a layer's experts."""
        if self.pack is not None:
            return self.pack.expert_bytes
        return sum(entry.num_bytes for entry in self.expert(prefix, 0))

    def _projection(self, prefix: str, expert: int, projection: str) -> TensorEntry:
        stacked = self.tensors.get(f"{prefix}.{projection}")
        return stacked.row(expert) if stacked else self.tensors[f"{prefix}.{expert}.{projection}.weight"]

    def problems(self, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What is missing or has another shape than `expected`, one text a tensor."""
        found = []
        for name, shape in expected.items():
            entry = self.tensors.get(name)
            if entry is None:
                found.append(f"{name} is missing")
            elif entry.shape != shape:
                found.append(f"{name} has the shape {list(entry.shape)} instead of {list(shape)}")
        return found

    def expert_shapes(self, prefix: str, num_experts: int, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one layer's experts, in the layout that the checkpoint uses."""
        shapes = dict(zip(PROJECTIONS, ((size, hidden), (size, hidden), (hidden, size)), strict=True))
        if f"{prefix}.{PROJECTIONS[0]}" in self.tensors:
            return {f"{prefix}.{name}": (num_experts, *shape) for name, shape in shapes.items()}
        return {
            f"{prefix}.{expert}.{name}.weight": shape
            for expert in range(num_experts)
            for name, shape in shapes.items()
        }


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the JSON files and the headers of the shards that the index names; other files are ignored.

    Raises:
        RelumeError: no folder, no permission, a missing, damaged or truncated file, a tensor that the index
            promises and its shard lacks.
    """
    if not exists(folder):
        raise RelumeError(f"{folder}: there is no such folder")
    if not folder.is_dir():
        raise RelumeError(f"{folder}: not a folder; name the folder that holds {CONFIG_FILE}")
    pack = read_pack(folder)
    if pack is not None:
        pack.check_files(folder)
    return Checkpoint(folder, *read_configs(folder), _read_tensors(folder), pack)


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, and generation_config.json or an empty one. Raises `RelumeError` as `read_json`."""
    generation = folder / GENERATION_CONFIG_FILE
    return read_json(folder / CONFIG_FILE), read_json(generation) if exists(generation) else {}


def shard_names(folder: Path) -> list[str]:
    """File names of the shards, from the index, or the single file, and of packed experts."""
    pack = read_pack(folder)
    packed = [] if pack is None else pack.files
    if exists(folder / INDEX_FILE):
        return [*sorted(set(_weight_map(folder).values())), *packed]
    return [SINGLE_FILE, *packed]


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX_FILE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RelumeError(f"{folder / INDEX_FILE}: has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or file in {"", ".", ".."} or "/" in file or "\\" in file:
            raise RelumeError(f"{folder / INDEX_FILE}: names the shard {file!r}, which is no plain file name")
    return weight_map


def _read_tensors(folder: Path) -> dict[str, TensorEntry]:
    if not exists(folder / INDEX_FILE):
        if not exists(folder / SINGLE_FILE):
            raise RelumeError(f"{folder}: has neither {INDEX_FILE} nor {SINGLE_FILE}")
        return read_header(folder / SINGLE_FILE)
    weight_map = _weight_map(folder)
    missing = [name for name in sorted(set(weight_map.values())) if not exists(folder / name)]
    if missing:
        raise RelumeError(f"{folder}: missing shards: {', '.join(missing)}; fetch them again")
    tensors: dict[str, TensorEntry] = {}
    absent: list[str] = []
    for shard in sorted(set(weight_map.values())):
        named = {name for name, file in weight_map.items() if file == shard}
        found = read_header(folder / shard, named)
        tensors |= found
        absent += sorted(named - found.keys())
    if absent:
        raise RelumeError(f"{folder}: tensors that the index names but their shards lack: {', '.join(absent)}")
    return tensors


def declared_dtype(config: Mapping[str, Any]) -> object:
    """What config.json says of the type of its tensors, `None` or empty if nothing."""
    return config.get("dtype") or config.get("torch_dtype")


def stored_dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> torch.dtype:
    """The float type that config.json declares in `dtype` or `torch_dtype`, else that of the largest tensor.

    Without tensors to look at it is bfloat16. Raises `RelumeError` for a type that relume does not read.
    """
    declared = declared_dtype(config)
    if not declared:
        largest = max(tensors.values(), key=lambda entry: entry.num_bytes, default=None)
        return largest.dtype if largest else torch.bfloat16
    name = str(declared).removeprefix("torch.")
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name not in known:
        raise RelumeError(f"config.json: dtype is {name!r}; relume reads {', '.join(known)}")
    return known[name]
