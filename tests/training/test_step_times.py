"""Which ranks of a pipeline keep the times of a step, and what they write."""

import json
from types import SimpleNamespace

import pytest
import torch

from meshwright.comm.mesh import World
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.schedule.action import Action
from meshwright.training.step_times import StepTimes, step_times

PLAN = make_plan(PlanRequest(pp=2, dp=2, micro_batch=2), world_size=4, global_batch=8)
CPU = torch.device("cpu")


def test_the_newest_step_is_written(tmp_path):
    executor = SimpleNamespace(clock=None)
    times = StepTimes(executor, 1)
    times.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    program = [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)]
    for step in (10.0, 20.0):
        for at, action in enumerate(program):
            executor.clock(action, step + at, step + at + 0.5, 0.4)
    times.write(tmp_path)
    rows = json.loads((tmp_path / "timeline" / "place-0001.json").read_text())
    assert rows == [["1F0", 20, 20.5], ["1B0", 21, 21.5], ["1F1", 22, 22.5], ["1B1", 23, 23.5]]


@pytest.mark.parametrize(("rank", "place"), [(0, 0), (1, None), (2, 1), (3, None)])
def test_one_rank_of_each_place_keeps_times(rank, place, tmp_path):
    executor = SimpleNamespace(clock=None)
    found = step_times(executor, PLAN, World(rank=rank, size=4, local_rank=rank, local_size=4), CPU)
    assert (found is None) == (place is None) == (executor.clock is None)
    if found is not None:
        executor.clock(Action("F", place, 0), 0.0, 1.0, 1.0)
        found.write(tmp_path)
        assert (tmp_path / "timeline" / f"place-{place:04d}.json").is_file()


def test_clocks_of_several_hosts_and_of_devices_are_not_kept():
    executor = SimpleNamespace(clock=None)
    two_hosts = World(rank=0, size=4, local_rank=0, local_size=2)
    one_host = World(rank=0, size=4, local_rank=0, local_size=4)
    assert step_times(executor, PLAN, two_hosts, CPU) is None
    assert step_times(executor, PLAN, one_host, torch.device("cuda", 0)) is None
    assert step_times(None, PLAN, one_host, CPU) is None
    assert executor.clock is None
