import pytest

from meshwright.errors import PlanError
from meshwright.launching.planned import Planned, planned
from meshwright.planner.asking import ask, sections_of
from meshwright.planner.lock import save_lock
from meshwright.planner.plans import make_plans
from meshwright.training.config import load_config

# Where no host was measured.
CACHE = "data.cache_dir=/nowhere"


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "plan.lock.json"
    resolved = load_config(None, ["plan.zero=1"])
    save_lock(path, make_plans(ask(sections_of(resolved), {"cluster": "2xcpu"})), source="run.toml")
    return path


def test_the_plan_of_a_file_becomes_keys_with_their_origin(lock):
    found = planned(load_config(None, ["plan.zero=1", f"plan.lock={lock}", CACHE]), world_size=None)
    assert found.predicted is not None
    resolved, plan = found.resolved, found.resolved.config.plan
    assert (plan.processes, plan.zero, plan.micro_batch) == (2, 1, found.predicted["micro_batch"])
    assert resolved.origins["plan.micro_batch"] == "plan.lock.json"
    assert resolved.origins["plan.zero"] == "command line"
    # A worker of torchrun starts nobody: no number of local processes is set for it.
    found = planned(load_config(None, ["plan.zero=1", f"plan.lock={lock}", CACHE]), world_size=2)
    assert found.resolved.config.plan.processes is None


def test_another_number_of_processes_is_refused(lock):
    with pytest.raises(PlanError, match=r"E294 .*plans for 2 devices, and 4 processes are asked for"):
        planned(load_config(None, ["plan.zero=1", f"plan.lock={lock}", CACHE]), world_size=4)


def test_a_stale_file_is_refused_with_the_command_that_makes_it_for_this_run(lock, tmp_path):
    texts = ["plan.tp=2", "plan.sequence_parallel=true", "train.global_batch=16 samples", f"plan.lock={lock}"]
    with pytest.raises(
        PlanError, match=r"E293 .*another batch or sequence length, other fixed keys"
    ) as caught:
        planned(load_config(None, [*texts, "plan.processes=2", CACHE]), world_size=None)
    command = (
        "meshwright plan run.toml --cluster 2xcpu --batch 16 "
        f"--plan tp=2,sequence_parallel=true --out {lock}` again"
    )
    assert command in caught.value.message


def test_a_plan_for_a_cluster_does_not_start_its_processes_here():
    with pytest.raises(PlanError, match=r"E294 plan.cluster has 6400 devices, and this host has \d+ cores"):
        planned(load_config(None, ["plan.mode=auto", "plan.cluster=6400xh100", CACHE]), world_size=None)
    with pytest.raises(PlanError, match=r"E294 plan.cluster has 64 devices, and 2 processes are asked for"):
        planned(
            load_config(None, ["plan.mode=auto", "plan.cluster=64xh100", "plan.processes=2", CACHE]),
            world_size=None,
        )


def test_without_a_file_nothing_changes():
    resolved = load_config(None, [])
    assert planned(resolved, world_size=None) == Planned(resolved)
