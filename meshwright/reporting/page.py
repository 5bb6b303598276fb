"""The page: one HTML file with everything in it, without scripts and without requests.

Owns markup and style. Narrow and wide screens, light and dark, paper, keyboard (data tables are `details`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from meshwright.errors import writing
from meshwright.reporting.figure import Figure, Missing
from meshwright.reporting.figures import figures_of
from meshwright.reporting.reading import RunData
from meshwright.reporting.verdict import comparison, verdict

REPORT = "report.html"
# Colours that colour-blind people tell apart (Okabe and Ito, 2008).
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1a1a1a; --soft: #595959; --grid: #d0d0d0;
  --predicted: #56b4e9; --measured: #0072b2; --wrong: #d55e00; --backward: #009e73; --weight: #e69f00; }
@media (prefers-color-scheme: dark) { :root {
  --page: #16181d; --ink: #ececec; --soft: #b0b4bb; --grid: #3a3f47;
  --predicted: #9ad0f0; --measured: #3a9fdc; --wrong: #ff8a3d; --backward: #27c296; --weight: #f0b73f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1400px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 0 0 .25rem; }
nav a { margin-right: .8rem; } a { color: var(--measured); }
.verdict { font-size: 1.15rem; overflow-wrap: anywhere; }
.runs { display: grid; gap: 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.run { min-width: 0; }
.row { display: grid; align-items: start; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.absent { grid-column: 1 / -1; } .row { grid-auto-flow: dense; }
section { min-width: 0; margin: 1.2rem 0; break-inside: avoid; }
.help, .missing { color: var(--soft); margin: 0 0 .6rem; font-size: .9rem; overflow-wrap: anywhere; }
svg { display: block; max-width: 100%; } svg text { fill: var(--ink); font-size: 13px; }
svg .tick { font-size: 11px; fill: var(--soft); } svg .grid { stroke: var(--grid); }
.predicted { fill: var(--predicted); } .measured { fill: var(--measured); } .wrong { fill: var(--wrong); }
/* A bar of anything at all is seen. */
rect.predicted { stroke: var(--predicted); } rect.measured { stroke: var(--measured); }
rect.wrong { stroke: var(--wrong); }
.line { fill: none; stroke: var(--measured); stroke-width: 2; vector-effect: non-scaling-stroke; }
.point { fill: var(--wrong); } .box { stroke: var(--page); stroke-width: .5; }
.F { fill: var(--measured); } .B, .I { fill: var(--backward); } .W { fill: var(--weight); }
summary { cursor: pointer; } summary:focus-visible, a:focus-visible { outline: 3px solid var(--weight); }
.table { overflow-x: auto; max-height: 24rem; } table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--grid); }
@media print { .table { max-height: none; } nav { display: none; } @page { size: A4; margin: 1.5cm; } }
"""


def as_page(runs: Sequence[RunData]) -> str:
    """The report of one run, or of several side by side."""
    several = len(runs) > 1
    title = "Runs compared" if several else f"Run {runs[0].path}"
    body = [f"<h1>{escape(title)}</h1>"]
    if several:
        columns = ("", *(str(data.path) for data in runs))
        body.append(f'<section id="comparison">{_table(columns, comparison(list(runs)))}</section>')
    columns_html = [_run(data, number if several else 0) for number, data in enumerate(runs, start=1)]
    body.append(f'<div class="runs">{"".join(columns_html)}</div>' if several else columns_html[0])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{''.join(body)}\n</body>\n</html>\n"
    )


def write_report(runs: Sequence[RunData], out: Path | None = None) -> Path:
    """Write the page of `runs`; the default place is the first run's folder.

    Raises:
        ConfigError: E297 where it cannot be written.
    """
    path = out if out is not None else runs[0].path / REPORT
    page = as_page(runs)
    with writing(path):
        path.write_text(page, encoding="utf-8")
    return path


def _run(data: RunData, number: int) -> str:
    """One run; `number` is behind its anchors where there are several."""
    figures = figures_of(data)
    suffix = f"-{number}" if number else ""
    links = "".join(f'<a href="#{figure.anchor}{suffix}">{escape(figure.anchor)}</a> ' for figure in figures)
    name = f"<h2>{escape(str(data.path))}</h2>" if number else ""
    sections = "\n".join(
        _figure(figure, suffix, data.path) if isinstance(figure, Figure) else _missing(figure, suffix)
        for figure in figures
    )
    sections = sections if number else f'<div class="row">{sections}</div>'
    element = "div" if number else "main"
    return (
        f'<{element} class="run">{name}<p class="verdict" id="verdict{suffix}">{escape(verdict(data))}</p>'
        f"<nav>{links}</nav>\n{sections}</{element}>"
    )


def _figure(figure: Figure, suffix: str, path: Path) -> str:
    table = _table(figure.columns, figure.rows)
    name = f"{path.name}-{figure.anchor}.csv"
    link = f'<a download="{escape(name)}" href="data:text/csv;charset=utf-8,{_csv(figure)}">CSV</a>'
    shown = "" if figure.drawing else " open"
    return (
        f'<section id="{figure.anchor}{suffix}" class="figure"><h2>{escape(figure.title)}</h2>\n'
        f'<p class="help">{escape(figure.help)}</p>\n{figure.drawing}\n'
        f"<details{shown}><summary>data</summary>{link}{table}</details></section>"
    )


def _missing(missing: Missing, suffix: str) -> str:
    return (
        f'<section id="{missing.anchor}{suffix}" class="absent"><h2>{escape(missing.title)}</h2>'
        f'<p class="missing">Not shown: {escape(missing.why)}</p></section>'
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    return f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _csv(figure: Figure) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(figure.columns)
    writer.writerows(figure.rows)
    return quote(text.getvalue())
