import json

import pytest

from meshwright.errors import ConfigError, PlanError
from meshwright.planner.asking import ask
from meshwright.planner.lock import save_lock
from meshwright.planner.plans import make_plans
from meshwright.planner.take import of_file, take

RUN = {
    "model": {"source": "preset:gpt-nano"},
    "data": {"seq_len": 128},
    "train": {"global_batch": 32},
    "plan": {"processes": 2, "zero": 1},
}
AGAIN = "meshwright plan run.toml"


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "plan.lock.json"
    save_lock(path, make_plans(ask(RUN, {})), source="run.toml")
    return path


def changed(section, **keys):
    return ask({**RUN, section: {**RUN[section], **keys}}, {})


def test_a_plan_is_taken_with_what_was_fixed_and_predicted(lock):
    taken = take(of_file(lock, again=AGAIN), ask(RUN, {}))
    assert (taken.number, taken.keys["zero"], taken.keys["precision"]) == (1, 1, "fp32")
    assert taken.predicted["step_seconds"] > 0
    assert of_file(lock, again=AGAIN).cluster.num_devices == 2


@pytest.mark.parametrize(
    ("section", "keys", "what"),
    [
        ("model", {"num_layers": 8}, "another model"),
        ("data", {"seq_len": 64}, "another batch or sequence length"),
        ("train", {"global_batch": 64}, "another batch or sequence length"),
        ("plan", {"processes": 4}, "another cluster or headroom"),
        ("plan", {"memory_headroom": "20%"}, "another cluster or headroom"),
        ("plan", {"zero": 2}, "other fixed keys"),
    ],
)
def test_a_stale_file_is_refused_with_what_has_changed(lock, section, keys, what):
    with pytest.raises(PlanError) as caught:
        take(of_file(lock, again=AGAIN), changed(section, **keys))
    assert caught.value.code == "E293"
    assert caught.value.exit_code == 2
    assert f"it was made for {what}" in caught.value.message
    assert f"Run `{AGAIN}` again, or leave plan.lock.json out" in caught.value.message


@pytest.mark.parametrize("figure", ["step_seconds", "memory_bytes"])
def test_another_cost_model_makes_a_file_stale(lock, figure):
    value = json.loads(lock.read_text())
    entry = value["plans"][0]
    entry[figure] = 2 * entry[figure] if figure == "step_seconds" else {**entry[figure], "peak": 1.0}
    lock.write_text(json.dumps(value))
    with pytest.raises(PlanError, match=r"E293 .* the cost model said .* and says") as caught:
        take(of_file(lock, again=AGAIN), ask(RUN, {}))
    assert caught.value.code == "E293"


def test_a_file_without_a_plan_that_runs(lock):
    value = json.loads(lock.read_text())
    value["plans"] = [{**value["plans"][0], "trainable": False, "obstacle": "dualpipe is not built"}]
    lock.write_text(json.dumps(value))
    with pytest.raises(PlanError, match=r"E298 .* runs none of its plans: dualpipe is not built"):
        take(of_file(lock, again=AGAIN), ask(RUN, {}))


def test_what_is_not_priced_is_not_planned():
    for keys in ({"ownership": "whole"}, {"stages": ["blocks.2"]}, {"sync": "parameter_server"}):
        with pytest.raises(ConfigError, match=r"E283 .* is not priced"):
            changed("plan", **keys)
    with pytest.raises(ConfigError, match="E283"):
        changed("model", source="py:net:build")
    with pytest.raises(ConfigError, match="E282"):
        ask({**RUN, "plan": {}}, {})
    with pytest.raises(ConfigError, match=r"E283 .*fp32.* on cpu only"):
        ask(RUN, {"cluster": "2xh100", "precision": "fp32"})
