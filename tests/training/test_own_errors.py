"""Mistakes of a user's own loop: each is named, with the fix, and the loop may go on where nothing was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.training.own_optimizer import check_rule
from tests.training.own_programs import ShardedLab, Tower, draw


def _start(mesh: Any, policy: str, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    lab = ShardedLab(mesh, policy)
    model = lab.build(Tower, **options)
    return model, lab.optimizer(model, torch.optim.SGD, lr=0.1), lab.part(draw(1))


def _train(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    with model.accumulate():
        model(x).square().mean().backward()
    optimizer.step()


def _forward_outside(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    model(x)


def _method_outside(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    model.encode(x)


def _nested(model: Any, _optimizer: Any, _x: torch.Tensor) -> None:
    with model.accumulate(), model.accumulate():
        pass


def _create_graph(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    with model.accumulate():
        model(x).mean().backward(create_graph=True)


def _sum_outside(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    model.backward(x.sum().requires_grad_(), 1)


def _without_loss(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    model.step(x)


def _too_few(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    with model.accumulate(2):
        model(x).mean().backward()


def _too_many(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    with model.accumulate():
        out = model(x).mean()
        out.backward(retain_graph=True)
        out.backward()


def _none_at_all(model: Any, _optimizer: Any, _x: torch.Tensor) -> None:
    with model.accumulate(0):
        pass


def _step_without_backward(_model: Any, optimizer: Any, _x: torch.Tensor) -> None:
    optimizer.step()


def _step_twice(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    _train(model, optimizer, x)
    optimizer.step()


def _step_inside(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    with model.accumulate():
        model(x).mean().backward()
        optimizer.step()


def _closure(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.step(lambda: 0.0)


def _zeroed_before_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    with model.accumulate():
        model(x).mean().backward()
    optimizer.zero_grad()
    optimizer.step()


def _foreign_optimizer(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.accumulate():
            model(x).mean().backward()
        own.step()


def _mean_and_sum(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    with model.accumulate(2):
        model(x).mean().backward()
        model.backward(model(x).sum(), len(x))


def _closed(model: Any, _optimizer: Any, x: torch.Tensor) -> None:
    model.close()
    with torch.no_grad():
        model(x)


def _second_optimizer(model: Any, _optimizer: Any, _x: torch.Tensor) -> None:
    ShardedLab.optimizer(None, model, torch.optim.SGD, only="head.*", lr=0.1)


def _no_such_parameter(model: Any, _optimizer: Any, _x: torch.Tensor) -> None:
    ShardedLab.optimizer(None, model, torch.optim.SGD, only="decoder.*", lr=0.1)


MISTAKES: list[tuple[Callable[..., None], str, str]] = [
    (_forward_outside, "E701", "Tower runs with gradients outside of a step"),
    (_method_outside, "E701", "Train inside `with model.accumulate():`"),
    (_nested, "E701", "a step begins inside another"),
    (_create_graph, "E701", "Take torch.autograd.grad(..., create_graph=True)"),
    (_sum_outside, "E701", "model.backward() outside of `with model.accumulate():`"),
    (_without_loss, "E701", "the model was built without a loss: job.build(build, loss=loss)"),
    (_too_few, "E702", "accumulate(2, backwards=1) ended on rank 0 after 1 of 2 backward calls"),
    (_too_many, "E702", "accumulate(1, backwards=1) got a further backward call on rank 0"),
    (_none_at_all, "E702", "accumulate(0, backwards=1): both are 1 or more"),
    (_step_without_backward, "E703", "step() without new gradients: model.step(batch), or"),
    (_step_twice, "E703", "step() for the second time on the same gradients"),
    (_step_inside, "E703", "step() inside `with model.accumulate():`; it comes after the block"),
    (_closure, "E703", "step(closure): forwards and backwards belong before it"),
    (_zeroed_before_step, "E703", "step() without new gradients"),
    (_foreign_optimizer, "E703", "(An optimizer over model.parameters() updates nothing.)"),
    (_mean_and_sum, "E704", "one step mixes loss.backward() (a mean) and model.backward(total, count)"),
    (_closed, "E705", "Tower is used after its job ended"),
    (_second_optimizer, "E706", "2 parameters have an optimizer already: head.weight, head.bias"),
    (_no_such_parameter, "E706", "only='decoder.*' fits none of the 8 trained parameters: embed.weight"),
]


def _provoke(mesh: Any, policy: str) -> list[tuple[str, str]]:
    found = []
    for mistake, _, _ in MISTAKES:
        model, optimizer, x = _start(mesh, policy)
        with pytest.raises(MeshwrightError) as caught:
            mistake(model, optimizer, x)
        found.append((caught.value.code, caught.value.message))
    return found


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_mistakes_are_named_on_one_process_already(ranks, policy: str) -> None:
    for (code, message), (mistake, wanted, text) in zip(
        ranks.run(_provoke, 1, policy, timeout=120.0)[0], MISTAKES, strict=True
    ):
        assert code == wanted, mistake.__name__
        assert text in message, mistake.__name__


def _backward_outside(mesh: Any, policy: str) -> str:
    model, _, x = _start(mesh, policy)
    with model.accumulate():
        loss = model(x).mean()
        loss.backward(retain_graph=True)
    with pytest.raises(MeshwrightError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_backward_outside_of_a_step(ranks, policy: str) -> None:
    for message in ranks.run(_backward_outside, 2, policy):
        assert message.startswith("E701 a gradient is asked of Tower outside of a step")
        assert "inside `with model.accumulate():`" in message


def _decay_outside(mesh: Any) -> str:
    model, _, _ = _start(mesh, "ddp")
    with pytest.raises(MeshwrightError) as caught:
        sum(p.square().sum() for p in model.parameters()).backward()
    return str(caught.value)


def test_a_gradient_that_passes_no_forward(ranks) -> None:
    (message,) = ranks.run(_decay_outside, 1)
    assert message.startswith("E701 parameter 'head.bias' got a gradient outside of a step")


def _unequal(mesh: Any) -> tuple[str, str]:
    model, optimizer, _ = _start(mesh, "zero1")
    with pytest.raises(MeshwrightError) as caught:
        _train(model, optimizer, draw(1, 3 + mesh.rank))
    return caught.value.code, caught.value.message


def test_means_over_unequally_many_samples_are_refused(ranks) -> None:
    for rank, (code, message) in enumerate(ranks.run(_unequal, 2)):
        assert code == "E704"
        assert f"rank {rank} expected {6 + 2 * rank} in this step and all ranks had 7" in message
        assert "model.backward(total, count)" in message


def _not_finite(mesh: Any, policy: str) -> tuple[str, str, bool]:
    model, optimizer, x = _start(mesh, policy)
    before = [shard.parameter.detach().clone() for shard in model.state.engine.shards]
    with pytest.raises(MeshwrightError) as caught:
        _train(model, optimizer, x / (mesh.rank - 1))
    pairs = zip(before, model.state.engine.shards, strict=True)
    unchanged = all(torch.equal(value, shard.parameter) for value, shard in pairs)
    _train(model, optimizer, x)  # nothing is left of the step
    assert model.result.applied
    return caught.value.code, caught.value.message, unchanged


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks, policy: str) -> None:
    for code, message, unchanged in ranks.run(_not_finite, 2, policy):
        assert code == "E601"
        assert "not finite at step 0 (loss nan" in message
        assert unchanged


def _leave_out(mesh: Any) -> bool:
    model, optimizer, x = _start(mesh, "zero3")
    with model.accumulate():
        model(x).mean().backward()
    optimizer.zero_grad()
    _train(model, optimizer, x)
    return model.result.applied and model.state.step == 1


def test_zero_grad_leaves_a_step_out_also_where_ranks_own_nothing(ranks) -> None:
    assert ranks.run(_leave_out, 3) == [True] * 3


def _one_step(mesh: Any, loss: Callable[..., Any]) -> tuple[str, str]:
    model, _, x = _start(mesh, "zero2", loss=loss)
    with pytest.raises(MeshwrightError) as caught:
        model.step(x)
    return caught.value.code, caught.value.message


def _mean_of_valid(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).squeeze(1)[x[:, 0] > 0].square().mean()


def _not_a_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize(
    ("loss", "code", "text"),
    [
        (_mean_of_valid, "E112", "a bare scalar that is not a mean over samples"),
        (_not_a_loss, "E111", "must return (sum, count); it returned Tensor"),
    ],
)
def test_what_a_loss_of_model_step_may_return(ranks, loss, code: str, text: str) -> None:
    for found, message in ranks.run(_one_step, 2, loss):
        assert found == code
        assert text in message


@pytest.mark.parametrize(
    ("kind", "holds_whole", "text"),
    [
        (torch.optim.LBFGS, True, "torch.optim.LBFGS cannot run here"),
        (
            torch.optim.Adafactor,
            False,
            "Adafactor looks at whole parameters, and flat shards cut them anywhere",
        ),
        (torch.optim.Muon, False, 'Set plan.ownership="whole", or plan.zero=0'),
    ],
)
def test_torch_rules_that_cannot_run_are_refused_by_name(kind, holds_whole: bool, text: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        check_rule(kind, {}, holds_whole=holds_whole)
    assert caught.value.code == "E204"
    assert text in caught.value.message


class Adafactor(torch.optim.Adafactor):
    """A class of the user's, of torch's rule: it is tried."""


class LBFGS(torch.optim.LBFGS):
    """Needs a closure."""


class RAdam(torch.optim.RAdam):
    """Elementwise."""


def test_rules_of_others_are_tried() -> None:
    with pytest.raises(MeshwrightError, match="E204 Adafactor does not work element by element"):
        check_rule(Adafactor, {"lr": 0.0}, holds_whole=False)
    with pytest.raises(MeshwrightError, match="E204 LBFGS cannot make a plain step"):
        check_rule(LBFGS, {}, holds_whole=True)
    check_rule(Adafactor, {}, holds_whole=True)
    check_rule(RAdam, {"lr": 1e-3, "foreach": None}, holds_whole=False)


def test_a_rule_by_norms_is_seen() -> None:
    class ByNorm(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data -= p.grad / p.grad.norm()

    with pytest.raises(MeshwrightError, match="E204 ByNorm does not work element by element"):
        check_rule(ByNorm, {"lr": 1.0}, holds_whole=False)
    check_rule(ByNorm, {"lr": 1.0}, holds_whole=True)
