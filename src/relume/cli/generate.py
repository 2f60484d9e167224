"""`relume generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.loading import LoadOptions, load_engine, loading_options
from relume.cli.options import Model, decoding_options
from relume.config import DecodingConfig
from relume.core import RelumeError

if TYPE_CHECKING:
    from relume.engine.engine import Engine
    from relume.engine.events import GenerationResult
    from relume.engine.stream import Stream


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

    engine = load_engine(model, loading)
    stream = start(engine, text, system, raw, decoding)
    if live:
        from relume.cli.live import watch

        watch(stream, engine.tokenizer.decode)
    else:
        for _ in stream:
            pass
    _print_result(stream.result, json_output)


def start(engine: Engine, text: str, system: str | None, raw: bool, decoding: DecodingConfig) -> Stream:
    """Begin to answer `text`, as one user message if the tokenizer has a chat template."""
    options = asdict(decoding)
    if raw or (system is None and not engine.tokenizer.has_chat_template):
        return engine.stream(text, **options)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return engine.stream(messages=[*messages, {"role": "user", "content": text}], **options)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt as an argument or with --file, not both")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RelumeError(f"{file}: the prompt cannot be read ({error})") from None
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one as an argument, with --file, or on standard input")
    return sys.stdin.read()


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
