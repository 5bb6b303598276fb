"""What a report says should change next: the prices of the changed plans, and reasons where there are none."""

import dataclasses
import json

import pytest

from meshwright.layout.recompute import parse_recompute
from meshwright.planner.changes import best_changes, layout_of_plan
from meshwright.planner.request import make_request
from meshwright.planner.runnable import why_not_trainable
from meshwright.presets import find_model
from meshwright.reporting.figure import Missing
from meshwright.reporting.reading import read_run
from meshwright.reporting.suggestions import suggestions
from meshwright.simulation.job import Layout, Workload
from meshwright.simulation.prediction import predict
from meshwright.simulation.reading import parse_cluster
from tests.reporting.folders import RESULT, make_folder, plan_of

REQUEST = make_request(Workload(find_model("llama-3.1-8b"), 8192, 64), parse_cluster("8xh100"), {})
# Everything computed again, and one sequence at a time: two mistakes that a change of one key each mends.
SLOW = Layout(dp=4, tp=2, zero=3, sequence_parallel=True, recompute="full", micro_batch=1)


def test_each_change_is_priced_runs_and_fits():
    now = predict(REQUEST.work, SLOW, REQUEST.cluster)
    found = best_changes(REQUEST, SLOW)
    assert 1 <= len(found) <= 3
    assert [change.gain for change in found] == sorted((change.gain for change in found), reverse=True)
    assert len({tuple(change.keys) for change in found}) == len(found)
    for change in found:
        assert change.gain == pytest.approx(1 - change.predicted.step.total / now.step.total)
        assert change.gain >= 0.01
        assert change.predicted.memory.peak <= REQUEST.usable_bytes
        assert not why_not_trainable(REQUEST.work, change.predicted.layout)
    assert best_changes(REQUEST, found[0].predicted.layout, least=0.3) == []


def test_a_change_of_one_key_is_named_alone_and_a_default_by_its_value():
    changes = {tuple(item.keys): item for item in best_changes(REQUEST, SLOW, count=20)}
    alone = changes[("recompute",)]
    assert alone.keys == {"recompute": "none"}
    assert alone.predicted.layout == dataclasses.replace(SLOW, recompute="none")
    assert any(len(keys) > 1 for keys in changes), "the best of all changes several"


def test_plans_that_no_price_knows_have_no_layout():
    plan = plan_of()
    assert layout_of_plan(plan) == Layout(dp=2, pp=2, zero=1, micro_batch=4)
    full = dataclasses.replace(plan, recompute=parse_recompute("full"))
    assert layout_of_plan(full).recompute == "full"
    for other in ({"precision": "fp32"}, {"recompute": parse_recompute("every:2")}, {"servers": 1}):
        assert layout_of_plan(dataclasses.replace(plan, **other)) is None


def test_seconds_are_parts_of_the_measured_step(tmp_path):
    found = suggestions(read_run(make_folder(tmp_path / "run")))
    assert found.num_marks == len(found.rows) >= 1
    for text, gain, seconds, _ in found.rows:
        assert text.startswith("plan.")
        assert seconds == pytest.approx(gain * RESULT["step_seconds_median"], rel=1e-3)
    assert "which took 0.5 s" in found.help


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mfu_peak": "measured 512³ bf16 matmul on 1 thread"}, "none that the cost model knows"),
        ({"mfu_peak": None}, "none that the cost model knows"),
        ({"step_seconds_median": None}, "does not say it"),
    ],
)
def test_a_run_without_suggestions_says_why(tmp_path, change, why):
    folder = make_folder(tmp_path / "run")
    (folder / "result.json").write_text(json.dumps({**RESULT, **change}))
    found = suggestions(read_run(folder))
    assert isinstance(found, Missing)
    assert why in found.why


def test_a_model_without_a_shape_and_a_plan_without_a_price_say_why(tmp_path):
    folder = make_folder(tmp_path / "run")
    text = (folder / "resolved.toml").read_text()
    (folder / "resolved.toml").write_text(text.replace("preset:gpt-nano", "py:mine:model"))
    assert "has no shape that is known" in suggestions(read_run(folder)).why
    plan = dataclasses.replace(plan_of(), precision="fp32")
    assert "no price is known of" in suggestions(read_run(make_folder(tmp_path / "two", plan=plan))).why
