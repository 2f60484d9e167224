"""Options that several commands share, derived from the configuration classes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

from relume.config import DecodingConfig
from relume.core import RelumeError

_Command = TypeVar("_Command", bound=Callable[..., Any])

Model = Annotated[str, typer.Argument(help="A checkpoint folder, a hub id organisation/name, demo or demo-dmoe.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what was downloaded before.")]

_DECODING = {
    "decoder": "threshold (LLaDA2.0), joint (2.1) or indel (2.2, the default of models made for it).",
    "mode": "Of joint, which it implies: quality (thresholds 0.7, 0.5) or speed (0.5, 0.0).",
    "threshold": "A mask becomes a token when its confidence is greater.",
    "edit_threshold": "A token changes when another one's confidence is greater (joint, indel).",
    "block_length": "Positions decoded together; the model's own by default.",
    "iterations": "Of threshold and indel: iterations over which a block's least number of commits is spread.",
    "max_post_iterations": "Iterations after the last mask is gone (joint, indel).",
    "max_tokens": "The longest answer.",
    "temperature": "0 takes the most likely token.",
    "top_k": "Draw among the K most likely tokens; 0 for all.",
    "top_p": "Draw among the most likely tokens of this total probability.",
    "seed": "Of the random draws.",
    "stop": "End the answer before this text; may be given several times.",
    "ignore_eos": "Decode max-tokens whatever the model says.",
    "eos_early_stop": "Of threshold: leave a block once its end of text is certain; the answer is the same.",
}


def options_of(config: type[Any], parameter: str, texts: Mapping[str, str]) -> Callable[[_Command], _Command]:
    """Give a command one option per field of a configuration class; it receives them built, as `parameter`.

    Defaults and choices are the class's own. A value that the class refuses is wrong usage.
    """
    hints = get_type_hints(config)
    fields = dataclasses.fields(config)

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {field.name: values.pop(field.name) for field in fields}
            try:
                built = config(**given)
            except RelumeError as error:
                raise typer.BadParameter(str(error)) from None
            return command(**{parameter: built}, **values)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
        options = []
        for field in fields:
            assert field.name in texts, f"{field.name} has no help text"
            many = hints[field.name] == tuple[str, ...]  # typer repeats an option for a list only
            kind = list[str] if many else hints[field.name]
            option = typer.Option(help=texts[field.name], rich_help_panel=parameter.capitalize())
            options.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=[] if many else field.default,
                    annotation=Annotated[kind, option],
                )
            )
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return cast("_Command", run)

    return decorate


decoding_options = options_of(DecodingConfig, "decoding", _DECODING)
