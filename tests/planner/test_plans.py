"""What people read: order of plans, E301 and what fits, scaling, days, files, and questions about them."""

import json
import re

import pytest

from meshwright.errors import ConfigError, DoesNotFitError, PlanError
from meshwright.planner.compare import answer, is_question, layout_from
from meshwright.planner.cost import cost_of, parse_tokens
from meshwright.planner.lock import read_lock, save_lock
from meshwright.planner.plans import make_plans
from meshwright.planner.request import make_request
from meshwright.planner.scaling import parse_range, scale, still_pays
from meshwright.planner.stages import stage_cuts
from meshwright.planner.text import table_lines, warnings_of
from meshwright.presets import find_model
from meshwright.simulation.job import Layout, Workload
from meshwright.simulation.prediction import predict
from meshwright.simulation.reading import parse_cluster

WORK = Workload(find_model("llama-3.1-8b"), 8192, 64)


def ask(cluster="16xa100", fixed=None, work=WORK, **options):
    return make_request(work, parse_cluster(cluster), fixed or {}, **options)


def test_the_first_plan_runs_in_train_and_the_rest_is_in_order():
    found = make_plans(ask(), count=8)
    assert not found.best.obstacle
    times = [plan.predicted.step.total for plan in found.plans[1:]]
    assert times == sorted(times)
    assert found.gap == 0
    entry = found.to_json()["plans"][0]
    assert {
        "mesh",
        "zero",
        "schedule",
        "recompute",
        "micro_batch",
        "num_microbatches",
        "trainable",
        "why",
    } <= set(entry)


def test_what_does_not_fit_says_what_would():
    with pytest.raises(DoesNotFitError, match=r"smallest layout needs .* GiB usable") as caught:
        make_plans(ask("2xl4"))
    assert caught.value.code == "E301"
    assert "devices" in caught.value.message
    with pytest.raises(DoesNotFitError, match=r"without plan\.zero=0"):
        make_plans(ask("16xa100-40", {"zero": 0, "pp": 1, "tp": 1}))


@pytest.mark.parametrize(
    ("cluster", "batch", "fixed", "texts"),
    [
        (
            "64xa100",
            64,
            {"tp": 64},
            ("tp=64 does not divide 32 heads", "without plan.tp=64 (the fastest has"),
        ),
        (
            "8xa100",
            64,
            {"micro_batch": 3},
            ("micro_batch=3 does not divide a batch of 64", "(the fastest has"),
        ),
        ("101xa100", 100, {}, ("dp=101 does not divide a batch of 100", "100 devices · a batch of 101")),
    ],
)
def test_where_nothing_is_legal_the_rules_and_what_is_legal_are_said(cluster, batch, fixed, texts):
    request = ask(cluster, fixed, Workload(WORK.model, 1024, batch))
    with pytest.raises(PlanError, match="E286") as caught:
        make_plans(request)
    assert caught.value.exit_code == 2
    for text in texts:
        assert text in caught.value.message


def test_degrees_that_cannot_be_are_refused_with_the_nearest():
    with pytest.raises(
        PlanError, match=r"plan tp=6 = 6 does not divide the cluster's 16 devices.*4, 8"
    ) as caught:
        ask(fixed={"tp": 6})
    assert caught.value.code == "E286"
    with pytest.raises(PlanError, match="E286"):
        ask(fixed={"tp": 2, "dp": 2, "pp": 1, "cp": 1})
    with pytest.raises(ConfigError, match="E285"):
        ask(headroom=1.5)


def test_days_and_dollars():
    work = Workload(find_model("gpt3-175b"), 2048, 1536)
    request = ask("1024xa100", work=work)
    # Narayanan et al. 2021: 300B tokens on 1,024 A100 in 34 days, written out attention and all of it computed again.
    plan = Layout(dp=16, tp=8, pp=8, chunks=3, schedule="interleaved", recompute="full", attention="unfused")
    cost = cost_of(predict(work, plan, request.cluster), request, parse_tokens("300B tokens"), 2.0)
    assert 30 < cost.days < 38
    assert cost.dollars == pytest.approx(2.0 * cost.days * 24 * 1024)
    with pytest.raises(ConfigError, match="E102"):
        parse_tokens("many")


def test_scaling_says_where_devices_stop_to_pay():
    points = scale(ask("256xa100", work=Workload(WORK.model, 1024, 16)), parse_range("8..256", 256))
    assert [point.num_devices for point in points] == [8, 16, 32, 64, 128, 256]
    seconds = [point.seconds for point in points if point.plan]
    assert seconds == sorted(seconds, reverse=True)
    assert points[1].efficiency(points[1]) == 1
    assert still_pays(points) in (16, 32, 64, 128)
    assert still_pays(scale(ask("1xl4"), (1,))) is None
    assert parse_range("3..N", 8) == (3, 6, 8)
    with pytest.raises(ConfigError, match="E285"):
        parse_range("64..8", 64)


