import pytest

from meshwright.presets.host import (
    BlockTime,
    CollectiveTime,
    HostProfile,
    Learned,
    OtherFormat,
    PartTime,
    profile_from,
)


def host(**changes):
    values = {
        "name": "here",
        "cores": 2,
        "memory_bytes": 8 << 30,
        "process_bytes": 250 << 20,
        "step_seconds": 1e-3,
        "microbatch_seconds": 1e-3,
        "layer_seconds": 5e-4,
        "gather_seconds": 5e-4,
        "accumulate_seconds": 1e-9,
        "update_seconds": 1e-9,
        "collectives": tuple(
            CollectiveTime(op, ranks, size, 1e-5 * ranks + size * 1e-10)
            for op in ("all_reduce", "message")
            for ranks in (2, 4)
            for size in (1 << 14, 1 << 20)
        ),
        "blocks": (BlockTime("b", 1, 10, 12, 8, 1, 2, 2), BlockTime("b", 4, 32, 40, 24, 4, 8, 2)),
        "parts": (PartTime("h", 2, 4, 6, 2),),
    }
    return HostProfile(**{**values, **changes})


def test_a_profile_comes_back_from_its_file():
    one = host(learned=Learned(compute=1.25, runs=3))
    assert profile_from(one.to_json()) == one
    for wrong in ("{}", "[]", '{"format": 2}'):
        with pytest.raises(ValueError, match="no measured host"):
            profile_from(wrong)
    with pytest.raises(OtherFormat):
        profile_from(one.to_json().replace('"format": 2', '"format": 1'))


def test_between_measured_micro_batches_the_time_of_a_sequence_is_on_a_line():
    one = host()
    assert one.block("b", 1).forward == 10
    assert one.block("b", 4).forward == 32
    # 10 s and 8 s a sequence: 9.33 at 2.
    assert one.block("b", 2).forward == pytest.approx(2 * (10 - 2 / 3))
    assert one.block("b", 8).inputs == pytest.approx(80)
    assert one.part("h", 1).backward == pytest.approx(3)
    assert one.only(["b"], 2).parts == ()


def test_what_two_processes_a_core_take_is_kept_beside_what_one_takes():
    slow = BlockTime("b", 1, 11, 13, 9, 1, 2, 4)
    one = host(blocks=(*host().blocks, slow))
    assert one.known(2) == {"b", "h"}
    assert one.known(4) == {"b"}
    assert one.only(["b"], 4).blocks == (slow,)
    assert one.only(["b", "h"], 2).block("b", 1).forward == 10


def test_collectives_between_sizes_and_beyond_by_the_last_rate():
    one = host()
    assert one.collective("all_reduce", 1, 1e9) == 0
    assert one.collective("all_reduce", 2, 10) == one.collective("all_reduce", 2, 1 << 14)
    assert one.collective("all_reduce", 2, 1 << 22) == pytest.approx(2e-5 + (1 << 22) * 1e-10)
    # Three ranks take the figures of the nearest number, the smaller of two.
    assert one.collective("all_reduce", 3, 1 << 20) == one.collective("all_reduce", 2, 1 << 20)
