import json
import re
import subprocess
import sys

import pytest

from meshwright import __version__
from meshwright.cli import main as entry
from meshwright.errors import DoesNotFitError, WorkerError

VERBS = [
    *("ckpt", "train", "verify", "demo", "config", "doctor", "draw", "launch", "learn", "explain"),
    *("partition", "plan", "report", "simulate"),
]


def run(*arguments, cwd=None):
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def call_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as stop:
        entry.main()
    return stop.value.code


def test_help_lists_the_verbs_that_exist():
    done = run("--help")
    assert done.returncode == 0
    commands = done.stdout.split("Commands:")[1]
    assert sorted(re.findall(r"^  (\w+)", commands, re.MULTILINE)) == sorted(VERBS)


def test_the_command_line_starts_without_torch():
    code = "import meshwright.cli.main, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(monkeypatch, capsys):
    assert call_main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"meshwright {__version__}\n"


def test_a_users_mistake_has_its_code_and_no_traceback():
    done = run("config", "show", "plan.zeroo=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "E101 command line  unknown key 'plan.zeroo'. Did you mean 'plan.zero'?\n"


def test_errors_as_one_json_object():
    done = run("config", "show", "plan.zeroo=1", "plan.ep=2", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "E101"
    assert [item["code"] for item in error["errors"]] == ["E101", "E110"]
    assert "plan.ep = 2 is not built yet" in error["message"]


@pytest.mark.parametrize("arguments", [["plan"], ["train"], ["learn", "one"], ["doctor", "--fast"]])
def test_usage_errors_exit_with_2(monkeypatch, capsys, arguments):
    assert call_main(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage" in captured.err


def test_usage_errors_are_json_too(monkeypatch, capsys):
    assert call_main(monkeypatch, "learn", "one", "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "E100"
    assert "integer" in error["message"]


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (DoesNotFitError("E301", "96 of 71 GiB"), 3),
        (WorkerError("E401", "rank 1 died"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch, capsys, raised, code):
    def fail(*_arguments, **_options):
        raise raised

    monkeypatch.setattr("meshwright.cli.doctor.inspect_machine", fail)
    assert call_main(monkeypatch, "doctor") == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.strip() == ("" if code == 130 else str(raised))


def test_json_after_the_dashes_is_the_scripts(monkeypatch, capsys):
    assert call_main(monkeypatch, "train", "none.py", "--", "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("E100 cannot read 'none.py'")
