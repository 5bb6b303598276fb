"""A job of a user's own loop saved on some ranks goes on on others; plain state dicts come and go whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.training.job_checkpoints import JobCheckpoints, Position
from meshwright.training.plain_state import stream_state
from tests.training.own_programs import Pair, ShardedLab, Tower, draw

STEPS, STOP = 5, 2


class Tied(Tower):
    """With dropout, a buffer and two names for one parameter."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.register_buffer("seen", torch.zeros(1))
        self.twin = self.head

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.encode(x))


def _run(mesh: Any, policy: str, folder: Path, first: int, last: int) -> Any:
    """Steps [first, last) of one training, saved after every one."""
    lab = ShardedLab(mesh, policy, seed=3)
    model = lab.build(Tied)
    optimizer = lab.optimizer(
        model, torch.optim.AdamW, lr=0.02, weight_decay=0.1, groups=[("*.bias", {"lr": 0.1})]
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    position = Position()
    saved = JobCheckpoints(folder, lab.plan, position, say=lambda _: None)
    if first:
        user = saved.resume([model], None, required=True)
        assert user is not None
        assert user["note"] == "kept"
        schedule.load_state_dict(user["schedule"])
        assert (position.step, position.samples) == (first, 6 * first)
    for step in range(first, last):
        with model.accumulate():
            x = lab.part(draw(step))
            (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        schedule.step()
        position.step, position.samples = step + 1, 6 * (step + 1)
        saved.save([model], {"note": "kept", "schedule": schedule.state_dict()})
    saved.finish()
    return model.result.loss, model.state_dict(), [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("rule", [("zero3", 3, "zero1", 2), ("ddp", 1, "zero3", 2), ("zero2", 2, "ddp", 3)])
def test_a_job_goes_on_on_other_ranks_and_by_another_policy(ranks, tmp_path: Path, rule) -> None:
    policy, world, next_policy, next_world = rule
    (loss, whole, rates), *_ = ranks.run(_run, 1, "ddp", tmp_path / "whole", 0, STEPS)
    ranks.run(_run, world, policy, tmp_path / "cut", 0, STOP)
    first, *others = ranks.run(_run, next_world, next_policy, tmp_path / "cut", STOP, STEPS)
    assert first[0] == pytest.approx(loss, rel=1e-12)
    assert first[2] == pytest.approx(rates)
    assert list(first[1]) == list(whole)
    for name, value in whole.items():
        torch.testing.assert_close(first[1][name], value, rtol=1e-11, atol=1e-13, msg=name)
    assert [state for _, state, _ in others] == [{}] * (next_world - 1)


def _exchange(mesh: Any, policy: str) -> Any:
    lab = ShardedLab(mesh, policy)
    model, other = lab.build(Tied), lab.build(Tied)
    with torch.no_grad():
        for shard in other.state.engine.shards:
            shard.parameter.mul_(-1)
            shard.parameter.view(-1)[:1] = -0.0
    other.state.engine.publish_masters()
    (values,) = _on_all(mesh, other)
    model.load_state_dict(values)
    (again,) = _on_all(mesh, model)
    with pytest.raises(MeshwrightError) as caught:
        model.load_state_dict({**values, "head.weight": torch.zeros(2, 2)})
    with torch.no_grad():
        outputs = float(model.eval()(draw(9)).sum())
    return values, again, outputs, str(caught.value), [name for name, _ in stream_state(model.state)]


def _on_all(mesh: Any, model: Any) -> list[dict[str, Tensor]]:
    """The state dict of rank 0 on every rank, as a file would bring it."""
    box = [model.state_dict()]
    if mesh.world.size > 1:
        torch.distributed.broadcast_object_list(box, src=0)
    return box


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero3"])
def test_plain_state_dicts_bit_by_bit(ranks, policy: str) -> None:
    ranked = ranks.run(_exchange, 2, policy)
    for values, again, outputs, error, names in ranked:
        assert list(values) == names == list(Tied().state_dict())
        for name in names:
            assert values[name].numpy().tobytes() == again[name].numpy().tobytes(), name
        plain = Tied().double()
        plain.load_state_dict(values)
        with torch.no_grad():
            assert outputs == pytest.approx(float(plain.eval()(draw(9)).sum()), rel=1e-12)
        assert error.startswith("E501 the state dict is of another model: 1 of ")
        assert "'head.weight': given (2, 2), the model has (1, 8)" in error


def _refused(mesh: Any, folder: Path) -> list[str]:
    lab = ShardedLab(mesh, "zero1")
    model = lab.build(Tower)
    optimizer = lab.optimizer(model, torch.optim.SGD, lr=0.1)
    saved = JobCheckpoints(folder, lab.plan, Position(), say=lambda _: None)
    found = []

    def refuse(*models: Any) -> None:
        with pytest.raises(MeshwrightError) as caught:
            saved.save(models, {})
        found.append(str(caught.value))

    refuse()
    refuse(model, lab.build(Pair))
    with model.accumulate():
        refuse(model)
        model(lab.part(draw(0))).mean().backward()
    refuse(model)
    optimizer.step()
    assert saved.resume([model], None, required=False) is None
    return found


def test_saves_that_cannot_be(ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(_refused, 1, tmp_path)
    assert found[0].startswith("E707 job.save() with 0 models: it comes after job.build()")
    assert found[1].startswith("E707 job.save() with 2 models")
    assert found[2] == found[3]
    assert found[2].startswith("E707 job.save() in the middle of a step")
