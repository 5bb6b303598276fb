"""Every block of README.md runs, and prints what the README shows, but for the numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?:<!-- (?P<comment>[^>]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
NOT_RUN = "not run in tests: "
# Digits, with what stands between and around them, and names of machines.
NUMBER = re.compile(r"\d[\d.,_]*(?:e[+-]\d+)?")


@dataclass(frozen=True)
class Block:
    comment: str
    language: str
    text: str


def blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [Block(m["comment"] or "", m["language"], m["text"]) for m in BLOCK.finditer(text)]


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Each `$ command` of a console block with the output lines below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def runnable() -> list[tuple[str, list[str]]]:
    shown = [
        block for block in blocks() if block.language == "console" and not block.comment.startswith(NOT_RUN)
    ]
    return [command for block in shown for command in commands(block)]


def shape(line: str) -> str:
    return " ".join(NUMBER.sub("#", line).split())


def assert_shows(expected: list[str], output: str) -> None:
    """`expected` lines come in `output` in this order, numbers aside; a `...` stands for any text."""
    lines = [shape(line) for line in output.splitlines()]
    position = 0
    for line in expected:
        if line.strip() == "...":
            continue
        pattern = re.compile(".*".join(map(re.escape, shape(line).split("..."))))
        matching = (i for i in range(position, len(lines)) if pattern.fullmatch(lines[i]))
        found = next(matching, None)
        assert found is not None, f"README shows {line!r}; after line {position} of:\n{output}"
        position = found + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the README's files and the repository's examples."""
    path = tmp_path_factory.mktemp("readme")
    for block in blocks():
        if block.comment.startswith("file: "):
            (path / block.comment.removeprefix("file: ")).write_text(block.text)
    (path / "examples").symlink_to(ROOT / "examples")
    return path


@pytest.mark.parametrize(
    ("command", "expected"), runnable(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_command_prints_what_the_readme_shows(folder: Path, command: str, expected: list[str]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert_shows(expected, done.stdout.replace(f"{folder}/", ""))
    if command == "python compare.py":  # the law, to the digits printed
        assert len({line.partition("loss ")[2] for line in done.stdout.splitlines()}) == 1


def test_every_block_is_run_or_says_why_not() -> None:
    kinds = {"console", "python", "toml", "text"}
    assert {block.language for block in blocks()} <= kinds
    files = [block for block in blocks() if block.language in ("python", "toml")]
    assert all(block.comment.startswith("file: ") for block in files)
    assert len(runnable()) >= 8


def test_the_comparison_sees_a_missing_line() -> None:
    assert_shows(["a 1", "...", "c ... e"], "a 22\nb\nc  d 3.5 e\n")
    with pytest.raises(AssertionError, match="README shows 'b 1'"):
        assert_shows(["c", "b 1"], "b 2\nc\n")


def test_shown_demo_output_has_the_form_of_a_run(folder: Path) -> None:
    """The demo itself takes a minute: its lines are held against a shorter run of the same kind."""
    shown = next(block for block in blocks() if block.language == "text").text.splitlines()
    command = 'meshwright train examples/stdlib.toml "train.stop_at=1 steps" train.eval_every=end train.eval_samples=2'
    command += ' "train.schedule.warmup=0 steps"'
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert_shows(
        [line for line in shown if line.startswith(("plan", "check", "memory", "step=1/"))], done.stdout
    )
