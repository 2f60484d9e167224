"""The commands, one module each."""

from __future__ import annotations

from typing import Annotated

import typer

from relume import __version__
from relume.cli import (
    bench,
    chat,
    distill,
    eval_model,
    generate,
    inspect_model,
    machine,
    pack,
    plan,
    simulate,
    synth,
    trace,
    train,
)

app = typer.Typer(
    name="relume",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def relume(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Run mixture-of-experts diffusion language models on computers that cannot hold them."""
    if version:
        typer.echo(f"relume {__version__}")
        raise typer.Exit


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("inspect")(inspect_model.inspect_model)
app.command("plan")(plan.plan)
app.command("machine")(machine.machine)
app.command("synth")(synth.synth)
app.command("pack")(pack.pack)
app.command("train")(train.train)
app.command("distill")(distill.distill)
app.command("eval")(eval_model.eval_model)
app.command("simulate")(simulate.simulate)
app.add_typer(trace.trace, name="trace")
app.add_typer(bench.bench, name="bench")
