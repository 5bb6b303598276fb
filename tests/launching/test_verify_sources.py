"""Plans that are verified: of a run's file, of `meshwright plan`, of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright
from meshwright.errors import ConfigError, PlanError
from meshwright.launching import verify as verifying
from meshwright.launching.verify import SourceOptions, verify_source
from meshwright.launching.verify_sources import is_of_planner, read_source
from meshwright.planner.lock import save_lock
from tests.verification.models import Net, Rows, loss_of_labels

RUN = '[model]\nsource = "gpt-nano"\n[data]\nseq_len = 64\n[train]\nglobal_batch = 16\n[plan]\nprocesses = 2\ntp = 2\n'


@pytest.fixture
def verified(monkeypatch, tmp_path) -> list:
    """(configuration, processes) of what would have been compared."""
    found: list = []
    monkeypatch.setattr(
        verifying,
        "verify_config",
        lambda resolved, **options: found.append((resolved.config, options["processes"])),
    )
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture(scope="module")
def plans():
    return meshwright.plan("gpt-nano", cluster="4xh100", global_batch=16, seq_len=64, plan="tp=2,zero=3")


def test_a_file_of_plans_is_verified_with_what_it_was_made_for(verified, plans, tmp_path):
    plans.save("plan.lock.json")
    verify_source("plan.lock.json", SourceOptions())
    ((config, processes),) = verified
    assert (processes, config.plan.tp, config.plan.dp, config.plan.zero) == (4, 2, 2, 3)
    assert (config.model.source, config.plan.precision) == ("preset:gpt-nano", "fp64")
    assert config.model.num_layers is not None  # cut down
    assert is_of_planner(Path("plan.lock.json"))
    assert not is_of_planner(Path("nothing.json"))


def test_the_plan_that_a_run_file_names_is_verified_and_not_another(verified, plans, tmp_path):
    """It was ignored: the layout of the file's other keys was compared."""
    Path("run.toml").write_text(RUN.replace("tp = 2", 'lock = "plan.lock.json"').replace("processes = 2", ""))
    plans.save("plan.lock.json")
    verify_source("run.toml", SourceOptions())
    verify_source("run.toml", SourceOptions(plan="zero=2"))
    assert [(p, c.plan.tp, c.plan.zero) for c, p in verified] == [(4, 2, 3), (4, 2, 2)]
    save_lock(Path("other.json"), plans.found, source="run.toml")
    assert read_source("other.json") == (Path("run.toml"), ['plan.lock="other.json"'])


def test_what_is_no_plan_or_runs_none_is_refused(verified, plans, tmp_path):
    Path("plan.lock.json").write_text("{}")
    with pytest.raises(ConfigError, match="E100 cannot read"):
        verify_source("plan.lock.json", SourceOptions())
    with pytest.raises(ConfigError, match=r"E100 .*nor a plan.lock.json"):
        verify_source("plan.lock", SourceOptions())
    none = meshwright.plan("gpt-nano", cluster="4xh100", global_batch=16, seq_len=64, plan="recompute=half")
    none.save("none.json")
    with pytest.raises(PlanError, match=r"E298 none.json: train runs none of its plans: recompute=half"):
        verify_source("none.json", SourceOptions())
    with pytest.raises(PlanError, match=r"E298 the plan of meshwright.plan: train runs none"):
        meshwright.verify(Net, loss_of_labels, Rows(), plan=none)
    assert verified == []


def test_a_plan_of_a_script_gives_ranks_batch_and_keys(monkeypatch, plans):
    jobs: list = []
    monkeypatch.setattr(verifying, "run_job", lambda job, **_: jobs.append(job))
    meshwright.verify(Net, loss_of_labels, Rows(), plan=plans)
    meshwright.verify(Net, loss_of_labels, Rows(), plan=plans.best.text, processes=4, global_batch=32)
    first, other = jobs
    assert (first.plan.world_size, first.plan.global_batch, first.plan.mesh.size("tp")) == (4, 16, 2)
    assert (other.plan.global_batch, other.plan.mesh, other.plan.policy) == (
        32,
        first.plan.mesh,
        first.plan.policy,
    )
    assert first.plan.precision == "fp64"