def test_a_batch_that_devices_do_not_share_names_one_nearby():
    found = make_plans(ask("24xh100", work=Workload(WORK.model, 4096, 100)))
    (text,) = (text for text in warnings_of(found) if text.startswith("W273"))
    assert re.fullmatch(
        r"W273 a batch of 100 does not divide by 24 devices: with 96 a sequence takes \d+ % less time", text
    )
    assert make_plans(ask("24xh100", work=Workload(WORK.model, 4096, 96))).other_batch is None
    # Far fewer sequences than devices: no other batch is near.
    assert make_plans(ask("24xh100", work=Workload(WORK.model, 4096, 8))).other_batch is None


@pytest.mark.parametrize(
    ("machine", "text"),
    [("a100-40", "of published runs on a100-40 half are within"), ("l4", "unknown on l4: too few")],
)
def test_how_well_times_are_known_is_of_the_machine(machine, text):
    found = make_plans(ask(f"8x{machine}", work=Workload(find_model("gpt2-xl"), 1024, 16)))
    (line,) = (line for line in table_lines(found, 0.1) if line.startswith("error"))
    assert line.startswith(f"error    {text}")
    known = found.to_json()["step_time_error"]
    assert (known is None) is (machine == "l4")
    assert known is None or f"within {100 * known['median']:.0f} %" in line


def test_a_row_of_scaling_is_a_plan_that_train_runs():
    # The fastest of all needs a rank order that train does not have.
    work = Workload(find_model("gpt3-175b"), 2048, 512)
    request = ask("96xh100", {"pp": 32}, work)
    (point,) = scale(request, (96,))
    assert point.obstacle == ""
    assert point.seconds == make_plans(request).best.predicted.step.total
    (other,) = scale(ask("64xh100", {"precision": "fp8"}, work), (64,))
    assert other.obstacle == other.to_json()["obstacle"] == "precision fp8 is not built in train"


def test_stages_are_cut_so_that_the_head_counts():
    work = Workload(find_model("gpt3-175b"), 2048, 1536)
    request = ask("3072xa100", work=work)
    # 64 stages of 6 hosts of 8 devices: one and a half layers each.
    halves = stage_cuts(request, Layout(dp=6, tp=8, pp=64, half_layers=True))
    assert len(halves) == 64
    assert {cut.last - cut.first + 1 for cut in halves} == {3}
    whole = stage_cuts(ask(), Layout(dp=2, pp=8))
    assert sum(cut.last - cut.first + 1 for cut in whole) == 32
    assert whole[-1].last - whole[-1].first < 4
    assert stage_cuts(request, Layout(dp=3072)) == ()
    # Llama 3's 126 layers on 16 ranks with 8 stages each: embedding and head are stages of their own.
    llama = Workload(find_model("llama-3.1-405b"), 8192, 2048)
    found = make_plans(ask("16384xh100", {"tp": 8, "pp": 16, "cp": 1, "schedule": "interleaved"}, llama))
    assert found.best.layout.chunks == 8
    ends = stage_cuts(ask("16384xh100", work=llama), found.best.layout)
    assert len(ends) == 128
    assert [cut.last - cut.first + 1 for cut in ends] == [0, *[1] * 126, 0]


def test_a_lock_file_comes_back_and_answers_questions(tmp_path):
    path = tmp_path / "plan.lock.json"
    found = make_plans(ask("16xa100-40"))
    save_lock(path, found, source="llama-3.1-8b")
    lock = read_lock(path)
    for entry, plan in zip(lock["plans"], found.plans, strict=True):
        assert layout_from(entry) == plan.layout
    path.write_text(json.dumps({**lock, "format": 0}))
    with pytest.raises(ConfigError, match="E289"):
        read_lock(path)
    with pytest.raises(ConfigError, match="E289"):
        read_lock(tmp_path / "none.json")
    one = answer("1 vs 2", lock)
    assert one.lines[2].startswith("2 against 1: ")
    why = answer("why not pp=4,zero=1", lock)
    assert why.other.layout.pp == 4
    assert why.other.step.total > why.first.step.total
    assert "does not divide" in answer("why not tp=5", lock).lines[0]
    assert "no layout" in answer("why not micro_batch=3", lock).lines[0]
    for wrong in ("1 vs 99", "why not"):
        with pytest.raises(ConfigError, match="E288"):
            answer(wrong, lock)
    assert not is_question("E203")
