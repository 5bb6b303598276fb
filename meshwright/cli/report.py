"""`meshwright report RUN [RUN...]`: run folders as one HTML file.

Owns the arguments and where the file goes. Must not import torch.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json
from meshwright.reporting.figure import Figure
from meshwright.reporting.figures import figures_of
from meshwright.reporting.live import LiveReport
from meshwright.reporting.page import write_report
from meshwright.reporting.reading import RunData, read_run
from meshwright.reporting.verdict import verdict


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN [RUN...]", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes (default: report.html in the first folder).")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve it, live, until interrupted.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Write one HTML file about a run, or several side by side."""
    if serve:
        _serve(folders)
        return
    runs = [read_run(folder) for folder in folders]
    path = write_report(runs, out)
    if json_output:
        print_json({"report": str(path), "runs": [_described(data) for data in runs]})
        return
    for data in runs:
        print(f"{data.path}  {verdict(data)}")
    print(f"wrote {path}")


def _serve(folders: list[Path]) -> None:
    for folder in folders:
        read_run(folder)  # what is no run is said here and not in a browser
    with LiveReport(folders) as live, contextlib.suppress(KeyboardInterrupt):
        print(f"{live.url}  (this machine alone; ends with Ctrl-C)")
        print(f"from elsewhere: ssh -L {live.port}:127.0.0.1:{live.port} {socket.gethostname()}", flush=True)
        live.serve()


def _described(data: RunData) -> dict[str, object]:
    figures = figures_of(data)
    return {
        "run_dir": str(data.path),
        "verdict": verdict(data),
        "figures": [
            {"anchor": figure.anchor, "title": figure.title, "marks": figure.num_marks}
            for figure in figures
            if isinstance(figure, Figure)
        ],
        "missing": [
            {"anchor": figure.anchor, "title": figure.title, "why": figure.why}
            for figure in figures
            if not isinstance(figure, Figure)
        ],
    }
