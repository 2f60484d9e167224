"""`relume chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from relume.cli.loading import LoadOptions, loading_options, open_engine, read_weights
from relume.cli.options import Model, decoding_options
from relume.config import DecodingConfig
from relume.core import RelumeError

if TYPE_CHECKING:
    from relume.engine.engine import Engine

HELP = "/clear starts anew, /exit ends (so does Ctrl-D); Ctrl-C stops an answer."


@loading_options
@decoding_options
def chat(
    model: Model,
    decoding: DecodingConfig,
    loading: LoadOptions,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Show the canvas filling in.")] = False,
) -> None:
    """Talk with a model; it sees the whole conversation."""
    engine = open_engine(model, loading)
    if not engine.tokenizer.has_chat_template:
        raise RelumeError(f"{model}: its tokenizer has no chat template; use relume generate --raw")
    read_weights(engine)
    console = Console(highlight=False, emoji=False)
    console.print(HELP, style="dim")
    opening = [{"role": "system", "content": system}] if system is not None else []
    messages = list(opening)
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(opening)
        elif line.startswith("/"):
            console.print(HELP, style="dim")
        elif line:
            question = {"role": "user", "content": line}
            answer = _answer(engine, [*messages, question], decoding, live, console)
            if answer is not None:
                messages += [question, {"role": "assistant", "content": answer}]


def _answer(
    engine: Engine, messages: list[dict[str, str]], decoding: DecodingConfig, live: bool, console: Console
) -> str | None:
    """Print the answer block by block; `None` if the conversation was refused."""
    from relume.cli.live import watch
    from relume.engine.events import BlockEvent
    from relume.engine.request import Request

    try:
        stream = engine.stream_request(Request(messages=messages, decoding=decoding))
    except RelumeError as error:
        console.print(str(error), style="red", markup=False)
        return None
    try:
        if live:
            watch(stream, engine.tokenizer.decode)
            console.print(stream.result.text, markup=False, soft_wrap=True)
        else:
            for event in stream:
                if isinstance(event, BlockEvent):
                    console.print(event.text, end="", markup=False, soft_wrap=True)
            console.print()
    except KeyboardInterrupt:
        stream.cancel()
        for _ in stream:
            pass
        console.print(" (stopped)", style="dim")
    return stream.result.text
