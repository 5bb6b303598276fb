import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError
from tests.reporting.folders import make_folder


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def refusal(*arguments) -> str:
    error = invoke(*arguments).exception
    assert isinstance(error, ConfigError)
    return str(error)


def test_the_page_goes_into_the_folder(tmp_path):
    folder = make_folder(tmp_path / "run")
    result = invoke(folder)
    assert result.exit_code == 0, result.exception
    assert result.stdout.splitlines()[-1] == f"wrote {folder / 'report.html'}"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_json_names_figures_and_what_is_missing(tmp_path):
    folder, out = make_folder(tmp_path / "run"), tmp_path / "page.html"
    (folder / "verify.json").unlink()
    value = json.loads(invoke(folder, folder, "--out", out, "--json").stdout)
    assert value["report"] == str(out)
    assert out.is_file()
    first, second = value["runs"]
    assert first == second
    assert {figure["anchor"]: figure["marks"] for figure in first["figures"]}["loss"] == 7
    assert [missing["anchor"] for missing in first["missing"]] == ["verify"]
    assert "meshwright verify" in first["missing"][0]["why"]


def test_folders_that_are_no_runs_are_refused(tmp_path):
    assert refusal(tmp_path / "none").startswith("E295 ")
    assert "is not a folder (metrics.jsonl" in refusal(tmp_path / "none")
    assert "is a folder without a run's files" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"loss"\n', "metrics.jsonl:2  cannot be read"),
        ("metrics.jsonl", '{"loss": 1}\n', "an object with a whole number `step`"),
        ("result.json", "[]", "it is no JSON object"),
        ("result.json", "{", "result.json  cannot be read"),
        ("plan.lock.json", "{}", "it is no plan ('mesh')"),
        ("resolved.toml", "a =", "resolved.toml  cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, said):
    folder = make_folder(tmp_path / "run")
    (folder / name).write_text(text)
    message = refusal(folder)
    assert message.startswith("E296 ")
    assert said in message


def test_a_page_that_cannot_be_written(tmp_path):
    folder = make_folder(tmp_path / "run")
    message = refusal(folder, "--out", tmp_path / "none" / "page.html")
    assert message.startswith("E297 cannot write ")
    assert "No such file or directory. Name a place that can be written" in message


def test_a_report_needs_no_torch(tmp_path):
    folder = make_folder(tmp_path / "run")
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['meshwright', 'report', sys.argv[1]]\n"
        "from meshwright.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_serve_prints_where_and_ends_when_interrupted(tmp_path, monkeypatch):
    def interrupted(_live):
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.reporting.live.LiveReport.serve", interrupted)
    folder = make_folder(tmp_path / "run")
    result = invoke(folder, "--serve")
    assert result.exit_code == 0, result.exception
    page, tunnel = result.stdout.splitlines()
    assert page.startswith("http://127.0.0.1:")
    assert tunnel.startswith("from elsewhere: ssh -L ")
    assert not (folder / "report.html").exists()
    assert "E295" in refusal(tmp_path / "none", "--serve")
