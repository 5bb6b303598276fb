import json
import os
import subprocess

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError, ConfigErrors

RESULT = {"run_dir": "runs/x", "final_loss": 2.5, "mfu": None}


@pytest.fixture
def launched(monkeypatch):
    """Fakes of the launcher; the list of their calls."""
    calls = []

    def launch_config(resolved, *, json_output, resume):
        calls.append((resolved, json_output, resume))
        # Noise of a library in this process, and of a worker.
        print("loading")
        subprocess.run(["echo", "from a worker"], check=True)
        return RESULT

    def launch_script(path, *, processes, arguments):
        calls.append((path.name, processes, arguments))
        return 5 if "fail" in arguments else 0

    monkeypatch.setattr("meshwright.launching.launch_config", launch_config, raising=False)
    monkeypatch.setattr("meshwright.launching.launch_script", launch_script, raising=False)
    return calls


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[plan]\nzero = 1\n")
    (tmp_path / "loop.py").write_text("")
    return lambda *arguments: CliRunner().invoke(app, ["train", *arguments])


def test_a_run_file_goes_to_the_launcher(launched, invoke):
    result = invoke("run.toml", "train.seed=3", "-n", "2")
    assert result.exit_code == 0
    ((resolved, json_output, resume),) = launched
    plan = resolved.config.plan
    assert (plan.zero, plan.processes, resolved.config.train.seed, json_output) == (1, 2, 3, False)
    assert resume is None
    invoke("run.toml", "--resume", "auto")
    assert launched[1][2] == "auto"


def test_json_is_the_only_thing_on_stdout(launched, invoke, capfd):
    result = invoke("run.toml", "--json")
    assert json.loads(result.stdout) == RESULT
    assert launched[0][1] is True
    outside = capfd.readouterr()
    assert outside.out == ""
    assert "from a worker" in outside.err
    assert os.fstat(1).st_mode, "stdout is open again"


def test_only_the_rank_with_a_result_prints_it(launched, invoke, monkeypatch):
    monkeypatch.setattr("meshwright.launching.launch_config", lambda resolved, **given: {})
    result = invoke("run.toml", "--json")
    assert (result.exit_code, result.stdout) == (0, "")


def test_settings_without_effect_are_said(launched, invoke):
    result = invoke("run.toml", "train.schedule.decay=10%")
    assert "W101 command line  train.schedule.decay" in result.stderr


def test_a_script_gets_its_own_arguments(launched, invoke):
    assert invoke("loop.py", "-n", "4", "--lr", "0.1", "x=1").exit_code == 0
    assert invoke("loop.py", "--", "--json").exit_code == 0
    assert launched == [("loop.py", 4, ["--lr", "0.1", "x=1"]), ("loop.py", 1, ["--json"])]


def test_a_scripts_exit_code_is_ours(launched, invoke):
    assert invoke("loop.py", "fail").exit_code == 5
    result = invoke("loop.py", "fail", "--json")
    assert json.loads(result.stdout) == {"script": "loop.py", "processes": 1, "exit_code": 5}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["run.yaml"], "E100", "'run.yaml' is neither a run file (.toml) nor a script (.py)"),
        (["none.toml"], "E100", "cannot read 'none.toml'"),
        (["none.py"], "E100", "cannot read 'none.py'"),
        (["run.toml", "--lr", "3"], "E100", "'--lr' is not of the form a.b=c; write e.g. lr=1"),
        (["loop.py", "--resume", "auto"], "E100", "--resume auto: a script resumes by itself"),
        (["run.toml", "plan.ep=2"], "E110", "plan.ep = 2 is not built yet; built: ep = 1"),
    ],
)
def test_mistakes_are_found_before_anything_starts(launched, invoke, arguments, code, text):
    error = invoke(*arguments).exception
    assert isinstance(error, ConfigError | ConfigErrors)
    assert error.code == code
    assert text in str(error)
    assert launched == []


def test_without_torch_the_error_says_how_to_install_it(launched, invoke, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for target in ("run.toml", "loop.py"):
        error = invoke(target).exception
        assert error.code == "E001"
        assert 'pip install "meshwright[train]"' in error.message
    assert launched == []
