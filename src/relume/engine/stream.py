"""A request decoded event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from relume.core import Phase, RelumeError
from relume.engine.events import Event
from relume.engine.result import GenerationResult
from relume.engine.scheduler import Scheduler
from relume.engine.sequence import DecodingSequence


class Stream(Iterator[Event]):
    """Events of one request: an `IterationEvent` per iteration, a `BlockEvent` per finished block.

    Iterating drives the decoding. `cancel` may be called from any thread: the iteration under way ends,
    then the stream does. `result` holds the answer once the stream has ended. After an
    iteration that failed, of which nobody knows how far it came, the stream can only be cancelled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sequence: DecodingSequence,
        finish: Callable[[DecodingSequence], GenerationResult],
    ) -> None:
        self._scheduler = scheduler
        self._scheduler.waiting.append(sequence)
        self._sequence = sequence
        self._finish = finish
        self._cancelled = False
        self._failed = False
        self._pending: deque[Event] = deque()
        self._result: GenerationResult | None = None

    def __iter__(self) -> Self:
        """The stream itself."""
        return self

    def __next__(self) -> Event:
        """The next event; runs forwards until there is one."""
        while not self._pending:
            if self._result is not None:
                raise StopIteration
            if self._cancelled:
                self._sequence.cancel()
            elif self._failed:
                raise RelumeError("an iteration of this stream failed: start the request again, or cancel it")
            else:
                self._step()
            if self._sequence.phase is Phase.DONE:
                self._result = self._finish(self._sequence)
        return self._pending.popleft()

    def _step(self) -> None:
        self._failed = True
        self._pending.extend(event for _, events in self._scheduler.step() for event in events)
        self._failed = False

    @property
    def num_prompt_tokens(self) -> int:
        """Positions before the answer."""
        return len(self._sequence.prompt)

    def cancel(self) -> None:
        """End the stream early; `result` keeps the blocks that were finished."""
        self._cancelled = True

    @property
    def result(self) -> GenerationResult:
        """The finished request. Raises `RelumeError` while events are left."""
        if self._result is None:
            raise RelumeError("the stream has not ended: iterate to its end, or cancel it and iterate once more")
        return self._result
