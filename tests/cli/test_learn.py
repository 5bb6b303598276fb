import json
import sys

import pytest
from typer.testing import CliRunner

from meshwright.cli import learn
from meshwright.cli.main import app
from meshwright.errors import ConfigError

LESSON = '"""One device: what a step costs.\n\nMore."""\n\ndef main():\n    print("a picture")\n'


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """A package of lessons 0 and 12 in the place of ours."""
    folder = tmp_path / "some_lessons"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "lesson_12.py").write_text('"""Twelve."""\n')
    (folder / "lesson_00.py").write_text(LESSON)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(learn, "_PACKAGE", "some_lessons")
    yield lambda *arguments: CliRunner().invoke(app, ["learn", *arguments])
    for name in [name for name in sys.modules if name.startswith("some_lessons")]:
        del sys.modules[name]


def test_a_lesson_runs(invoke):
    assert invoke("0").stdout == "a picture\n"


def test_a_lesson_with_json_prints_one_object(invoke):
    assert json.loads(invoke("0", "--json").stdout) == {
        "lesson": 0,
        "title": "One device: what a step costs.",
        "ok": True,
    }


def test_the_list_imports_nothing(invoke):
    assert invoke().stdout == "  0  One device: what a step costs.\n 12  Twelve.\n"
    assert json.loads(invoke("--json").stdout)["lessons"]["12"] == "Twelve."
    assert "some_lessons.lesson_00" not in sys.modules


def test_an_unknown_lesson_lists_what_there_is(invoke):
    error = invoke("3").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "E114 there is no lesson 3; lessons: 0, 12"


def test_choices_go_to_a_lesson_that_takes_them(invoke, tmp_path):
    text = '"""Choose."""\n\ndef main(*names):\n    print(names)\n'
    (tmp_path / "some_lessons/lesson_13.py").write_text(text)
    assert invoke("13", "this", "that").stdout == "('this', 'that')\n"
    assert invoke("13").stdout == "()\n"
    error = invoke("0", "this").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "E114 lesson 0 has nothing to choose; it was given this"
