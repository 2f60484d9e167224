"""What a training reports: one JSON line every few steps, and what it measures for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relume.train.objective import Batch

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Counts:
    """Masked and rightly predicted tokens by task, and the same of wrong visible tokens; `[tasks]` int64."""

    masked: torch.Tensor
    masked_right: torch.Tensor
    wrong: torch.Tensor
    wrong_right: torch.Tensor

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def count_right(logits: torch.Tensor, batch: Batch, tasks: torch.Tensor, num_tasks: int) -> Counts:
    """Compare argmax and truth at the predicted positions.

    Args:
        logits: `[predicted, vocab]`, of the positions with a loss weight.
        batch: the rows.
        tasks: `[rows]`, index of each row's task.
        num_tasks: how many there are.
    """
    predicted = batch.loss_weights > 0
    right = logits.argmax(dim=-1) == batch.targets[predicted]
    task = tasks.to(logits.device).unsqueeze(1).expand(predicted.shape)[predicted]
    masked = batch.masked[predicted]
    wrong = ~masked & (batch.token_ids != batch.targets)[predicted]
    counted = (masked, masked & right, wrong, wrong & right)
    return Counts(*(torch.bincount(task[which], minlength=num_tasks).cpu() for which in counted))


def accuracy(right: torch.Tensor, total: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Shares by name, rounded; names without any token are left out."""
    rows = zip(names, right.tolist(), total.tolist(), strict=True)
    return {name: round(hits / count, 4) for name, hits, count in rows if count}


class MetricsFile:
    """Appends JSON lines; a resumed run first drops lines of steps that were lost."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        kept = [line for line in self._lines() if _step_of(line) <= step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        partial.replace(self._path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a kill cut short
