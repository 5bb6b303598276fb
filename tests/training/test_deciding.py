"""plan.mode = "auto": what is searched, kept and refused; with costs as numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.errors import DoesNotFitError, PlanError
from meshwright.partitioning.unit_costs import Passed, Unit, UnitCosts
from meshwright.training.config import load_config
from meshwright.training.deciding import decide, decided, sizes_to_measure
from meshwright.training.measured import Measured, agreed
from meshwright.training.planning import plan_of

SECONDS = (1.0, 2.0, 4.0, 1.0, 1.0, 3.0)


def make_costs(seconds=SECONDS, weight: float = 100.0, kept: float = 10.0, **more) -> UnitCosts:
    units = tuple(
        Unit(f"layers.{i}" if i else "", (s / 3,), (2 * s / 3,), (kept,), weight)
        for i, s in enumerate(seconds)
    )
    passed = tuple(Passed(i, (i + 1,), (8.0,)) for i in range(len(seconds) - 1))
    return UnitCosts("Net", (1,), units, passed, **more)


def make_config(*overrides: str):
    return load_config(None, ["plan.mode=auto", "train.global_batch=8", *overrides]).config


def decision_of(*overrides: str, costs=None, usable=None, world_size=2):
    measured = Measured(costs or make_costs(), "", usable)
    return decide(make_config(*overrides), measured, world_size=world_size)


def step_seconds(seconds, stages, microbatches: int, samples: int) -> float:
    sums = [samples * sum(seconds[a:b]) for a, b in itertools.pairwise(stages)]
    return sum(sums) + (microbatches - 1) * max(sums)


def test_the_best_of_all_cuts_replicas_and_micro_batches_is_found():
    best = min(
        step_seconds(SECONDS, (0, *cuts, 6), m, 8 // (4 // (len(cuts) + 1)) // m)
        for pp in (1, 2, 4)
        for cuts in itertools.combinations(range(1, 6), pp - 1)
        for m in (1, 2, 4, 8)
        if 8 // (4 // pp) % m == 0
    )
    assert decision_of(world_size=4).step_seconds == pytest.approx(best)


def test_what_is_fixed_is_kept_and_the_rest_gets_reasons():
    found = decision_of("plan.pp=2", "plan.micro_batch=1", "plan.zero=1")
    assert set(found.keys) == {"dp", "schedule", "stages"}
    assert (found.keys["dp"], found.keys["stages"]) == (1, ("layers.3",))
    assert set(found.reasons) == set(found.keys)
    assert "kept as given: micro_batch, pp, zero" in found.lines[0]
    config = decided(make_config("plan.pp=2", "plan.micro_batch=1", "plan.zero=1"), found)
    plan = plan_of(config, world_size=2)
    assert (plan.stages, plan.num_microbatches, plan.schedule, plan.mesh.size("pp")) == (
        ("layers.3",),
        8,
        "1f1b",
        2,
    )
    assert config.plan.mode == "given"
    assert decision_of("plan.dp=2").keys["pp"] == 1
    assert decision_of('plan.stages=["layers.1"]', "plan.pp=2").step_seconds > found.step_seconds


def test_updates_and_messages_count():
    heavy = make_costs((1.0, 1.0, 1.0, 1.0), weight=0.0)
    units = (*heavy.units[:-1], replace(heavy.units[-1], weight_bytes=10_000.0))
    heavy = replace(heavy, units=units)
    even = decision_of("plan.pp=2", costs=heavy)
    assert even.keys["stages"] == ("layers.2",)
    assert decision_of(costs=heavy).keys["pp"] == 1
    slow = decision_of(costs=replace(heavy, bytes_per_second=1_000.0))
    assert slow.keys["pp"] == 2, "all-reducing 10,000 bytes takes longer than the bubble"
    assert slow.step_seconds > even.step_seconds
    updated = decision_of("plan.pp=2", costs=replace(heavy, update_seconds_per_byte=0.01))
    assert updated.step_seconds == pytest.approx(even.step_seconds + 100)


def test_memory_decides_the_policy_first():
    """Six units of 100 bytes: 16 of Adam's state a weight of 4 bytes."""
    assert decision_of("plan.dp=2", usable=2600).keys["zero"] == 0
    assert decision_of("plan.dp=2", usable=2000).keys["zero"] == 1
    assert decision_of("plan.dp=2", usable=1300).keys["zero"] == 3
    one = decision_of("plan.dp=2", "train.optimizer.name=sgd", "plan.precision=bf16", usable=1600)
    assert one.keys["zero"] == 0


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            (),
            r"E277 .* on 2 processes that fits .* lacks [\d,]+ bytes on its fullest device.*plan.zero up to 3",
        ),
        (("plan.zero=0", "plan.pp=2"), r"E277 .* with plan.pp, plan.zero as given that fits"),
    ],
)
def test_no_plan_in_memory(overrides, text):
    with pytest.raises(DoesNotFitError, match=text):
        decision_of(*overrides, usable=100)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("plan.pp=2", "plan.dp=2"),
            "E278 .*plan.dp=2 plan.pp=2 leaves no plan on 2 pipeline and data ranks",
        ),
        (("plan.micro_batch=3",), "E278 train.global_batch = 8 is no multiple of plan.micro_batch = 3"),
        (("plan.tp=3",), "E278 .*plan.tp x plan.cp = 3 does not divide 2 processes"),
        (("plan.pp=2", 'plan.stages=["other"]'), "E278 plan.stages: no stage of Net can begin at 'other'"),
        (("plan.pp=7", "plan.processes=7"), "E278 .*plan.pp=7"),
    ],
)
def test_keys_that_leave_no_plan(overrides, text):
    with pytest.raises(PlanError, match=text):
        decision_of(*overrides)


