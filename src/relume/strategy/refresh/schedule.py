"""When the residents are refreshed, and what the experts of the blocks under decoding were hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relume.core import Phase, SpanInput, SpanSignals

#: Requests whose last iteration is remembered.
_MAX_REQUESTS = 64
#: What hits of all blocks weigh, at most: less than any difference of hits that decayed for a dozen iterations.
_TIE = 1e-6


@dataclass(frozen=True)
class Iteration:
    """Where a forward stands among the iterations of the blocks that it decodes.

    Attributes:
        denoising: it decodes blocks and prefills nothing; the other two are false unless it is.
        first: it is the first iteration of each of them.
        last: each of them is expected to end with it.
    """

    denoising: bool
    first: bool
    last: bool


class IterationWatch:
    """Tells first and last iterations from what is known before a forward."""

    def __init__(self) -> None:
        self._commits: dict[int, int] = {}  # by request whose block goes on: commits of its latest iteration

    def begin_forward(self, spans: Sequence[SpanInput]) -> Iteration:
        """Of a forward over these requests' tokens.

        A block is expected to end if no more is masked than its latest iteration committed, and certainly if
        one position is: an iteration commits at least one.
        """
        blocks = [span for span in spans if span.phase is Phase.DENOISE]
        if not blocks or any(span.phase is Phase.PREFILL for span in spans):
            return Iteration(False, False, False)
        return Iteration(
            denoising=True,
            first=all(span.request not in self._commits for span in blocks),
            last=all(
                int(np.count_nonzero(span.masked)) <= max(1, self._commits.get(span.request, 0)) for span in blocks
            ),
        )

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Take note of which blocks go on."""
        for span in spans:
            if span.phase is Phase.DENOISE and span.next_start == span.start and len(span.next_token_ids):
                self._commits[span.request] = int(np.count_nonzero(span.committed))
            else:
                self._commits.pop(span.request, None)
        while len(self._commits) > _MAX_REQUESTS:  # a cancelled request never ends
            self._commits.pop(next(iter(self._commits)))


class RefreshTimer:
    """Counts iterations since the latest refresh, for several intervals side by side.

    A refresh is due in a block's first iteration and whenever `interval` iterations have passed; in a block's
    last one it is put off, for what it would bring is hardly used any more.

    Attributes:
        intervals: `[n]` int64, in iterations; they may be replaced.
    """

    def __init__(self, intervals: np.ndarray) -> None:
        self.intervals = intervals
        self._passed = intervals.copy()  # the first refresh is due at once

    def begin_forward(self, iteration: Iteration) -> np.ndarray:
        """`[n]` bool: which refresh in this forward."""
        if not iteration.denoising:
            return np.zeros(len(self.intervals), dtype=bool)
        due = np.asarray((self._passed >= self.intervals) | iteration.first) & (not iteration.last)
        self._passed = np.where(due, 1, self._passed + 1)
        return due


class HitCounter:
    """Hits of each expert by the tokens of the active blocks: `h <- decay * h + hits`, from 0 in each block.

    TIDE's published code counts the whole prefix, so what has been written drowns out what is being written.
    Blocks of several requests that do not begin together share the counter and only decay. Among experts that the
    block hits alike, most of them never, those go first that all blocks so far hit more.

    Args:
        size: layers and experts of each.
        decay: see above.
        popularity: `[layers, E]`, where hits of all blocks start from.
    """

    def __init__(self, size: tuple[int, int], decay: float, popularity: np.ndarray | None = None) -> None:
        self._hits = np.zeros(size)
        self._ever = np.zeros(size) if popularity is None else popularity.astype(np.float64)
        self._decay = decay

    def take(self, layers: int | slice, counts: np.ndarray, iteration: Iteration) -> None:
        """Add a denoising forward's hits of one layer, or of several."""
        before = 0.0 if iteration.first else self._decay * self._hits[layers]
        self._hits[layers] = before + counts
        self._ever[layers] += counts

    def ranks(self, layers: slice) -> np.ndarray:
        """`[layers, E]`: the higher, the more worth a slot."""
        ever = self._ever[layers]
        return np.asarray(self._hits[layers] + _TIE * ever / np.maximum(ever.max(axis=1, keepdims=True), 1.0))
