"""How far a model's logits lie from another's: what quantised experts change before any token does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from relume.engine.engine import Engine
from relume.tasks import Problem

#: Conversations that are compared; their logits are held in memory.
NUM_COMPARED = 16


@dataclass(frozen=True)
class LogitError:
    """Logits over whole conversations, against a reference.

    Attributes:
        relative_error: root mean square of the differences / that of the reference, each row's mean taken away:
            a constant changes no probability.
        same_top: share of positions at which both find the same token most likely.
        num_positions: compared.
    """

    relative_error: float
    same_top: float
    num_positions: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def conversation_logits(engine: Engine, problems: Sequence[Problem]) -> list[torch.Tensor]:
    """`[tokens, vocab]` float32 for each problem's prompt and right answer."""
    found = []
    for problem in problems[:NUM_COMPARED]:
        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": problem.prompt}])
        found.append(engine.logits([*prompt, *engine.tokenizer.encode(problem.answer)]))
    return found


def compare_logits(found: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> LogitError:
    """The error of `found`, as `conversation_logits` gives it, against another model's."""
    ours, theirs = torch.cat(list(found)), torch.cat(list(reference))
    same = ours.argmax(dim=-1) == theirs.argmax(dim=-1)
    ours, theirs = (logits - logits.mean(dim=-1, keepdim=True) for logits in (ours, theirs))
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    return LogitError(float(error), float(same.float().mean()), len(same))
