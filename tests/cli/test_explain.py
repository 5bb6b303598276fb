import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshwright.cli
from meshwright.cli.catalogue import CATALOGUE
from meshwright.cli.concepts import CONCEPTS
from meshwright.cli.explain import find_topic
from meshwright.cli.main import app
from meshwright.errors import ConfigError

PACKAGE = Path(meshwright.cli.__file__).parents[1]
# Words of the texts themselves, not places that raise.
TEXTS = re.compile(r"(codes_\w+|concepts)\.py")


def codes_in_source():
    """Codes that stand as a text of their own, or begin one (a warning), anywhere in the package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "cli" and TEXTS.fullmatch(path.name):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(r"([EW]\d{3})( .*)?", node.value, re.DOTALL)
                found |= {match[1]} if match else set()
    return found


def test_every_code_in_the_source_is_explained():
    assert codes_in_source() - {entry.code for entry in CATALOGUE} == set()


def test_every_explained_code_is_in_the_source():
    assert {entry.code for entry in CATALOGUE} - codes_in_source() == set()


def test_codes_are_listed_once_in_order():
    codes = [entry.code for entry in CATALOGUE]
    assert codes == sorted(set(codes))


def test_names_are_unique_and_as_they_are_looked_up():
    names = [name for concept in CONCEPTS for name in (concept.name, *concept.aliases)]
    assert len(set(names)) == len(names)
    for concept in CONCEPTS:
        for name in (concept.name, *concept.aliases):
            assert find_topic(name) is concept


def test_pictures_fit_a_terminal():
    for concept in CONCEPTS:
        lines = (concept.text + "\n" + concept.picture).splitlines()
        assert max(map(len, lines)) <= 110, concept.name
        assert len(concept.picture.splitlines()) > 1


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("ZeRO-1", "zero1"),
        ("zero 2", "zero2"),
        ("FSDP", "zero3"),
        ("global_batch", "global batch"),
        ("TP", "axes"),
    ],
)
def test_concepts_by_other_names(typed, name):
    assert find_topic(typed).name == name


def test_a_code_prints_meaning_and_fix():
    result = CliRunner().invoke(app, ["explain", "e203"])
    assert result.stdout.startswith("E203  the global batch cannot be cut evenly\n")
    assert "What to do: " in result.stdout
    assert json.loads(CliRunner().invoke(app, ["explain", "E203", "--json"]).stdout)["topic"] == "E203"


def test_a_concept_prints_its_picture():
    result = CliRunner().invoke(app, ["explain", "axes"])
    for axis, cut in (("pp", "layer"), ("dp", "batch"), ("cp", "sequence"), ("tp", "channel")):
        assert re.search(rf"^  {cut} +{axis} ", result.stdout, re.MULTILINE)
    assert "picture" in json.loads(CliRunner().invoke(app, ["explain", "mfu", "--json"]).stdout)


def test_without_a_topic_all_are_listed():
    result = CliRunner().invoke(app, ["explain"])
    assert len(result.stdout.splitlines()) == len(CATALOGUE) + len(CONCEPTS)
    listed = json.loads(CliRunner().invoke(app, ["explain", "--json"]).stdout)
    assert listed["concepts"].keys() == {concept.name for concept in CONCEPTS}


def test_an_unknown_topic_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"E114 nothing is written about 'zerro3'\. Did you mean 'zero3'\?"):
        find_topic("zerro3")
