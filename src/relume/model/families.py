"""The families that relume runs, and the one that a checkpoint belongs to."""

from __future__ import annotations

from relume.checkpoint.folder import Checkpoint
from relume.config import ModelConfig
from relume.core import Registry, RelumeError
from relume.model import llada2, sdar
from relume.model.family import Family, layer_problems

FAMILIES = Registry("family", {family.name: family for family in (llada2.FAMILY, sdar.FAMILY)})


def identify(checkpoint: Checkpoint) -> tuple[Family, ModelConfig]:
    """The family and configuration of a checkpoint whose tensors were all found to fit.

    Raises:
        RelumeError: an unknown architecture, a config that lacks or contradicts itself, or tensors that are
            missing or do not fit the config; all of them are listed.
    """
    architectures = checkpoint.config.get("architectures") or []
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    family = next((known[name] for name in architectures if name in known), None)
    if family is None:
        raise RelumeError(
            f"{checkpoint.folder}: unknown architecture {', '.join(map(str, architectures)) or '(none)'}; "
            f"relume runs {', '.join(known)}"
        )
    try:
        config = family.read_config(checkpoint.config, checkpoint.generation_config)
    except RelumeError as error:
        raise RelumeError(f"{checkpoint.folder}: {error}") from None
    problems = layer_problems(family, config, checkpoint)
    if problems:
        raise RelumeError(
            f"{checkpoint.folder}: the tensors do not fit the configuration ({len(problems)} problems): "
            + "; ".join(problems)
        )
    return family, config
