"""The families that relume runs, and the one that a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relume.checkpoint.folder import Checkpoint, open_checkpoint, read_configs, shard_names
from relume.checkpoint.json_file import exists
from relume.checkpoint.pack import read_pack
from relume.config import ModelConfig
from relume.core import Registry, RelumeError
from relume.model import llada2, sdar
from relume.model.family import Family, tensor_problems

FAMILIES = Registry("family", {family.name: family for family in (llada2.FAMILY, sdar.FAMILY)})


def read_config(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[Family, ModelConfig]:
    """The family and configuration that a folder's JSON files describe; no tensor is looked at.

    Raises:
        RelumeError: an unknown architecture, or a config that lacks a key or contradicts itself.
    """
    architectures = config.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    architectures = [str(name) for name in architectures]
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    family = next((known[name] for name in architectures if name in known), None)
    if family is None:
        raise RelumeError(
            f"{folder}: unknown architecture {', '.join(architectures) or '(none)'}; "
            f"relume runs {', '.join(known)}"
        )
    try:
        return family, family.read_config(config, generation)
    except RelumeError as error:
        raise RelumeError(f"{folder}: {error}") from None


def survey(folder: Path) -> tuple[Checkpoint, Family, ModelConfig]:
    """What a folder describes. Its tensors are there, and found to fit, if all shards are; else there are none.

    Raises:
        RelumeError: as `read_config`; with all shards also as `open_checkpoint` and `identify`.
    """
    checkpoint = Checkpoint(folder, *read_configs(folder), tensors={}, pack=read_pack(folder))
    found = read_config(folder, checkpoint.config, checkpoint.generation_config)
    if all(exists(folder / name) for name in shard_names(folder)):
        checkpoint = open_checkpoint(folder)
        found = identify(checkpoint)
    return checkpoint, *found


def identify(checkpoint: Checkpoint) -> tuple[Family, ModelConfig]:
    """The family and configuration of a checkpoint, all of whose tensors were found to fit.

    Raises:
        RelumeError: as `read_config`, or tensors that are missing or do not fit; all of them are listed.
    """
    family, config = read_config(checkpoint.folder, checkpoint.config, checkpoint.generation_config)
    problems = tensor_problems(family, config, checkpoint)
    if problems:
        raise RelumeError(
            f"{checkpoint.folder}: the tensors do not fit the configuration ({len(problems)} problems): "
            + "; ".join(problems)
        )
    return family, config
