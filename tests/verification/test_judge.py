import dataclasses
import math

import pytest

from meshwright.verification.job import RankReport, Reference
from meshwright.verification.judge import judge
from meshwright.verification.result import CHECK_NAMES, VerifyResult
from meshwright.verification.signatures import Sizes
from meshwright.verification.tensors import Noise, PieceStats, Recorded, Scale, tolerance

SIZES = Sizes(dp=2, num_microbatches=3, steps=1, policy="zero1")
SAMPLES = {(1, k): ((2 * k, 7), (2 * k + 1, 7)) for k in range(3)}


def recorded(check, name, order, *, microbatch=-1, shape=(4, 3), batch_dim=None):
    scale = Scale(norm=10.0, largest=5.0, module_norm=10.0, module_largest=5.0, whole_norm=20.0)
    return Recorded(check, 1, microbatch, name, order, shape, "<f8", 0, scale, batch_dim)


ITEMS = (
    recorded("activations", "first", 1, microbatch=0, batch_dim=0),
    recorded("loss", "loss", 0, shape=()),
    recorded("gradients", "first.weight", 2),
    recorded("gradients", "last.weight", 1),
    recorded("grad_norm", "grad_norm", 0, shape=()),
    recorded("parameters", "first.weight", 1),
)


def reference():
    limits = {item.check: tolerance("fp64", Noise()) for item in ITEMS}
    limits |= {check: tolerance("fp64", Noise()) for check in ("optimizer", "buffers")}
    return Reference(
        recorded=ITEMS,
        tolerances=limits,
        losses=(1.5,),
        samples=SAMPLES,
        num_samples=100,
        ties=(("a", "b"),),
        uses=(),
        clip_norm=None,
        uncompared=(),
        asks_for_float32=False,
        peak_memory_bytes=1,
    )


