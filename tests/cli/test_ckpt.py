import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from meshwright.checkpoint.manifest import RunFacts
from meshwright.checkpoint.writer import Item, Place, Writer
from meshwright.cli.main import app
from meshwright.errors import CheckpointError

WEIGHT = torch.arange(6.0)


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    """A run folder with checkpoints of steps 2 and 4; the working directory is above it."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/a-0001")
    writer = Writer(Place(folder / "ckpt", 0, 1, "a"), False, [])
    for step in (2, 4):
        run = RunFacts(step, 100 * step, 8 * step, seed=3, optimizer="sgd", config={"model.source": "py:m:f"})
        state = Item("optimizer", "w", "momentum_buffer", (2, 3), 0, WEIGHT)
        writer.save([Item("parameter", "w", "", (2, 3), 0, WEIGHT * step), state], run)
    writer.finish()
    return folder


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["ckpt", *arguments])


def test_ls_lists_the_newest_first_and_names_what_is_damaged(run_dir):
    newest = run_dir / "ckpt" / "step-00000004"
    lines = invoke("ls").stdout.splitlines()
    assert lines[0].startswith(f"{newest}  step 4  0.00 MiB  1 ranks  ")
    assert lines[0].endswith("  complete")
    assert invoke("ls", str(run_dir)).stdout.splitlines() == lines
    file = newest / "rank00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\1")
    assert invoke("ls").stdout.splitlines() == lines, "a look at sizes finds no flipped byte"
    rows = json.loads(invoke("ls", "--check", "--json").stdout)["checkpoints"]
    assert [(row["step"], row["ok"]) for row in rows] == [(4, False), (2, True)]
    assert rows[0]["error"].startswith(f"E502 {file} is damaged: checksum")
    file.unlink()
    assert f"E502 {file} is missing" in invoke("ls").stdout.splitlines()[0]


def test_info_of_a_run_is_of_its_newest_checkpoint(run_dir):
    facts = json.loads(invoke("info", str(run_dir), "--json").stdout)
    assert facts["path"] == str(run_dir / "ckpt" / "step-00000004")
    assert (facts["step"], facts["tokens"], facts["samples"], facts["seed"]) == (4, 400, 32, 3)
    assert (facts["parameters"], facts["optimizer"], facts["source"]) == (6, "sgd", "py:m:f")
    assert facts["kinds"]["optimizer"] == {"tensors": 1, "elements": 6, "bytes": 24}
    text = invoke("info", str(run_dir / "ckpt" / "step-00000002")).stdout
    assert "step      2   tokens 200   next sample 16" in text
    assert "py:m:f   6 parameters   " in text


def test_export_and_import(run_dir):
    result = json.loads(invoke("export", str(run_dir), "out", "--dtype", "bf16", "--json").stdout)
    assert result == {
        "source": str(run_dir / "ckpt" / "step-00000004"),
        "out": "out",
        "files": ["model.safetensors"],
        "tensors": 1,
        "bytes": 12,
    }
    assert torch.equal(load_file("out/model.safetensors")["w"], (WEIGHT * 4).bfloat16().view(2, 3))
    assert "out → back   1 tensors" in invoke("import", "out", "back").stdout
    assert invoke("export", str(run_dir), "dcp", "--to", "dcp").exit_code == 0
    facts = json.loads(invoke("import", "dcp", "all", "--optimizer", "sgd", "--json").stdout)
    assert (facts["step"], facts["optimizer"], facts["kinds"]["optimizer"]["tensors"]) == (4, "sgd", 1)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["ls", "empty"], "E503", "no checkpoint in 'empty'"),
        (["info", "empty"], "E503", "no checkpoint in 'empty'; give a run folder"),
        (
            ["export", "runs/a-0001", "x", "--to", "dcp", "--dtype", "fp16"],
            "E505",
            "a dcp export keeps types",
        ),
        (["import", "empty", "x", "--optimizer", "sgd"], "E505", "safetensors files hold no optimizer state"),
        (["import", "empty", "x"], "E503", "'empty' has no safetensors files"),
    ],
)
def test_mistakes_are_named(run_dir, arguments, code, text):
    Path("empty").mkdir()
    error = invoke(*arguments).exception
    assert isinstance(error, CheckpointError)
    assert error.code == code
    assert text in str(error)


def test_a_damaged_checkpoint_is_not_exported(run_dir):
    file = run_dir / "ckpt" / "step-00000004" / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    error = invoke("export", str(run_dir), "out").exception
    assert error.code == "E502"
    assert not Path("out").exists()


def test_ls_and_info_start_without_torch(run_dir):
    code = (
        "import sys; from meshwright.cli.ckpt import list_all, info; from pathlib import Path\n"
        f"list_all(Path({str(run_dir)!r}), check=True); info(Path({str(run_dir)!r}))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout
