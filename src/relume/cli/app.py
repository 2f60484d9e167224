"""The commands, one module each."""

from __future__ import annotations

import typer

from relume.cli import chat, generate, inspect_model, synth

app = typer.Typer(
    name="relume",
    help="Run mixture-of-experts diffusion language models on computers that cannot hold them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("inspect")(inspect_model.inspect_model)
app.command("synth")(synth.synth)
