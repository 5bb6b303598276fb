from meshwright.launching.measuring_parts import attend_time, block_time, head_time, make_block
from meshwright.launching.this_host import shapes_of
from meshwright.planner.request import make_request
from meshwright.presets import find_model
from meshwright.simulation.host_keys import AttendShape, BlockShape, HeadShape
from meshwright.simulation.job import Workload
from meshwright.simulation.reading import parse_cluster


def test_a_rank_s_block_has_its_share_of_heads_and_channels():
    for family, bias in (("gpt", True), ("llama", False)):
        whole, half = (
            sum(p.numel() for p in make_block(shape).parameters() if p.dim() > 1)
            for shape in (
                BlockShape(family, 32, 4, 2 if family == "llama" else 4, 8, 64, 16),
                BlockShape(family, 32, 2, 1 if family == "llama" else 2, 8, 32, 16),
            )
        )
        assert whole == 2 * half
        block = make_block(BlockShape(family, 32, 2, 2, 8, 32, 16))
        assert (block.attention.query.bias is not None) is bias


def test_parts_are_timed_under_their_names():
    for family in ("gpt", "llama"):
        shape = BlockShape(family, 16, 2, 2, 8, 32, 8)
        found = block_time(shape, 2)
        assert (found.key, found.micro_batch) == (shape.key, 2)
        assert min(found.forward, found.core) > 0
    head = head_time(HeadShape(16, 32, 8), 1)
    assert head.forward > 0
    for kind in ("ring", "ulysses", "allgather"):
        assert attend_time(AttendShape(kind, 2, 2, 2, 8, 16), 1).forward > 0


def test_all_that_layouts_of_a_model_need_is_named_once():
    work, cluster = Workload(find_model("gpt-nano"), 128, 32), parse_cluster("4xcpu")
    blocks, heads, attends = shapes_of(make_request(work, cluster, {}))
    assert len(blocks) == len(set(blocks)) == 6  # tp x cp of 1, 2, 4 that divide 4 ranks
    assert {shape.heads for shape in blocks} == {1, 2, 4}
    assert {shape.seq_len for shape in heads} == {32, 64, 128}
    assert {shape.kind for shape in attends} == {"ring", "ulysses", "allgather"}
    blocks, heads, attends = shapes_of(make_request(work, cluster, {"tp": 2, "cp": 2, "cp_kind": "ring"}))
    assert [len(blocks), len(heads), len(attends)] == [1, 1, 1]
