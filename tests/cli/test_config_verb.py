import json

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.training.config import KNOWN_KEYS


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[train]\nstop_at = "20 steps"\n')
    return lambda *arguments: CliRunner().invoke(app, ["config", *arguments])


def test_show_prints_every_key_with_value_and_origin(invoke):
    result = invoke("show", "run.toml", "plan.zero=2")
    assert result.exit_code == 0
    first, *rows = result.stdout.splitlines()
    assert first == "# precedence: default < base < file < a.b=c"
    assert [row.split()[0] for row in rows] == list(KNOWN_KEYS)
    shown = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
    assert shown["train.stop_at"].split("  ")[0] == '"20 steps"'
    assert shown["train.stop_at"].endswith("run.toml:2")
    assert shown["plan.zero"].split() == ["2", "command", "line"]
    assert shown["plan.dp"].split() == ["default"]


def test_show_takes_overrides_alone(invoke):
    result = invoke("show", "plan.zero=1", "train.schedule.decay=5%", "--json")
    shown = json.loads(result.stdout)
    assert shown["config"]["plan"]["zero"] == 1
    assert shown["config"]["train"]["stop_at"] == "1000 steps"
    assert shown["origins"]["plan.zero"] == "command line"
    assert shown["warnings"][0].startswith("W101 ")


def test_schema_knows_every_key(invoke):
    for options in ([], ["--json"]):
        schema = json.loads(invoke("schema", *options).stdout)
        assert schema["properties"].keys() == {"model", "data", "train", "plan", "save", "log"}
        assert schema["$defs"]["PlanConfig"]["properties"]["zero"]["enum"] == [0, 1, 2, 3]
        assert "5000 steps" in schema["$defs"]["TrainConfig"]["properties"]["stop_at"]["examples"]
