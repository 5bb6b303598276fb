"""`meshwright learn N`: run a lesson.

Owns finding lessons by number. A lesson is a module `meshwright.lessons.lesson_NN` with `main() -> None`; where `main`
takes texts, they come from the command line.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.output import print_json, stdout_to_stderr
from meshwright.errors import ConfigError

_PACKAGE = "meshwright.lessons"


def learn(
    number: Annotated[int | None, typer.Argument(help="Which lesson; without it: the list.")] = None,
    choices: Annotated[
        list[str] | None, typer.Argument(help="What a lesson lets you choose, e.g. faults in lesson 13.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run lesson N: one idea, measured on this machine."""
    lessons = find_lessons()
    if number is None:
        if json_output:
            print_json({"lessons": {str(key): _title(path) for key, path in lessons.items()}})
        else:
            print("\n".join(f"{key:3}  {_title(path)}" for key, path in lessons.items()))
        return
    if number not in lessons:
        listed = ", ".join(map(str, lessons)) or "none"
        raise ConfigError("E114", f"there is no lesson {number}; lessons: {listed}")
    with stdout_to_stderr(active=json_output):
        main = importlib.import_module(f"{_PACKAGE}.{lessons[number].stem}").main
        if choices and not inspect.signature(main).parameters:
            raise ConfigError(
                "E114", f"lesson {number} has nothing to choose; it was given {' '.join(choices)}"
            )
        main(*(choices or ()))
    if json_output:
        print_json({"lesson": number, "title": _title(lessons[number]), "ok": True})


def find_lessons() -> dict[int, Path]:
    """Number -> source file of every lesson that is installed, in order; nothing is imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("lesson_*.py"))
    return {int(match[1]): file for file in files if (match := re.fullmatch(r"lesson_(\d+)", file.stem))}


def _title(path: Path) -> str:
    """The first line of a lesson's docstring, read without importing torch."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem).splitlines()[0]