def reports(change=lambda rank, stats: stats, **fields):
    """Two ranks: each has half of every tensor and one sample of each micro-step; `change` may spoil a piece."""
    made = []
    for rank in range(2):
        pieces = []
        for item in ITEMS:
            half = item.extent // 2
            start, stop = (rank * half, rank * half + half) if half else (0, 1)
            piece = PieceStats(item.key, rank, start, stop, numel=item.numel // 2 or 1)
            pieces.append(change(rank, piece))
        values = {
            "stats": tuple(piece for piece in pieces if piece is not None),
            "samples": {place: (ids[rank],) for place, ids in SAMPLES.items()},
            "digests": {("parameters", 1, -1, "first.weight"): 5},
            "issued": ({"all_reduce": 2},),
            "declared": ({"all_reduce": 2},),
            "gradient_samples": {},
            "broken_ties": {},
        }
        values |= {name: value[rank] for name, value in fields.items()}
        made.append(RankReport(rank=rank, peak_memory_bytes=1, **values))
    return made


def result_of(ranks):
    checks = judge(reference(), ranks, SIZES)
    return VerifyResult(checks, "one process", "zero1x2", "net", 1.0, {"reference": 1, "candidate": 2})


def spoil(key, ranks=(0, 1), **changes):
    def change(rank, piece):
        return dataclasses.replace(piece, **changes) if piece.key == key and rank in ranks else piece

    return change


def test_everything_right():
    result = result_of(reports())
    assert result.ok
    assert result.first_wrong is None
    assert [check.name for check in result.checks] == list(CHECK_NAMES)
    assert [result.check(name).compared for name in CHECK_NAMES] == [6, 1, 1, 2, 1, 1, 0, 0, 1, 1, 2]
    assert result.table().endswith("PASS in 1 s")
    assert "1.5000000000" in result.table()


def test_the_first_wrong_is_the_earliest_in_execution():
    """Backward makes the last gradient first; parameters come after all gradients."""

    def change(rank, piece):
        if piece.key[0] in ("gradients", "parameters"):
            spoiled = {"num_wrong": 6, "first_wrong": 0, "last_wrong": 11, "square_error": 9.0}
            return dataclasses.replace(piece, largest_error=2.0, ratio_low=2.0, ratio_high=2.0, **spoiled)
        return piece

    result = result_of(reports(change))
    first = result.first_wrong
    assert (first.check, first.name, first.ratio, first.share) == ("gradients", "last.weight", 2.0, 1.0)
    assert first.cause == ("2 = dp: summed over dp and not divided, or reduced twice; it must be taken once.")
    assert result.check("gradients").num_wrong == 2
    assert (
        "  ✗ gradients   0/2   first wrong last.weight: exactly 2.0000 x reference (step 1 on every rank"
        in (result.table())
    )
    assert result.table().endswith("FAIL in 1 s")


def test_rank_place_and_share_are_named():
    key = ("gradients", 1, -1, "first.weight")
    changes = {"num_wrong": 2, "first_wrong": 7, "last_wrong": 9, "largest_error": 1.0, "square_error": 1.0}
    wrong = result_of(reports(spoil(key, ranks=(1,), **changes))).first_wrong
    assert (wrong.ranks, wrong.holders, wrong.share) == ((1,), (0, 1), 2 / 12)
    assert wrong.place == "2 of 12 elements, rows 2..3 of 4"
    assert "Only some ranks' shards are wrong" in wrong.cause


def test_many_small_differences_fail_by_the_norm():
    key = ("parameters", 1, -1, "first.weight")
    result = result_of(reports(spoil(key, square_error=1e-20, largest_error=1e-10)))
    check = result.check("parameters")
    assert not check.ok
    assert check.worst_relative == pytest.approx(math.sqrt(2e-20) / 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_fails(bad):
    result = result_of(reports(spoil(("loss", 1, -1, "loss"), largest_error=bad, square_error=bad)))
    assert result.first_wrong.check == "loss"


def test_an_element_that_no_rank_holds():
    key = ("parameters", 1, -1, "first.weight")
    lost = result_of(reports(lambda rank, piece: None if piece.key == key and rank == 0 else piece))
    assert lost.first_wrong.problem == "no rank holds some of its elements"
    gone = result_of(reports(lambda rank, piece: None if piece.key == key else piece))
    assert gone.first_wrong.problem == "no rank computed it"


def test_a_tensor_that_the_reference_does_not_have():
    def change(rank, piece):
        if piece.key[0] != "parameters":
            return piece
        return dataclasses.replace(piece, key=("gradients", 1, -1, "odd"), problem="only the candidate has")

    result = result_of(reports(change))
    assert result.check("gradients").first_wrong.name == "odd"


def test_samples_read_in_another_order_or_not_at_all():
    swapped = [{place: (ids[1 - rank],) for place, ids in SAMPLES.items()} for rank in range(2)]
    wrong = result_of(reports(samples=swapped)).check("data")
    assert (wrong.num_wrong, wrong.compared) == (6, 6)
    assert wrong.first_wrong.problem == "index 1 was read and the stream has 0"
    skipped = [
        {place: (ids[rank],) for place, ids in SAMPLES.items() if place != (1, 2)} for rank in range(2)
    ]
    missing = result_of(reports(samples=skipped)).check("data").first_wrong
    assert (missing.step, missing.microbatch, missing.problem) == (1, 2, "index 4 was not read")
    assert "micro-step was skipped" in missing.cause
    changed = [{place: ((ids[rank][0], 8 + rank),) for place, ids in SAMPLES.items()} for rank in range(2)]
    assert "other content" in result_of(reports(samples=changed)).first_wrong.problem


def test_a_stream_that_repeats_a_sample():
    repeated = dataclasses.replace(
        reference(), samples={place: ids[:1] * 2 for place, ids in SAMPLES.items()}
    )
    (check,) = [c for c in judge(repeated, reports(), SIZES) if c.name == "data"]
    assert check.first_wrong.problem == "index 0 comes twice in one epoch"


def test_what_must_be_equal():
    digests = [{("parameters", 1, -1, "first.weight"): 5 + rank} for rank in range(2)]
    assert result_of(reports(digests=digests)).first_wrong.check == "replicas"
    ties = result_of(reports(broken_ties=[{("a", "b"): 1}, {("a", "b"): 0}])).first_wrong
    assert (ties.check, ties.name, ties.step, ties.ranks) == ("ties", "a = b", 0, (0, 1))
    counts = result_of(reports(issued=[({"all_reduce": 2},), ({"all_reduce": 1},)])).first_wrong
    assert (counts.name, counts.ranks, counts.problem) == ("all_reduce", (1,), "1 issued, 2 declared")


def test_json_has_the_contracts_keys():
    value = result_of(
        reports(spoil(("loss", 1, -1, "loss"), largest_error=1.0, ratio_low=3.0, ratio_high=3.0))
    )
    json = value.to_json()
    assert {"ok", "reference", "candidate", "checks", "seconds"} <= set(json)
    keys = {"name", "ok", "compared", "worst_relative", "worst_tensor", "first_wrong"}
    assert all(keys <= set(check) for check in json["checks"])
    assert (json["ok"], json["first_wrong"]["check"]) == (False, "loss")
    assert [check["first_wrong"] for check in json["checks"] if not check["ok"]] == ["loss"]


def test_a_wide_limit_is_said_aloud():
    wide = dataclasses.replace(
        reference(), tolerances=reference().tolerances | {"gradients": tolerance("fp64", Noise(norm=0.01))}
    )
    check = next(check for check in judge(wide, reports(), SIZES) if check.name == "gradients")
    assert check.ok
    assert "only errors above 0.08 are seen" in check.line()
    assert "rounding" not in next(c for c in judge(wide, reports(), SIZES) if c.name == "parameters").line()
