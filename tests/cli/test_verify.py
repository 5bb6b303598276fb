import json
import re

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError, ConfigErrors
from meshwright.layout.check import PlanRequest, make_plan

RUN_FILE = """
[model]
source = "preset:llama-nano"
[plan]
zero = 2
processes = 2
[train]
global_batch = 16
"""
MODULE = """
import torch
from torch import nn

class Data:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index))

def loss(model, batch):
    total = model(batch).square().sum()
    if torch.distributed.is_initialized() and BROKEN:
        total = total * 2
    return total, len(batch)

def make():
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)), loss, Data()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "right_module.py").write_text(MODULE + "\nBROKEN = False\n")
    (tmp_path / "wrong_module.py").write_text(MODULE + "\nBROKEN = True\n")


def invoke(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments])


def test_a_run_file_is_cut_and_passes():
    result = invoke("run.toml")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("reference  one process, float64     candidate  zero2x2 ")
    assert lines[1].startswith("model      llama-nano, depth, width and vocab cut, same code path, 3 steps")
    assert lines[-1].startswith("PASS in ")
    assert all(line.startswith("  ✓ ") for line in lines[2:-1])


def test_a_wrong_module_ends_with_4_and_says_where():
    result = invoke("py:wrong_module:make", "--processes", "2", "--steps", "1", "--json")
    assert result.exit_code == 4
    value = json.loads(result.stdout)
    assert {"ok", "reference", "candidate", "checks", "seconds"} <= set(value)
    keys = {"name", "ok", "compared", "worst_relative", "worst_tensor", "first_wrong"}
    assert all(keys <= set(check) for check in value["checks"])
    assert not value["ok"]
    first = value["first_wrong"]
    assert (first["check"], first["step"], first["ratio"]) == ("loss", 1, pytest.approx(2.0))
    assert "2 = dp" in first["cause"]


def test_a_module_passes_as_it_is_built():
    result = invoke("py:right_module:make", "-n", "2", "--plan", "zero=3", "--precision", "fp32")
    assert result.exit_code == 0, result.output
    assert "zero3x2" in result.stdout
    assert "one process, float32" in result.stdout


def test_the_plan_of_a_run_folder(tmp_path):
    plan = make_plan(
        PlanRequest("zero1", micro_batch=2, sync="ring", transport="gloo"), world_size=2, global_batch=8
    )
    (tmp_path / "plan.lock.json").write_text(plan.to_json())
    alone = invoke("plan.lock.json")
    assert "E100 'plan.lock.json' names no model" in str(alone.exception)
    (tmp_path / "run.toml").rename(tmp_path / "resolved.toml")
    result = invoke("plan.lock.json", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "zero1x2 · micro 2 x accumulate 2" in result.stdout
    assert "sync ring · transport gloo on 2 CPU processes (gloo, ring)" in result.stdout


BAD_MODULE = """
import random, time
import torch
from torch import nn
from torch.nn import functional as F

class Data:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, torch.tensor(-100 if index % 5 == 3 else index % 2)

def model(dropout=0.0):
    return nn.Sequential(nn.Linear(4, 9), nn.Dropout(dropout), nn.Linear(9, 2))

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] != -100).sum()

def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def noisy(model, batch):
    total, count = loss(model, batch)
    return total * (1 + random.SystemRandom().random()), count

def changing_build():
    made = model()
    with torch.no_grad():
        made[0].bias.fill_(time.perf_counter_ns() % 10**6)
    return made, loss, Data()

def noisy_loss():
    return model(), noisy, Data()

def bare_scalar():
    return model(), mean, Data()

def dropping():
    return model(0.3), loss, Data()
"""


@pytest.mark.parametrize(
    ("function", "more", "text"),
    [
        ("changing_build", "", r"E801 two builds .* first in '0\.bias' \(1 of 4"),
        ("noisy_loss", "", "E802 the loss of one batch on equal models is"),
        ("bare_scalar", "", r"E112 .* return \(sum, count\)"),
        ("dropping", '[train]\ndropout = "native"', 'E804 train.dropout = "native" on 2 ranks'),
    ],
)
def test_models_that_cannot_be_compared(function, more, text, tmp_path):
    """The same errors as from Python, through the worker that meets them."""
    (tmp_path / "bad_module.py").write_text(BAD_MODULE)
    (tmp_path / "bad.toml").write_text(f'[model]\nsource = "py:bad_module:{function}"\n{more}\n')
    error = invoke("bad.toml", "-n", "2").exception
    assert isinstance(error, ConfigError)
    assert re.search(text, str(error), re.IGNORECASE)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("run.toml", "--plan", "ep=2"), ConfigErrors, "E110 .*plan.ep = 2 is not built yet"),
        (("run.toml", "--plan", "dp=4"), None, "E200 .*, but 2 processes started"),
        (("model.onnx",), ConfigError, "E100 'model.onnx' is neither a run file"),
        (("missing.toml",), ConfigErrors, "E100 .*missing.toml"),
        (("py:nowhere:make",), ConfigError, "E111 .*nowhere"),
    ],
)
def test_sources_and_plans_that_cannot_be(arguments, kind, text):
    error = invoke(*arguments).exception
    assert kind is None or isinstance(error, kind)
    assert re.search(text, str(error))
