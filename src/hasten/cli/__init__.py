"""The command line, one module a command; torch and transformers are imported inside commands."""

from __future__ import annotations

import typer

from hasten.cli import bench, calibrate, chat, generate, info, methods, serve, train, verify
from hasten.cli.guard import Commands
from hasten.cli.options import Version

__all__ = ["app"]

app = typer.Typer(
    name="hasten",
    cls=Commands,
    help="Makes any causal language model answer faster without changing what it says.",
    epilog="A fault? HASTEN_DEBUG=1 shows where it happened.",
    add_completion=False,
    pretty_exceptions_enable=False,  # faults are told in one line by `Commands`
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(context: typer.Context, version: Version = False) -> None:
    """Show the help when no command is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("methods")(methods.methods)
app.command("info")(info.info)
app.command("calibrate")(calibrate.calibrate)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("serve")(serve.serve)
app.add_typer(train.app, name="train")
