"""The entry point: the verbs, and how errors become texts, JSON and exit codes.

Owns the `meshwright` command. Must not import torch, nor anything that a verb only needs when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from meshwright import __version__
from meshwright.cli import (
    ckpt,
    config,
    demo,
    doctor,
    draw,
    explain,
    launch,
    learn,
    partition,
    plan,
    report,
    simulate,
    train,
    verify,
)
from meshwright.cli.output import print_error
from meshwright.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError, MeshwrightError

app = typer.Typer(
    name="meshwright",
    help="Train large models on many devices; the result never depends on how the mesh is factored.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train large models on many devices; the result never depends on how the mesh is factored."""


# A script's own options, e.g. `--lr 0.1`, pass through; a run file's arguments are checked by their form.
app.command(name="train", context_settings={"ignore_unknown_options": True})(train.train)
app.command(name="demo")(demo.demo)
app.command(name="verify")(verify.verify)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(config.app, name="config")
app.add_typer(launch.app, name="launch")
app.command(name="draw")(draw.draw)
app.command(name="partition")(partition.partition)
app.command(name="doctor")(doctor.doctor)
app.command(name="learn")(learn.learn)
app.command(name="plan")(plan.plan)
app.command(name="report")(report.report)
app.command(name="simulate")(simulate.simulate)
app.command(name="explain")(explain.explain)


def main() -> None:
    """Run the command line and leave the process with its exit code; no traceback for users' mistakes."""
    # What follows `--` belongs to a user's script.
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    json_output = "--json" in own
    try:
        app(prog_name="meshwright")
    except MeshwrightError as error:
        print_error(error, json_output=json_output)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as stop:
        # typer has printed a usage error to stderr; a caller that reads JSON gets it there as well.
        usage = stop.__context__
        is_usage = isinstance(usage, Exception) and not isinstance(usage, typer.Exit)
        if json_output and is_usage and stop.code == EXIT_CONFIG:
            print_error(ConfigError("E100", str(usage), where="command line"), json_output=True)
        raise
