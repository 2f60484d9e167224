"""The canvas filling in, on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from relume.engine.events import BlockEvent, IterationEvent
from relume.engine.stream import Stream

MASK_SYMBOL = "░"
_INCOMPLETE = "\ufffd"  # what a part of a multi-byte character decodes to

Decode = Callable[[Sequence[int]], str]


def watch(stream: Stream, decode: Decode) -> None:
    """Run a stream to its end while showing its blocks; leaves a terminal as it was, a file with all pictures."""
    console = Console(stderr=True, emoji=False, highlight=False)
    if not console.is_terminal:
        for picture in pictures(stream, decode):
            console.print(picture, soft_wrap=True)
        return
    with Live(console=console, transient=True, auto_refresh=False) as display:
        for picture in pictures(stream, decode):
            display.update(last_lines(picture, console), refresh=True)


def pictures(stream: Stream, decode: Decode) -> Iterator[Text]:
    """Run a stream to its end; the canvas after each iteration."""
    canvas = LiveCanvas(decode, stream.num_prompt_tokens)
    for event in stream:
        if isinstance(event, IterationEvent):
            canvas.take(event)
            yield canvas.render()
        elif isinstance(event, BlockEvent):
            canvas.finish(event)


def last_lines(picture: Text, console: Console) -> Text:
    """What of a picture fits the screen: a terminal cannot take back what has scrolled away."""
    lines = picture.wrap(console, console.width)
    return Text("\n").join(lines[-max(1, console.height - 1) :])


class LiveCanvas:
    """Finished text, and the current block coloured by the confidence of each token when it was taken."""

    def __init__(self, decode: Decode, num_prompt_tokens: int) -> None:
        self._decode = decode
        self._num_prompt_tokens = num_prompt_tokens
        self._finished = ""
        self._taken: dict[int, tuple[int, float]] = {}  # position: (token, confidence)
        self._event: IterationEvent | None = None

    def take(self, event: IterationEvent) -> None:
        """Note what an iteration changed."""
        taken = zip(event.tokens, event.confidences, strict=True)
        self._taken.update(zip(event.positions, taken, strict=True))
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
        cells = list(zip(itertools.count(event.start), event.token_ids, event.masked, strict=False))
        generated = [cell for cell in cells if cell[0] >= self._num_prompt_tokens]
        for masked, group in itertools.groupby(generated, key=lambda cell: cell[2]):
            run = list(group)
            if masked:
                picture.append(MASK_SYMBOL * len(run), style="dim")
                continue
            for (position, token, _), piece in zip(run, self._pieces([t for _, t, _ in run]), strict=True):
                picture.append(piece, style=self._style(event, position, token))
        picture.append(f"\n block {event.block}, iteration {event.iteration + 1}", style="dim")
        return picture

    def _pieces(self, tokens: list[int]) -> Iterator[str]:
        """The text that each token of a run adds; a character belongs to the token that completes it."""
        before = ""
        for end in range(1, len(tokens) + 1):
            text = self._decode(tokens[:end])
            text = text if end == len(tokens) else text.rstrip(_INCOMPLETE)
            yield text[len(before) :]
            before = text

    def _style(self, event: IterationEvent, position: int, token: int) -> str:
        taken, confidence = self._taken.get(position, (None, 0.0))
        if taken != token:  # a deletion or a split moved it here
            return ""
        return confidence_style(confidence) + (" underline" if position in event.edits else "")


def confidence_style(confidence: float) -> str:
    """Red at 0, yellow at a half, green at 1."""
    red, green = min(1.0, 2.0 * (1.0 - confidence)), min(1.0, 2.0 * confidence)
    return f"rgb({round(255 * red)},{round(255 * green)},0)"
