"""The canvas filling in, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from relume.engine.events import BlockEvent, IterationEvent
from relume.engine.stream import Stream

MASK_SYMBOL = "░"


def watch(stream: Stream, decode: Callable[[Sequence[int]], str]) -> None:
    """Run a stream to its end while showing its blocks; leaves the terminal as it was."""
    console = Console(stderr=True)
    canvas = LiveCanvas(decode)
    with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="visible") as display:
        for event in stream:
            if isinstance(event, IterationEvent):
                canvas.take(event)
                display.update(canvas.render(), refresh=True)
            elif isinstance(event, BlockEvent):
                canvas.finish(event)


class LiveCanvas:
    """Finished text, and the current block coloured by the confidence of each token when it was taken."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._finished = ""
        self._confidence: dict[int, float] = {}
        self._edits: set[int] = set()
        self._event: IterationEvent | None = None

    def take(self, event: IterationEvent) -> None:
        """Note what an iteration changed."""
        self._confidence.update(zip(event.positions, event.confidences, strict=True))
        self._edits = set(event.edits)
        self._event = event

    def finish(self, event: BlockEvent) -> None:
        """Move a finished block to the text above."""
        self._finished += event.text or ""
        self._event = None

    def render(self) -> Text:
        """The picture of this moment."""
        picture = Text(self._finished)
        event = self._event
        if event is None:
            return picture
        for offset, (token, masked) in enumerate(zip(event.token_ids, event.masked, strict=True)):
            position = event.start + offset
            if masked:
                picture.append(MASK_SYMBOL, style="dim")
            elif position in self._confidence:
                underline = " underline" if position in self._edits else ""
                picture.append(
                    self._decode([token]), style=confidence_style(self._confidence[position]) + underline
                )
        picture.append(f"\n block {event.block}, iteration {event.iteration + 1}", style="dim")
        return picture


def confidence_style(confidence: float) -> str:
    """Red at 0, yellow at a half, green at 1."""
    red, green = min(1.0, 2.0 * (1.0 - confidence)), min(1.0, 2.0 * confidence)
    return f"rgb({round(255 * red)},{round(255 * green)},0)"
