import json

import pytest

from meshwright.launching.planned import Planned
from meshwright.launching.recording import lines_of, recorded
from meshwright.launching.this_host import host_file
from meshwright.planner.asking import ask
from meshwright.planner.experience import experience_file, read_experience
from meshwright.planner.plans import make_plans
from meshwright.training.config import load_config


@pytest.fixture(scope="module")
def entry():
    run = {"model": {"source": "preset:gpt-nano"}, "data": {"seq_len": 128}, "train": {"global_batch": 32}}
    return make_plans(ask(run, {"cluster": "2xcpu"})).best.to_json()


def result_of(folder, seconds, steps=20):
    found = {
        "run_dir": str(folder),
        "steps": steps,
        "step_seconds_median": seconds,
        "peak_memory_bytes": [3 << 20, 5 << 20],
    }
    (folder / "result.json").write_text(json.dumps({**found, "environment": {}}))
    return found


def test_a_run_keeps_what_was_predicted_and_teaches(entry, tmp_path):
    plan = Planned(load_config(None, []), entry, on_host=True, runs=4)
    place = experience_file(host_file(tmp_path))
    whole = recorded(result_of(tmp_path, 1.2 * entry["step_seconds"]), plan, cache=tmp_path)
    said = whole["prediction"]
    assert said["step_error"] == pytest.approx(1 / 1.2 - 1)
    assert said["memory_error"] == pytest.approx(entry["memory_bytes"]["peak"] / (5 << 20) - 1)
    assert said["runs_before"] == 4
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored == {**whole, "environment": {}}
    assert read_experience(place).runs == 1
    assert read_experience(place).compute > 1
    (line,) = lines_of(whole)
    assert f"predicted {entry['step_seconds']:.3g} (-17%)" in line
    # Few steps have no steady median, and formulas are not mended by this host's runs.
    recorded(result_of(tmp_path, 1.0, steps=3), plan, cache=tmp_path)
    recorded(result_of(tmp_path, 1.0), Planned(plan.resolved, entry), cache=tmp_path)
    assert read_experience(place).runs == 1


def test_a_plan_that_was_far_off_is_said(entry, tmp_path):
    plan = Planned(load_config(None, []), entry)
    whole = recorded(result_of(tmp_path, 2 * entry["step_seconds"]), plan, cache=tmp_path)
    assert lines_of(whole)[1].startswith("W286 the step took 2.00 x what the plan said")


def test_without_a_prediction_nothing_changes(tmp_path):
    result = result_of(tmp_path, 1.0)
    assert recorded(result, Planned(load_config(None, [])), cache=tmp_path) == result
    assert lines_of(result) == []
