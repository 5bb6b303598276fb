"""`meshwright config show|schema`: every key with its value and origin, and the schema of a run file.

Owns the printing. The values come from `training/config.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json
from meshwright.training.units import toml_literal

app = typer.Typer(help="Look at a run's configuration.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN.TOML] [a.b=c ...]", help="A run file, overrides.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Every key, its value and where the value comes from."""
    from meshwright.training.config import PRECEDENCE, load_config

    arguments = arguments or []
    path = Path(arguments.pop(0)) if arguments and "=" not in arguments[0] else None
    resolved = load_config(path, arguments)
    if json_output:
        config = resolved.config.model_dump(mode="json")
        origins, warnings = dict(resolved.origins), list(resolved.warnings)
        print_json({"config": config, "origins": origins, "warnings": warnings})
        return
    rows = [
        (key, "" if value is None else toml_literal(value), resolved.origins[key])
        for key, value in resolved.values().items()
    ]
    width = max(len(key) for key, _, _ in rows)
    room = max(len(value) for _, value, _ in rows)
    print(f"# precedence: {PRECEDENCE}")
    for key, value, origin in rows:
        print(f"{key:{width}}  {value:{room}}  {origin}")
    for warning in resolved.warnings:
        typer.echo(warning, err=True)


@app.command()
def schema(
    json_output: Annotated[bool, typer.Option("--json", help="On one line.")] = False,
) -> None:
    """The JSON Schema of a run file, for editors and checkers."""
    from meshwright.training.config import RunConfig

    document = RunConfig.model_json_schema()
    if json_output:
        print_json(document)
    else:
        print(json.dumps(document, indent=2, ensure_ascii=False))
