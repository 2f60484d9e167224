"""Fits the output head, so that blocks take as many iterations as those of a trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from relume.synth.attention import context_size, orthonormal
from relume.synth.canvases import Canvas, expected_commits
from relume.synth.probe import Probe
from relume.synth.vocabulary import HeadShape, Vocabulary

THRESHOLD = 0.95
_FINE = 4  # spreads between two for which confidences are computed; in between their logit is interpolated
_COARSE_SPREADS = torch.tensor([2.5 * 1.35**step for step in range(10)])
_SPREADS = torch.tensor([2.5 * 1.35 ** (step / _FINE) for step in range(9 * _FINE + 1)])


def fit_head(
    vocabulary: Vocabulary, probe: Probe, canvases: Sequence[Canvas], norm: torch.Tensor
) -> tuple[HeadShape, float]:
    """Choose the spread of the logits on the canvases' last hidden states.

    Args:
        vocabulary: draws the head.
        probe: after the last layer.
        canvases: those of the probe.
        norm: weight of the final norm.

    Returns:
        The head's shape, and the tokens per iteration at `THRESHOLD` that it is expected to give.
    """
    x = probe.normed(norm).float()
    rows = (probe.masked & probe.in_block).nonzero().flatten()
    shared = torch.stack((vocabulary.common, x[rows].mean(dim=0)))
    shared[:, : context_size(x.shape[1])] = 0.0  # the head ignores these anyway
    ignored = orthonormal(list(shared))
    values = torch.full((len(_SPREADS), len(x)), float("nan"))
    values[:, rows] = _confidences(vocabulary, x[rows], ignored)
    wanted = expected_commits(canvases[0].blocks.shape[1])
    rates = [_tokens_per_iteration(probe.snapshots(each.unsqueeze(1)), canvases) for each in values]
    best = min(range(len(rates)), key=lambda index: abs(math.log(rates[index] / wanted)))
    return HeadShape(float(_SPREADS[best]), ignored, float((x @ vocabulary.common).mean())), rates[best]


def _confidences(vocabulary: Vocabulary, x: torch.Tensor, ignored: Sequence[torch.Tensor]) -> torch.Tensor:
    """Largest probability `[spreads, tokens]` of each state under every spread."""
    largest = torch.full((len(x),), float("-inf"))
    total = torch.full((len(_COARSE_SPREADS), len(x)), float("-inf"))
    for logits in vocabulary.logits(x, ignored):
        largest = torch.maximum(largest, logits.amax(dim=1))
        for index, spread in enumerate(_COARSE_SPREADS):
            total[index] = torch.logaddexp(total[index], (logits * spread).logsumexp(dim=1))
    odds = torch.logit(torch.exp(_COARSE_SPREADS.unsqueeze(1) * largest - total), eps=1e-6)
    steps = torch.arange(len(_SPREADS))
    left = (steps // _FINE).clamp(max=len(_COARSE_SPREADS) - 2)
    part = (steps / _FINE - left).unsqueeze(1)
    return torch.sigmoid(odds[left] * (1.0 - part) + odds[left + 1] * part)


def _tokens_per_iteration(confidences: Sequence[torch.Tensor], canvases: Sequence[Canvas]) -> float:
    """Expected commits in an iteration, mean over blocks.

    Whether a position's confidence is above the threshold changes little while a block is decoded. So a
    block has committed, after an iteration, the share of positions that are above in the pair of adjacent
    snapshots with about as many masks; but at least one token more than before.
    """
    block_length = canvases[0].blocks.shape[1]
    iterations = 0
    for values, canvas in zip(confidences, canvases, strict=True):
        above = values.squeeze(-1) > THRESHOLD  # nowhere where a token is: its confidence is NaN
        num_masked = canvas.masked[0::2].sum(dim=1)
        shares = (above[0::2] | above[1::2]).sum(dim=1) / num_masked.clamp(min=1)
        committed = 0.0
        while committed < block_length:
            pair = int((num_masked - (block_length - committed)).abs().argmin())
            committed = max(committed + 1.0, float(shares[pair]) * block_length)
            iterations += 1
    return block_length * len(canvases) / iterations