def test_a_model_that_cannot_be_cut_has_replicas_or_is_refused():
    whole = Measured(None, "E261 the model asks for a value.", None)
    found = decide(make_config(), whole, world_size=2)
    assert dict(found.keys) == {"pp": 1, "dp": 2}
    assert (
        "W272 the model cannot be cut into stages, so all 2 data ranks have it whole: E261" in found.lines[0]
    )
    with pytest.raises(PlanError, match=r"E279 plan.pp = 2 .* cannot be cut into stages. E261"):
        decide(make_config("plan.pp=2"), whole, world_size=2)


def test_no_fewer_samples_than_the_model_runs_with():
    """One sample a micro-batch was asked for, and left out: batch statistics of one row, say."""
    costs = replace(make_costs(), samples=(4,))
    found = decision_of("plan.pp=2", costs=costs)
    assert found.keys["micro_batch"] == 4
    assert decision_of("plan.pp=2", costs=make_costs()).keys["micro_batch"] == 1


def test_sizes_to_measure_span_what_is_searched():
    assert sizes_to_measure(make_config("plan.micro_batch=4"), 2) == (4,)
    assert sizes_to_measure(make_config(), 2) == (1, 2, 4, 8)
    many = sizes_to_measure(make_config("train.global_batch=96"), 4)
    assert (len(many), many[0], many[-1]) == (4, 2, 96)


def test_ranks_agree_on_the_median_and_keep_it(tmp_path: Path):
    place = tmp_path / "new" / "seconds.json"
    found = agreed(
        [Measured(make_costs([s] * 6), "", 1000 + i, place) for i, s in enumerate((3.0, 1.0, 9.0))]
    )
    assert found.costs == make_costs([3.0] * 6)
    assert found.usable == 1000
    assert UnitCosts.from_json(place.read_text()) == found.costs
    assert agreed([Measured(make_costs(), "", None), Measured(None, "E261", 5)]).costs == make_costs()


