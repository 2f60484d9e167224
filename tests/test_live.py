"""What the live canvas draws."""

from __future__ import annotations

import io

from rich.console import Console

from relume.cli.live import MASK_SYMBOL, LiveCanvas, confidence_style, last_lines
from relume.engine.events import IterationEvent


def event(
    tokens: list[int], masked: list[bool], positions: list[int], edits: tuple[int, ...] = ()
) -> IterationEvent:
    return IterationEvent(
        block=0,
        start=0,
        iteration=0,
        positions=tuple(positions),
        tokens=tuple(tokens[position] for position in positions),
        confidences=tuple(0.5 for _ in positions),
        edits=edits,
        token_ids=tuple(tokens),
        masked=tuple(masked),
    )


def latin(tokens: object) -> str:
    return bytes(tokens).decode(errors="replace")  # type: ignore[call-overload, no-any-return]


def test_prompt_is_left_out_and_masks_are_drawn() -> None:
    canvas = LiveCanvas(latin, num_prompt_tokens=2)
    canvas.take(event([*b"??ab"], [False, False, False, True], [2]))
    assert canvas.render().plain.splitlines()[0] == "a" + MASK_SYMBOL


def test_characters_of_several_tokens_are_drawn_whole() -> None:
    canvas = LiveCanvas(latin, num_prompt_tokens=0)
    tokens = [*"é€x".encode()]
    canvas.take(event(tokens, [False] * len(tokens), list(range(len(tokens)))))
    assert canvas.render().plain.splitlines()[0] == "é€x"


def test_tokens_that_a_deletion_moved_are_drawn_without_a_confidence() -> None:
    canvas = LiveCanvas(latin, num_prompt_tokens=0)
    canvas.take(event([*b"abc"], [False] * 3, [0, 1, 2]))
    canvas.take(event([*b"bc "], [False, False, True], []))
    picture = canvas.render()
    assert picture.plain.splitlines()[0] == "bc" + MASK_SYMBOL
    assert not [span for span in picture.spans if str(span.style).startswith("rgb")]


def test_confidence_runs_from_red_to_green() -> None:
    assert [confidence_style(c) for c in (0.0, 0.5, 1.0)] == ["rgb(255,0,0)", "rgb(255,255,0)", "rgb(0,255,0)"]


def test_only_the_last_lines_that_fit_are_shown() -> None:
    console = Console(file=io.StringIO(), width=10, height=4)
    canvas = LiveCanvas(latin, num_prompt_tokens=0)
    tokens = [*(b"0123456789" * 9)]
    canvas.take(event(tokens, [False] * 90, [0]))
    shown = last_lines(canvas.render(), console).plain
    assert shown.count("\n") == 2
    assert "iteration" in shown
