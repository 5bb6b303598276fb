"""`meshwright verify`: prove that a parallel run computes what one device computes.

Owns the arguments of the verb, its exit code, and the result that stays in a run folder. Knows nothing of what is
compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.output import print_json, stdout_to_stderr
from meshwright.cli.train import require_torch
from meshwright.errors import EXIT_VERIFY_FAILED
from meshwright.reporting.reading import PLAN, VERIFY, fingerprint

if TYPE_CHECKING:
    from meshwright.verification.result import VerifyResult


def verify(  # noqa: PLR0913  (typer makes an option of each parameter)
    source: Annotated[str, typer.Argument(help="run.toml, py:module:function, or a plan.lock.json.")],
    plan: Annotated[str, typer.Option("--plan", help='Keys of the plan, e.g. "zero=2,micro_batch=1".')] = "",
    processes: Annotated[
        int | None,
        typer.Option("-n", "--processes", min=1, help="Candidate ranks (default: the plan's, or 4)."),
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="fp64; or fp32, bf16, fp16 against their measured rounding.")
    ] = "fp64",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Keep the sizes of a known architecture.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Also let another layout go on from a checkpoint of the candidate.")
    ] = True,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare a parallel run with one device; name the first wrong tensor."""
    require_torch()
    from meshwright.launching.verify import SourceOptions, verify_source
    from meshwright.launching.verify_sources import is_of_planner

    options = SourceOptions(
        plan=plan, processes=processes, precision=precision, steps=steps, full=full, resume=resume
    )
    with stdout_to_stderr(active=json_output):
        result = verify_source(source, options)
    of_run = Path(source).name == PLAN and not is_of_planner(Path(source))
    if of_run and not plan and processes is None:
        keep_result(Path(source).parent, result)
    if json_output:
        print_json(result.to_json())
    else:
        print(result.table())
    if not result.ok:
        raise typer.Exit(EXIT_VERIFY_FAILED)


def keep_result(folder: Path, result: VerifyResult) -> None:
    """Keep what was found for the plan of a run in its folder, for its report."""
    document = {**result.to_json(), "fingerprint": fingerprint(folder)}
    (folder / VERIFY).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
