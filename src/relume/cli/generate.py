"""`relume generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.loading import LoadOptions, loading_options, open_engine, read_weights
from relume.cli.options import Model, decoding_options
from relume.config import DecodingConfig
from relume.core import RelumeError

if TYPE_CHECKING:
    from relume.engine.engine import Engine
    from relume.engine.request import Request
    from relume.engine.result import GenerationResult


@loading_options
@decoding_options
def generate(
    model: Model,
    decoding: DecodingConfig,
    loading: LoadOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; standard input if left out.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Show the canvas filling in, on stderr.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Answer one prompt, given as an argument, in a file, or on standard input."""
    text = _read_prompt(prompt, file)
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template: leave --raw out")
    engine = open_engine(model, loading)
    request = _make_request(engine, text, system, raw, decoding)
    engine.check(request)  # before the weights, which take long
    read_weights(engine)
    stream = engine.stream_request(request)
    if live:
        from relume.cli.live import watch

        watch(stream, engine.tokenizer.decode)
    else:
        for _ in stream:
            pass
    _print_result(stream.result, json_output)


def _make_request(engine: Engine, text: str, system: str | None, raw: bool, decoding: DecodingConfig) -> Request:
    """`text` as one user message if the tokenizer has a chat template, else as it is."""
    from relume.engine.request import Request

    if raw or (system is None and not engine.tokenizer.has_chat_template):
        return Request(prompt=text, decoding=decoding)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return Request(messages=[*messages, {"role": "user", "content": text}], decoding=decoding)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt as an argument or with --file, not both")
    if file is None and prompt is not None and prompt != "-":
        return prompt
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one as an argument, with --file, or on standard input")
    try:
        data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except OSError as error:
        raise RelumeError(f"{file}: the prompt cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        place = "standard input" if file is None else file
        raise RelumeError(f"{place}: the prompt is no UTF-8 text (byte {error.start})") from None


def _print_result(result: GenerationResult, json_output: bool) -> None:
    typer.echo(result.text)
    if json_output:
        document = {
            "text": result.text,
            "token_ids": list(result.token_ids),
            "finish_reason": result.finish_reason,
            "statistics": result.statistics.to_dict(),
        }
        typer.echo(json.dumps(document))