def test_stages_get_unlike_numbers_of_replicas_where_that_is_worth_it():
    """One unit of three quarters of the time on three ranks of four."""
    given = ("plan.pp=2", "train.global_batch=12")
    unequal = make_costs((1.0, 3.0), bytes_per_second=1000.0)
    found = decision_of(*given, costs=unequal, world_size=4)
    assert found.keys["stage_ranks"] == ((0,), (1, 2, 3))
    assert "pp 2 x dp 1+3" in found.lines[0]
    config = decided(make_config(*given), found)
    plan = plan_of(config, world_size=4)
    assert plan.stage_ranks == ((0,), (1, 2, 3))
    whole = replace(unequal, passed=(replace(unequal.passed[0], is_divisible=False),))
    assert "stage_ranks" not in decision_of(*given, costs=whole, world_size=4).keys
    for fixed in ("plan.dp=2", "plan.micro_batch=1"):
        assert "stage_ranks" not in decision_of(*given, fixed, costs=unequal, world_size=4).keys
    three = decision_of(*given, costs=unequal, world_size=3)
    assert three.keys["stage_ranks"] == ((0,), (1, 2)), "the only way to use three ranks"


def test_batch_statistics_stay_those_of_the_whole_batch():
    """With other micro-batches the model would learn something else; stages that are asked for need some."""
    costs = make_costs(has_batch_statistics=True, bytes_per_second=1e3, gradient_bytes_per_second=1.0)
    found = decision_of(costs=costs)
    assert found.keys["micro_batch"] * found.keys["dp"] == 8
    assert decision_of("plan.pp=2", costs=costs).keys["micro_batch"] < 8
    assert decision_of("plan.micro_batch=2", costs=costs).keys["pp"] == 2


def test_a_schedule_that_is_given_is_run_event_by_event():
    """Two stages a place: four stages of 3 each, and 2 places of 6; zero bubble beats 1F1B's ramps."""
    even = make_costs((3.0,) * 4)
    plain = decision_of("plan.pp=2", costs=even)
    assert plain.step_seconds == pytest.approx((8 + 1) * 6)
    for schedule, chunks in (("interleaved", 2), ("zb-v", 2), ("zb-h1", 1), ("gpipe", 1)):
        found = decision_of("plan.pp=2", f"plan.schedule={schedule}", costs=even)
        assert len(found.keys["stages"]) == 2 * chunks - 1
        assert "schedule" not in found.keys
        faster = found.step_seconds < plain.step_seconds - 1e-9
        assert faster == (schedule != "gpipe"), schedule
        config = decided(make_config("plan.pp=2", f"plan.schedule={schedule}"), found)
        assert plan_of(config, world_size=2).num_stages == 2 * chunks
    with pytest.raises(PlanError, match=r"E278 .*plan.schedule=zb-v"):
        decision_of("plan.pp=4", "plan.schedule=zb-v", costs=even, world_size=4)
    with pytest.raises(DoesNotFitError, match="E277"):
        decision_of("plan.pp=2", "plan.schedule=gpipe", costs=even, usable=100)


def test_what_is_in_flight_counts_as_the_schedule_has_it():
    """Eight micro-batches of one unit each, 10 bytes kept a unit: gpipe keeps all, 1F1B two on the first place."""
    costs = make_costs((1.0, 1.0), weight=0.0)
    given = ("plan.pp=2", "plan.micro_batch=1")
    assert decision_of(*given, costs=costs).memory_bytes == (20, 10)
    assert decision_of(*given, "plan.schedule=gpipe", costs=costs).memory_bytes == (80, 80)
    assert decision_of(*given, "plan.schedule=zb-h1", costs=costs).memory_bytes[0] == 20


def test_parameter_servers_are_laid_out_by_hand():
    with pytest.raises(PlanError, match=r"E278 .*parameter_server"):
        decision_of("plan.sync=parameter_server")


def test_what_a_policy_moves_counts():
    """600 bytes of weights on two replicas at 100 bytes a second: half of them, as often as the policy moves them."""
    costs = make_costs(bytes_per_second=100.0)
    given = ("plan.dp=2", "plan.micro_batch=1")
    work, once = 4 * 12.0, 3.0
    steps = {zero: decision_of(*given, f"plan.zero={zero}", costs=costs).step_seconds for zero in range(4)}
    assert steps == pytest.approx(
        {0: work + 2 * once, 1: work + 2 * once, 2: work + (4 + 1) * once, 3: work + 4 * 3 * once}
    )
