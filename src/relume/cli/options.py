"""Options that several commands share, derived from the configuration classes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from relume.config import DecodingConfig, DTypeName
from relume.core import RelumeError

_R = TypeVar("_R")

Model = Annotated[str, typer.Argument(help="A checkpoint folder, or a hub id organisation/name.")]
DType = Annotated[DTypeName, typer.Option(help="float32 (bit-identical whatever runs beside), bfloat16, or auto.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what was downloaded before.")]
PrefillBlocks = Annotated[
    int | None, typer.Option(help="Blocks of the prompt in one forward; by default as many as hold 512 tokens.")
]

_HELP = {
    "decoder": "threshold (LLaDA2.0), joint (2.1) or indel (2.2); the model's own by default.",
    "mode": "Of joint: quality (thresholds 0.7, 0.5) or speed (0.5, 0.0).",
    "threshold": "A mask becomes a token when its confidence is greater.",
    "edit_threshold": "A token changes when another one's confidence is greater (joint, indel).",
    "block_length": "Positions decoded together; the model's own by default.",
    "iterations": "Iterations over which a block's least number of commits is spread.",
    "max_post_iterations": "Iterations after the last mask is gone (joint, indel).",
    "max_tokens": "The longest answer.",
    "temperature": "0 takes the most likely token.",
    "top_k": "Draw among the K most likely tokens; 0 for all.",
    "top_p": "Draw among the most likely tokens of this total probability.",
    "seed": "Of the random draws.",
    "stop": "End the answer before this text; may be given several times.",
    "ignore_eos": "Decode max-tokens whatever the model says.",
    "eos_early_stop": "Leave a block once its end of text is certain; the answer is the same.",
}


def decoding_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command one option per field of `DecodingConfig`; it receives them as `decoding`.

    A value that the configuration refuses is wrong usage.
    """
    hints = get_type_hints(DecodingConfig)
    fields = dataclasses.fields(DecodingConfig)

    @functools.wraps(command)
    def run(**values: Any) -> _R:
        given = {field.name: values.pop(field.name) for field in fields}
        try:
            decoding = DecodingConfig.from_mapping(given)
        except RelumeError as error:
            raise typer.BadParameter(str(error)) from None
        return command(decoding=decoding, **values)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "decoding"]
    options = []
    for field in fields:
        kind: Any = list[str] if field.name == "stop" else hints[field.name]
        default: Any = [] if field.name == "stop" else field.default
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, typer.Option(help=_HELP[field.name], rich_help_panel="Decoding")],
            )
        )
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
