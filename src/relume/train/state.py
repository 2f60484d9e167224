"""Saving and restoring a training so that a kill at any moment costs at most one interval."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relume.core import RelumeError

STATE_FILE = "state.pt"
_FORMAT = 1


@dataclass(frozen=True)
class TrainState:
    """Everything that the next step depends on; its data and noise follow from seed and step.

    Attributes:
        step: optimiser steps done.
        config: the configuration, as plain values.
        weights: float32, by relume's names.
        averaged: their moving average, empty without one.
        optimizer: of `Optimizer.state_dict`.
        seconds: training time so far.
    """

    step: int
    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    averaged: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    seconds: float


def save_state(folder: Path, state: TrainState) -> None:
    """Replace the folder's state in one step: the old one stays until the new one is on disk.

    Raises:
        RelumeError: the disk is full or fails; the old state is untouched.
    """
    path = folder / STATE_FILE
    partial = path.with_suffix(f".partial-{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save({"format": _FORMAT, **vars(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the new name, too, must survive a power failure
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise RelumeError(f"{path}: cannot be written ({reason}); the state before it was kept") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other trainings out of a folder, and clear what a killed save left there.

    The lock ends with the process, however it ends.

    Raises:
        RelumeError: another process trains there, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise RelumeError(f"{folder}: cannot be used ({error.strerror})") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RelumeError(
                f"{folder}: another process trains there; wait for it or choose another folder"
            ) from None
        for partial in folder.glob(f"{Path(STATE_FILE).stem}.partial-*"):
            partial.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def load_state(folder: Path, mapped: bool = False) -> TrainState | None:
    """The folder's state, or `None` if it has none; `mapped` reads tensors only where they are touched.

    Raises:
        RelumeError: the file is damaged, or another version wrote it.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RelumeError(f"{path}: cannot be read ({reason}); remove it to start anew") from None
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
        raise RelumeError(f"{path}: no training state of this version; remove it to start anew")
    return TrainState(**values)
