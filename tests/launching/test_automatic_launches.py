"""plan.mode = "auto" of a local run: measured once, written down with reasons, kept when the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.launching import deciding, jobs, launch_config
from meshwright.launching.verify import job_of
from meshwright.training.config import load_config
from meshwright.training.measured import Measured
from meshwright.verification.job import Functions
from tests.training.test_deciding import make_costs
from tests.training.test_kept_plan import PLAN, write

# No shape that the planner knows.
MODEL = "model.source=py:some.module:function"
GIVEN = (MODEL, "plan.mode=auto", "plan.processes=2", "train.global_batch=8", "plan.pp=2")


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[str]:
    """What would have been started, in order: ranks that measure, ranks that train."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    found: list[str] = []

    def measure(target, *, processes, run_dir):
        found.append(f"{processes} measure")
        return [Measured(make_costs(), "", None)] * processes

    def train(target, *, processes, run_dir):
        found.append(f"{processes} train {target.args[0].plan.stages}")
        return [{"steps": 1}]

    monkeypatch.setattr(deciding, "run_local", measure)
    monkeypatch.setattr(jobs, "run_local", train)
    return found


def test_a_plan_is_decided_before_ranks_train_and_written_down(started, capsys):
    launch_config(load_config(None, GIVEN), json_output=False)
    assert started == ["2 measure", "2 train ('layers.3',)"]
    assert "auto   Net: 6 units → pp 2 x dp 1, 8 micro-batches" in capsys.readouterr().out
    text = Path("runs/run-0001/resolved.toml").read_text()
    assert 'mode = "given"  # auto (command line)' in text
    assert 'stages = ["layers.3"]  # auto: longest stage 1.167 x the mean' in text
    assert "pp = 2  # command line" in text
    again = load_config(Path("runs/run-0001/resolved.toml"))
    launch_config(again, json_output=True)
    assert started[2:] == ["2 train ('layers.3',)"], "what was decided is given from then on"
    launch_config(load_config(None, GIVEN), json_output=True)
    assert "auto   Net" in capsys.readouterr().err


def test_a_run_that_goes_on_keeps_its_plan(started, capsys):
    write(Path("runs/mine"), 2, PLAN)
    given = [MODEL, "plan.mode=auto", "plan.processes=4", "train.global_batch=8", "save.dir=runs/mine"]
    launch_config(load_config(None, given), json_output=False, resume="auto")
    launch_config(load_config(None, given), json_output=False, resume="runs/mine/ckpt/step-00000002")
    assert started == ["4 train ('blocks.3',)"] * 2
    assert "kept from step-00000002" in capsys.readouterr().out
    given[2] = "plan.processes=2"
    launch_config(load_config(None, given), json_output=False, resume="auto")
    assert started[2] == "2 measure", "other processes are planned anew"


def test_what_cannot_be_planned_starts_no_rank_that_trains(started, monkeypatch):
    poor = Measured(make_costs(), "", 100)
    monkeypatch.setattr(deciding, "run_local", lambda target, **given: [poor, poor])
    with pytest.raises(DoesNotFitError, match="E277"):
        launch_config(load_config(None, GIVEN), json_output=False)
    uncut = Measured(None, "E261 it asks for a value.", None)
    monkeypatch.setattr(deciding, "run_local", lambda target, **given: [uncut, uncut])
    with pytest.raises(PlanError, match=r"E279 plan.pp = 2"):
        launch_config(load_config(None, GIVEN), json_output=False)
    assert started == []


def test_verify_compares_what_was_decided(started):
    functions = Functions(list, list, list)
    job = job_of(functions, plan="mode=auto,pp=2", processes=2, options={"global_batch": 8})
    assert (job.plan.stages, job.plan.num_microbatches) == (("layers.3",), 8)
    assert started == ["2 measure"]


def test_own_loops_name_their_plan():
    import meshwright

    wanted = r'E278 plan.mode = "auto" looks at the model before'
    with pytest.raises(PlanError, match=wanted), meshwright.job("mode=auto"):
        pass
