"""Docstrings, open ends, and the files and commands that documents name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

from meshwright.cli.concepts import CONCEPTS
from meshwright.cli.learn import find_lessons
from meshwright.cli.main import app
from tests.house.source import ROOT, modules, parse

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/notes.md", "docs/verify.md")
# Files that a document may name: with a folder, or at the top of the repository.
PATH = re.compile(
    r"`((?:meshwright|tests|benchmarks|docs|examples)/[\w./-]*|[\w.-]+\.(?:md|toml|txt)|Makefile)"
)
SPAN = re.compile(r"`((?:meshwright|make) [^`\n]+)`|^\$? ?((?:meshwright|make) .+)$", re.MULTILINE)
# What users or runs create.
NOT_OURS = {"run.toml", "resolved.toml"}
MAKE_TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
VERBS = set(get_command(app).commands)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def test_every_module_says_what_it_is():
    assert [name for name, path in modules().items() if not ast.get_docstring(parse(path))] == []


def test_open_ends_carry_a_number():
    word = "TO" + "DO"
    files = [
        path
        for folder in ("meshwright", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
    ]
    sources = [path for path in files if path.suffix in (".py", ".md", ".toml")]
    assert len(sources) > 100
    wild = re.compile(rf"\b{word}\b(?!\(#\d+\))")
    assert [str(path) for path in sources if wild.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md", "AGENTS.md"])
def test_files_that_documents_name_exist(document):
    named = set(PATH.findall(text_of(document))) - NOT_OURS
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_architecture_names_every_hop_and_package():
    named = set(PATH.findall(text_of("ARCHITECTURE.md")))
    packages = {f"meshwright/{path.parent.name}/" for path in (ROOT / "meshwright").glob("*/__init__.py")}
    assert packages <= named
    assert {"meshwright/training/loop.py", "meshwright/training/step.py", "meshwright/comm/ops.py"} <= named


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_documents_name_exist(document):
    for quoted, typed in SPAN.findall(text_of(document)):
        program, *words = (quoted or typed).split()
        if program == "make":
            assert words[0] in MAKE_TARGETS, f"{document}: make {words[0]}"
            continue
        if words[0].startswith("-"):
            continue
        assert words[0] in VERBS, f"{document}: meshwright {words[0]}"
        if words[0] == "learn" and words[1:] and words[1].isdigit():
            assert int(words[1]) in find_lessons(), f"{document}: lesson {words[1]}"
        if words[0] == "explain" and len(words) > 1 and not re.fullmatch(r"[EW]\d\d\d", words[1]):
            topics = {name for concept in CONCEPTS for name in (concept.name, *concept.aliases)}
            assert " ".join(words[1:]).strip('"') in topics, f"{document}: explain {words[1:]}"


def test_documents_name_every_example():
    written = "".join(map(text_of, DOCUMENTS))
    assert [
        path.name for path in Path(ROOT, "examples").iterdir() if f"examples/{path.name}" not in written
    ] == []


@pytest.mark.parametrize(
    "decision", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda path: path.stem
)
def test_decisions_are_short_and_name_real_files(decision):
    text = decision.read_text(encoding="utf-8")
    assert re.fullmatch(r"\d{3}-[a-z0-9-]+", decision.stem)
    assert len(text.splitlines()) <= 40
    assert [name for name in PATH.findall(text) if not (ROOT / name).exists()] == []
