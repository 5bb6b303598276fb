"""The executor told one by one: what its clock sees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from meshwright.adapt.float64 import float64_throughout
from meshwright.comm.mesh import Mesh
from meshwright.data.batches import Batches
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.pipeline.cut import Cut, balanced_cut
from meshwright.pipeline.record import Twin
from meshwright.schedule.action import COMPUTE
from meshwright.training.assemble import shard_model
from meshwright.training.stages import make_pipeline
from tests.pipeline.models import EncoderDecoder, Pairs, Uneven, Varying, pair_loss
from tests.verification.models import Rows, loss_of_labels


def _left_open(world: Any) -> tuple[int, int]:
    """(messages of a step, those that nobody has waited for)."""
    device, pairs = torch.device("cpu"), Pairs(101, 7)
    plan = make_plan(PlanRequest(pp=2, micro_batch=2, transport="gloo"), world_size=2, global_batch=6)
    torch.manual_seed(0)
    model = EncoderDecoder(101)
    mesh = Mesh.of_plan(plan, world.world, log=world.log, device=device)
    groups = mesh.data_groups()
    pipeline = make_pipeline(model, pair_loss, pairs, plan, groups, device=device)
    assert pipeline is not None
    engine = shard_model(
        model, plan, groups, device=device, initialiser=None, dropout="native", pipeline=pipeline
    )
    batches = [torch.utils.data.default_collate([pairs[2 * m], pairs[2 * m + 1]]) for m in range(3)]
    engine.start_step()
    executor = pipeline.executor(engine)
    executor.run(engine, lambda m: batches[m], divisor=1.0, step=0)
    return sum(executor.num_messages.values()), len(groups.all.log.in_flight)


def test_every_message_is_waited_for(ranks) -> None:
    """pitfall: of several works that carry the values of one message, only one is waited for.

    Two values for each of three micro-batches and their gradients; the shared table, and what got a gradient of it.
    """
    assert ranks.run(_left_open, 2) == [(3 * 2 * 2 + 2 * 2, 0)] * 2


def _cut_of(world: Any) -> tuple[int, Cut]:
    """(tokens of this rank's first micro-batch, where its model is cut)."""
    plan = make_plan(PlanRequest(pp=2, micro_batch=1, transport="gloo"), world_size=4, global_batch=2)
    data, device = Varying(235, 40), torch.device("cpu")
    groups = Mesh.of_plan(plan, world.world, log=world.log, device=device).data_groups()
    pipeline = make_pipeline(_make_gpt(), language_model_loss, data, plan, groups, device=device)
    assert pipeline is not None
    geometry = BatchGeometry(2, 1, groups.num_readers, groups.reader_index)
    return Batches(data, geometry, seed=0).micro_batch(0, 0)["tokens"].shape[1], pipeline.plan.cut


def _make_gpt(device: str = "meta") -> GPT:
    sizes = {"num_layers": 4, "dim": 24, "num_heads": 6, "ffn_dim": 50}
    with torch.device(device):
        return GPT(GPTConfig(vocab_size=235, max_seq_len=40, dropout=0.0, **sizes))


def test_ranks_with_sequences_of_other_lengths_cut_alike(ranks) -> None:
    """Silent before: each rank cut by what its own first micro-batch costs, and attention of long ones costs more."""
    found = ranks.run(_cut_of, 4)
    assert {length for length, _ in found} == {2, 40}
    assert len({cut for _, cut in found}) == 1
    twin, ones = Twin(_make_gpt(), torch.device("cpu")), torch.ones(1, 40, dtype=torch.long)
    tapes = [
        twin.record(language_model_loss, {"tokens": x, "labels": x}, training=True)
        for x in (ones[:, :2], ones)
    ]
    assert len({balanced_cut(tape, 2, model="GPT")[0] for tape in tapes}) == 2


def _worst_gradient(world: Any, schedule: str) -> tuple[int, float]:
    """(gradients that were compared, their largest difference from one device's), sequences of 2 and of 40 tokens."""
    data, device = Varying(235, 40), torch.device("cpu")
    plan = make_plan(
        PlanRequest(pp=2, micro_batch=1, schedule=schedule, transport="gloo", precision="fp64"),
        world_size=2,
        global_batch=4,
    )
    torch.manual_seed(0)
    model = _make_gpt("cpu").double()
    plain = copy.deepcopy(model)
    groups = Mesh.of_plan(plan, world.world, log=world.log, device=device).data_groups()
    pipeline = make_pipeline(model, language_model_loss, data, plan, groups, device=device)
    assert pipeline is not None
    engine = shard_model(
        model, plan, groups, device=device, initialiser=None, dropout="native", pipeline=pipeline
    )
    batches = [torch.utils.data.default_collate([data[m]]) for m in range(4)]
    engine.start_step()
    executor = pipeline.executor(engine)
    executor.scopes = (float64_throughout,)
    executor.run(engine, lambda m: batches[m], divisor=1.0, step=0)
    with float64_throughout():
        for batch in batches:
            language_model_loss(plain, batch)[0].backward()
    expected = dict(plain.named_parameters())
    errors = [(shard.gradient - expected[shard.name].grad).abs().max() for shard in engine.shards]
    return len(errors), float(max(errors))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-v", marks=pytest.mark.parity)])
def test_micro_batches_of_other_lengths(ranks, schedule: str) -> None:
    """Each is recorded, and its messages have its own shape."""
    for number, worst in ranks.run(_worst_gradient, 2, schedule):
        assert number > 10
        assert worst < 1e-12


def _timed(world: Any, schedule: str) -> tuple[list[str], list[tuple[str, float, float, float]]]:
    """(computations of this rank's program, what the clock saw)."""
    device, rows = torch.device("cpu"), Rows()
    request = PlanRequest(pp=2, schedule=schedule, micro_batch=2, transport="gloo")
    plan = make_plan(request, world_size=2, global_batch=8)
    model = Uneven()
    mesh = Mesh.of_plan(plan, world.world, log=world.log, device=device)
    groups = mesh.data_groups()
    pipeline = make_pipeline(model, loss_of_labels, rows, plan, groups, device=device)
    assert pipeline is not None
    engine = shard_model(
        model, plan, groups, device=device, initialiser=None, dropout="native", pipeline=pipeline
    )
    executor = pipeline.executor(engine)
    seen: list[tuple[str, float, float, float]] = []
    executor.clock = lambda action, start, end, cpu: seen.append((str(action), start, end, cpu))
    batches = [torch.utils.data.default_collate([rows[2 * m], rows[2 * m + 1]]) for m in range(4)]
    engine.start_step()
    executor.run(engine, lambda m: batches[m], divisor=1.0, step=0)
    program = executor.schedule.programs[groups.pipeline.index]
    return [str(action) for action in program if action.op in COMPUTE], seen


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_clock_sees_each_computation_once_and_in_order(ranks, schedule: str) -> None:
    for program, seen in ranks.run(_timed, 2, schedule):
        assert [action for action, *_ in seen] == program
        times = [time for _, start, end, _ in seen for time in (start, end)]
        assert times == sorted(times)
        assert all(cpu > 0 for *_, cpu in seen)
