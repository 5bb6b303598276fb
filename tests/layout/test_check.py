"""What a plan derives, and the errors that name the numbers and the fix."""

import re

import pytest

from meshwright.errors import PlanError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.plan import TrainPlan


def test_what_is_left_open_is_derived() -> None:
    plan = make_plan(PlanRequest(policy=1), world_size=4, global_batch=48)
    assert (plan.mesh.dp, plan.micro_batch, plan.num_microbatches) == (4, 12, 1)
    plan = make_plan(
        PlanRequest("zero3", dp=4, micro_batch=3, bucket_bytes=99), world_size=4, global_batch=48
    )
    assert (plan.micro_batch, plan.num_microbatches, plan.policy.bucket_bytes) == (3, 4, 99)
    assert plan.mesh.dp * plan.micro_batch * plan.num_microbatches == plan.global_batch


def _error(request: PlanRequest, **numbers) -> PlanError:
    with pytest.raises(PlanError) as caught:
        make_plan(request, **numbers)
    return caught.value


def test_axes_against_processes() -> None:
    error = _error(PlanRequest(dp=3), world_size=4, global_batch=12, world_source="SLURM_NTASKS")
    assert error.code == "E200"
    assert "tp 1 x pp 1 x cp 1 x dp 3 = 3, but 4 processes started" in error.message
    assert "Set plan.dp=4, or start 3." in error.message
    assert "Is a world of 4 intended? It came from SLURM_NTASKS." in error.message
    assert "came from" not in _error(PlanRequest(dp=3), world_size=4, global_batch=12).message


def test_batch_against_data_parallelism() -> None:
    error = _error(PlanRequest(), world_size=4, global_batch=10)
    assert error.code == "E203"
    assert "global_batch 10 ≠ dp 4 x micro 1 x accumulate k" in error.message
    assert "Nearest: 8 (k=2), 12 (k=3)." in error.message
    assert "never changed silently" in error.message


def test_batch_against_micro_batch_names_micro_batches_that_fit() -> None:
    error = _error(PlanRequest(micro_batch=5), world_size=2, global_batch=24)
    assert "Nearest: 20 (k=2), 30 (k=3). Or plan.micro_batch = 1, 2, 3, 4, 6, 12 for 24." in error.message
    error = _error(PlanRequest(micro_batch=16), world_size=2, global_batch=8)
    assert "Nearest: 32 (k=1). Or plan.micro_batch = 1, 2, 4 for 8." in error.message


@pytest.mark.parametrize(("micro_batch", "global_batch"), [(0, 8), (-2, 8), (None, 0), (4, 0)])
def test_empty_batches_are_refused(micro_batch, global_batch) -> None:
    assert (
        _error(PlanRequest(micro_batch=micro_batch), world_size=2, global_batch=global_batch).code == "E203"
    )


def test_named_fixes_work() -> None:
    for micro_batch in (1, 2, 3, 4, 6, 12):
        make_plan(PlanRequest(micro_batch=micro_batch), world_size=2, global_batch=24)
    for global_batch in (20, 30):
        make_plan(PlanRequest(micro_batch=5), world_size=2, global_batch=global_batch)


def test_copies_are_neighbouring_ranks() -> None:
    plan = make_plan(PlanRequest(3, hsdp=2), world_size=6, global_batch=12)
    assert plan.mesh.groups(("dp_shard",)) == [(0, 1), (2, 3), (4, 5)]
    assert plan.mesh.groups(("dp_replicate",)) == [(0, 2, 4), (1, 3, 5)]
    assert plan.describe().startswith("3 copies of zero3x2 ·")
    whole = make_plan(PlanRequest(2, hsdp=6, ownership="whole"), world_size=6, global_batch=12)
    assert whole.describe().startswith("whole zero2x6 ·")
    alone = make_plan(PlanRequest(3, hsdp=1), world_size=2, global_batch=12)
    assert alone.describe().startswith("2 copies of zero3 ·")
    for made in (plan, whole, alone):
        assert TrainPlan.from_json(made.to_json()) == made


def test_copies_that_cannot_be() -> None:
    error = _error(PlanRequest(3, hsdp=4), world_size=6, global_batch=12)
    assert (error.code, error.message) == ("E210", "plan.hsdp = 4 does not divide dp 6. Valid: 1, 2, 3, 6.")
    error = _error(PlanRequest(0, hsdp=2), world_size=4, global_batch=12)
    assert error.code == "E210"
    assert "plan.zero = 0 shards nothing. Set plan.zero=3 (or 1, 2)" in error.message


def test_whole_ownership_needs_shards() -> None:
    error = _error(PlanRequest("ddp", ownership="whole"), world_size=2, global_batch=4)
    assert error.code == "E211"
    assert "with plan.zero = 0 every rank updates all of them. Set plan.zero=1 (or 2, 3)" in error.message


