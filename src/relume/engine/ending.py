"""Where an answer ends: end of text, stop strings, the longest length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relume.config import DecodingConfig

_REPLACEMENT = "\ufffd"  # what an incomplete multi-byte character decodes to


@dataclass(frozen=True)
class Ending:
    """An answer so far: cut token ids, cut text, and why it ends (`None`: it does not yet)."""

    token_ids: tuple[int, ...]
    text: str | None
    reason: str | None


class AnswerCutter:
    """Cuts a request's generated tokens to its answer."""

    def __init__(
        self,
        decoding: DecodingConfig,
        eos_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self._stop = decoding.stop
        self._max_tokens = decoding.max_tokens
        self._eos = frozenset(() if decoding.ignore_eos else eos_token_ids)
        self._decode = decode

    def cut(self, generated: Sequence[int]) -> Ending:
        """The answer within all tokens generated so far, in whole blocks."""
        token_ids = tuple(generated[: self._max_tokens])
        reason = "length" if len(generated) >= self._max_tokens else None
        end = next((index for index, token in enumerate(token_ids) if token in self._eos), None)
        if end is not None:
            token_ids, reason = token_ids[: end + 1], "eos"
        if self._decode is None:
            return Ending(token_ids, None, reason)
        text = self._decode(token_ids)
        if (first := self._first_stop(text)) is None:
            return Ending(token_ids, text, reason)
        decode = self._decode
        # Once a prefix contains a stop string, all longer ones do: bisect for the shortest.
        shortest = bisect_left(
            range(len(token_ids)), True, key=lambda n: self._first_stop(decode(token_ids[: n + 1])) is not None
        )
        return Ending(token_ids[: shortest + 1], text[:first], "stop")

    def certain_text(self, ending: Ending) -> str | None:
        """The part of the text that later tokens cannot change."""
        if ending.text is None or ending.reason is not None:
            return ending.text
        text = ending.text.rstrip(_REPLACEMENT)
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return text[:-length]
        return text

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string that is completed first begins; of several completed at once, the longest."""
        found = [(index + len(stop), index) for stop in self._stop if (index := text.find(stop)) >= 0]
        return min(found)[1] if found else None
