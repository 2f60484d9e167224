"""One candidate token and its confidence for each position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relume.config import DecodingConfig

NEVER = float("-inf")


def propose(
    logits: torch.Tensor, excluded: Sequence[int], config: DecodingConfig, uniforms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate tokens and confidences, `[n]` int64 and `[n]` float32, on the CPU.

    Args:
        logits: `[n, vocab]` float32.
        excluded: token ids that are no candidates.
        config: temperature and filters.
        uniforms: `[n]` float64 in 0..1, one draw a row; unused at temperature 0.
    """
    allowed = logits.clone()
    allowed[:, list(excluded)] = NEVER
    if config.temperature == 0.0:
        tokens = allowed.argmax(dim=-1, keepdim=True)
        confidence = logits.softmax(dim=-1).gather(-1, tokens)
        return tokens.squeeze(-1).cpu(), confidence.squeeze(-1).cpu()
    assert uniforms is not None
    # Relative to the largest, no temperature is too small to divide by.
    allowed = (allowed - allowed.amax(dim=-1, keepdim=True)) / config.temperature
    allowed = _filter(allowed, config.top_k, config.top_p)
    probabilities = allowed.softmax(dim=-1)
    cumulative = probabilities.double().cumsum(dim=-1)
    targets = uniforms.to(logits.device).unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)
    confidence = probabilities.gather(-1, tokens)
    return tokens.squeeze(-1).cpu(), confidence.squeeze(-1).cpu()


def _filter(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set logits outside the `top_k` largest and the nucleus of `top_p` to -inf."""
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, NEVER)
    if top_p < 1.0:
        ranked = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ranked.values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        beyond = before > top_p
        beyond[:, 0] = False
        logits = logits.scatter(-1, ranked.indices, ranked.values.masked_fill(beyond, NEVER))
    return logits