def test_tensor_parallel_ranks_share_a_copy() -> None:
    plan = make_plan(PlanRequest(policy=3, tp=2, hsdp=2), world_size=8, global_batch=8)
    assert plan.mesh.sizes() == {"pp": 1, "dp": 4, "cp": 1, "tp": 2}
    assert (plan.mesh.size("dp_replicate"), plan.mesh.size("dp_shard")) == (2, 2)
    assert (plan.micro_batch, plan.world_size) == (2, 8)
    assert plan.describe().startswith("tp2 · 2 copies of zero3x2 · micro 2")
    # Ranks of a copy are neighbours.
    assert [plan.mesh.coordinates(rank)["tp"] for rank in range(8)] == [0, 1] * 4


def test_tensor_parallel_against_processes() -> None:
    error = _error(PlanRequest(tp=2, dp=2), world_size=6, global_batch=12)
    assert error.code == "E200"
    assert "tp 2 x pp 1 x cp 1 x dp 2 = 4, but 6 processes started" in error.message
    assert "Set plan.dp=3, or start 4." in error.message
    error = _error(PlanRequest(tp=4), world_size=6, global_batch=12)
    assert "plan.tp=4 does not divide 6: set plan.tp to one of 1 2 3 6, or start 4." in error.message


def test_context_parallel_ranks_share_the_samples() -> None:
    plan = make_plan(PlanRequest(policy=3, tp=2, cp=3, cp_kind="ulysses"), world_size=12, global_batch=8)
    assert plan.mesh.sizes() == {"pp": 1, "dp": 2, "cp": 3, "tp": 2}
    assert (plan.micro_batch, plan.cp_kind) == (4, "ulysses")
    assert plan.describe().startswith("cp3 ulysses · tp2 · zero3x6 · micro 4")
    assert TrainPlan.from_json(plan.to_json()) == plan
    assert make_plan(PlanRequest(cp=2), world_size=2, global_batch=1).cp_kind == "ring"


def test_context_parallel_against_processes_and_other_keys() -> None:
    error = _error(PlanRequest(cp=2, dp=2), world_size=6, global_batch=12)
    assert (error.code, "tp 1 x pp 1 x cp 2 x dp 2 = 4, but 6" in error.message) == ("E200", True)
    assert "Set plan.dp=3, or start 4." in error.message
    error = _error(PlanRequest(cp=4), world_size=6, global_batch=12)
    assert "plan.cp x plan.tp = 4 does not divide 6: change one of them" in error.message
    error = _error(PlanRequest(cp=3, cp_kind="2d"), world_size=3, global_batch=12)
    assert error.code == "E252"
    assert 'plan.cp = 3 has no two factors. Set plan.cp=4 or 6, or plan.cp_kind="ring".' in error.message
    error = _error(PlanRequest(cp=2, sync="parameter_server"), world_size=3, global_batch=12)
    assert (error.code, "with plan.cp = 2 is not built" in error.message) == ("E255", True)


def test_places_of_a_pipeline_with_unlike_numbers_of_ranks() -> None:
    request = PlanRequest(policy=1, stage_ranks=((0,), (1, 2, 3)), micro_batch=2)
    plan = make_plan(request, world_size=4, global_batch=18)
    assert (plan.stage_ranks, plan.world_size) == (((0,), (1, 2, 3)), 4)
    assert (plan.mesh.sizes(), plan.num_microbatches) == ({"pp": 2, "dp": 3, "cp": 1, "tp": 1}, 3)
    assert plan.describe() == "pp2 1f1b · zero1x1+3 · micro 2 x accumulate 3 · fp32"
    assert TrainPlan.from_json(plan.to_json()) == plan
    alike = make_plan(PlanRequest(stage_ranks=((0, 1), (2, 3))), world_size=4, global_batch=8)
    assert alike == make_plan(PlanRequest(pp=2, dp=2), world_size=4, global_batch=8)


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (PlanRequest(stage_ranks=((0,), (1, 2)), pp=3), "E231", "has 2 places, and plan.pp = 3"),
        (PlanRequest(stage_ranks=((0,), (1, 2))), "E200", "has 3 ranks, but 4 processes started. Start 3"),
        (PlanRequest(stage_ranks=((0,), (1, 2, 3)), tp=2), "E235", "with plan.tp = 2: stages of unlike"),
        (PlanRequest(stage_ranks=((0,), (1, 2, 3)), cp=2), "E235", "with plan.cp = 2"),
        (PlanRequest(stage_ranks=((0,), (1, 2, 3)), hsdp=1, policy=1), "E235", "with plan.hsdp = 1"),
        (
            PlanRequest(stage_ranks=((0,), (1, 2, 3)), dp=2),
            "E235",
            "with plan.dp = 2: .* plan.pp and plan.dp",
        ),
        (PlanRequest(stage_ranks=((0, 1, 2, 3),)), "E235", "with a single place"),
        (
            PlanRequest(stage_ranks=((0,), (1, 2, 3))),
            "E203",
            r"global_batch 16 ≠ dp 3 .* Nearest: 15 \(k=5\), 18",
        ),
    ],
)
def test_what_unlike_places_cannot_be_with(request_, code, text) -> None:
    error = _error(request_, world_size=4, global_batch=16)
    assert error.code == code
    assert re.search(text, error.message)
