"""zero3 around awkward modules: right gradients or an error, never a wrong number, and nothing left gathered."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.training.step import evaluate
from tests.sharding.harness import accumulate, assemble, check_gradients, gradient_pieces, make_engine

WIDTH = 6


def _inputs(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def _loss(model: Any, rank: int, microbatch: int) -> Tensor:
    return model(_inputs(rank, microbatch)).square().sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks, one after the other; `kind` says with what trick."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([_BLOCKS.get(kind, Block)() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.kind == "checkpoint around a unit":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.kind == "reentrant checkpoint around a unit":
                x = checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
            else:
                x = _joined(block(x))
        return self.head(x)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class ReturnsDict(Block):
    def forward(self, x: Tensor) -> Any:
        return {"a": self.up(x), "more": [self.down(self.up(x)), {"x": x}]}


class ReturnsTuple(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (None, x.detach()), 3


class UsesHalfOfItsOutputs(Block):
    """The second output depends on other weights, and nobody uses it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up(x)


class InPlace(Block):
    """Returns the tensor that it was given, changed."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(torch.tanh(self.up(x.clone())))
        return x


class Skipped(Block):
    """Stochastic depth: the middle block hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skip else super().forward(x)


class PassesItsInputOn(Block):
    """Outputs its input beside a result that nobody uses."""

    def forward(self, x: Tensor) -> Any:
        return x, (super().forward(x), None), 3


_BLOCKS = {
    "checkpoint inside a unit": Checkpointed,
    "dict": ReturnsDict,
    "tuple": ReturnsTuple,
    "unused output": UsesHalfOfItsOutputs,
    "in place": InPlace,
    "skipped": Skipped,
}
KINDS = [*_BLOCKS, "checkpoint around a unit", "reentrant checkpoint around a unit"]


def _joined(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["a"].sum(1, keepdim=True) + output["more"][0] + output["more"][1]["x"]
    return output[0] if isinstance(output, tuple) else output


def _build_chain(kind: str) -> nn.Module:
    torch.manual_seed(1)
    model = Chain(kind).double()
    if kind == "skipped":
        model.blocks[1].skip = True
    return model


class Builder:
    """Picklable `build()`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self) -> nn.Module:
        return _build_chain(self.kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_equal_the_plain_model(ranks, kind: str, num_microbatches: int) -> None:
    gradients = check_gradients(
        ranks, Builder(kind), _loss, policy="zero3", world=2, num_microbatches=num_microbatches
    )
    trained = [name for name, gradient in gradients.items() if bool(gradient.any())]
    assert "blocks.0.up.weight" in trained
    assert ("blocks.1.up.weight" in trained) == (kind != "skipped")


def _activations_after_forward(mesh, kind: str) -> list[bool]:
    """Whether the inner activation of each block is still there between forward and backward."""
    model = _build_chain(kind)
    engine = make_engine(mesh, model, "zero3")
    kept: list[weakref.ref] = []
    for block in model.blocks:
        block.down.register_forward_pre_hook(lambda _module, args: kept.append(weakref.ref(args[0])))
    engine.start_step()
    engine.start_microbatch(last=True)
    loss = _loss(model, mesh.rank, 0)
    alive = [reference() is not None for reference in kept]
    engine.start_backward()
    loss.backward()
    engine.finish_microbatch()
    return alive


def test_a_checkpoint_around_a_unit_keeps_no_activations(ranks) -> None:
    for alive in ranks.run(_activations_after_forward, 2, "checkpoint around a unit"):
        assert alive == [False] * 3
    for alive in ranks.run(_activations_after_forward, 2, "tuple"):
        assert alive == [True] * 3


def _in_turns(mesh, are_told: bool) -> tuple[dict[str, int], list[str], Any]:
    """Two micro-batches whose forwards both come before their backwards: (bytes, units left gathered, gradients)."""
    model = _build_chain("plain")
    engine = make_engine(mesh, model, "zero3")
    engine.start_step()
    turns = [(0, m) if are_told else None for m in range(2)]
    losses = []
    for m in range(2):
        engine.start_forward(turns[m])
        losses.append(_loss(model, mesh.rank, m))
    for m in range(2):
        engine.expect_gradients(last=m == 1)
        engine.start_backward(turns[m])
        losses[m].backward()
        engine.finish_microbatch()
    return engine.storage_bytes(), engine.gathered_units, gradient_pieces(engine)


def test_forwards_that_are_told_apart_reduce_unit_by_unit(ranks) -> None:
    """As in a pipeline. Untold, all units of a micro-batch but the newest are open until its end."""
    told, untold = (ranks.run(_in_turns, 2, are_told) for are_told in (True, False))
    for (held, gathered, _), (more, _, _) in zip(told, untold, strict=True):
        assert gathered == []
        assert held["pool"] < more["pool"]
    first, second = (assemble([pieces for *_, pieces in found]) for found in (told, untold))
    assert all(torch.equal(first[name], second[name]) for name in first)


def _passes_on() -> nn.Module:
    torch.manual_seed(1)
    model = Chain("tuple").double()
    model.blocks[1] = PassesItsInputOn().double()
    return model


def test_a_unit_that_hands_its_input_on_does_not_end_its_predecessor(ranks) -> None:
    gradients = check_gradients(ranks, _passes_on, _loss, policy="zero3", world=2, num_microbatches=2)
    assert bool(gradients["blocks.0.up.weight"].any())
    assert not bool(gradients["blocks.1.up.weight"].any())


class Branches(nn.Module):
    """Parallel branches, a block used twice, another order in every second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.flip = False

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.blocks
        if self.flip:
            a, d = d, a
        left, right = b(a(x)), c(x)
        return d(a(left * right)) + left


def _build_branches() -> nn.Module:
    torch.manual_seed(1)
    return Branches().double()


def _flipping_loss(model: Any, rank: int, microbatch: int) -> Tensor:
    model.flip = microbatch == 1
    return _loss(model, rank, microbatch)


@pytest.mark.parametrize("world", [2, 3])
def test_branches_repeated_blocks_and_changing_order(ranks, world: int) -> None:
    check_gradients(ranks, _build_branches, _flipping_loss, policy="zero3", world=world, num_microbatches=3)


class Peeks(nn.Module):
    """Uses a block's weight outside of the block's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.blocks[0].weight)


def _peek(mesh) -> str:
    engine = make_engine(mesh, Peeks().double(), "zero3")
    with pytest.raises(RuntimeError) as caught:
        accumulate(engine, _loss, mesh.rank)
    return str(caught.value)


def test_a_freed_weight_used_outside_of_its_module_is_an_error(ranks) -> None:
    for text in ranks.run(_peek, 2):
        assert "not allocated" in text or "storage" in text


class Box:
    """An object of which nobody knows that it holds a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class ReturnsBox(Block):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class Unboxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReturnsBox() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).x
        return x


def _hide(mesh) -> tuple[str, bool]:
    engine = make_engine(mesh, Unboxing().double(), "zero3")
    with engine.evaluation():
        finite = bool(engine.model(_inputs(0, 0)).isfinite().all())  # without a backward it does not matter
    with pytest.raises(RuntimeError) as caught:
        accumulate(engine, _loss, mesh.rank)
    return str(caught.value), finite


def test_outputs_without_visible_tensors_are_an_error(ranks) -> None:
    for text, finite in ranks.run(_hide, 2):
        assert "module 'blocks.0' returned Box, in which no tensor is found" in text
        assert finite


def _call_outside(mesh) -> str:
    engine = make_engine(mesh, _build_chain("plain"), "zero3")
    with pytest.raises(RuntimeError) as caught:
        engine.model(_inputs(0, 0))
    accumulate(engine, _loss, mesh.rank)
    with pytest.raises(RuntimeError) as again:
        engine.model(_inputs(0, 0))
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def test_a_module_called_outside_of_a_step_is_an_error(ranks) -> None:
    for text in ranks.run(_call_outside, 2):
        assert "module 'blocks.0' runs outside of a step" in text
        assert "evaluation()" in text


def _evaluate(mesh) -> tuple[float, list[int], Tensor]:
    engine = make_engine(mesh, _build_chain("plain"), "zero3")
    held = [len(engine.gathered_units)]
    with engine.evaluation():
        output = engine.model(_inputs(0, 0))
        held.append(len(engine.gathered_units))
    held.append(len(engine.gathered_units))
    with pytest.raises(RuntimeError, match="mat1 and mat2"), engine.evaluation():
        engine.model(torch.ones(1, WIDTH + 1, dtype=torch.float64))
    held.append(len(engine.gathered_units))
    batches = [_inputs(mesh.rank, k) for k in range(3)]
    loss = evaluate(engine, batches, loss=lambda model, x: (model(x).square().sum(), len(x)))
    held.append(len(engine.gathered_units))
    assert engine.model.training
    return loss, held, output


def test_evaluation_computes_the_plain_loss_and_frees_everything(ranks) -> None:
    model = _build_chain("plain")
    with torch.no_grad():
        expected = sum(float(_loss(model, rank, k)) for rank in range(2) for k in range(3)) / 18
        output = model(_inputs(0, 0))
    for loss, held, result in ranks.run(_evaluate, 2):
        assert loss == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(result, output, rtol=1e-12, atol=0)
        assert held[1] > 0
        assert held[:1] + held[2:] == [0, 0, 0, 0]


def _without_keep_last(mesh) -> dict[str, int]:
    engine = make_engine(mesh, _build_chain("plain"), "zero3", keep_last=False)
    mesh.log.reset_counters()
    accumulate(engine, _loss, mesh.rank)
    return {op: calls for (op, _), calls in mesh.log.calls.items()}


def test_without_keep_last_every_unit_is_gathered_twice(ranks) -> None:
    for calls in ranks.run(_without_keep_last, 2):
        assert calls == {"all_gather": 2 * 4, "reduce_scatter": 4}


class TwoBackwardPasses(nn.Module):
    """One layer in two reentrant checkpoints: autograd hands over its gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.layer, torch.tanh(x), use_reentrant=True)


def _build_two_passes() -> nn.Module:
    torch.manual_seed(1)
    return TwoBackwardPasses().double()


def _late_gradient(mesh, policy: str) -> str:
    engine = make_engine(mesh, _build_two_passes(), policy)
    with pytest.raises(RuntimeError) as caught:
        accumulate(engine, _loss, mesh.rank)
    engine.finish_microbatch()  # nothing may be in flight when the group goes away
    return str(caught.value)


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2"])
def test_a_gradient_after_its_reduction_is_an_error(ranks, policy: str) -> None:
    for text in ranks.run(_late_gradient, 2, policy):
        assert "got a gradient after bucket 0 was reduced" in text
        assert "use_reentrant=False" in text


def test_the_root_sums_gradients_that_come_in_two_parts(ranks) -> None:
    check_gradients(ranks, _build_two_passes, _loss, policy="zero3", num_microbatches=2)


class _AuxiliaryBlock(nn.Module):
    """Stores a tensor on itself, computed with its weights after its output, that the loss then uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        output = x + self.linear(x)
        self.extra = self.linear(torch.tanh(output)).square().sum()
        return output


class _AuxiliaryNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_AuxiliaryBlock() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _build_auxiliary() -> nn.Module:
    torch.manual_seed(0)
    return _AuxiliaryNet().double()


def _auxiliary_loss(model: Any, rank: int, microbatch: int) -> Tensor:
    total = model(_inputs(rank, microbatch)).square().mean()
    return total + sum(block.extra for block in model.blocks)


@pytest.mark.parametrize("world", [2, 3])
def test_backward_may_enter_a_unit_before_its_output_has_a_gradient(ranks, world: int) -> None:
    """Weights that are still on their way, or released, are waited for when backward asks for them."""
    check_gradients(ranks, _build_auxiliary, _auxiliary_loss, policy="zero3", world=world)


def _change_in_place(mesh) -> str:
    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).sigmoid()
            z = y * 2
            y.add_(1)  # sigmoid's backward needs the old value
            return z

    engine = make_engine(mesh, nn.Sequential(Block(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double(), "zero3")
    engine.start_step()
    engine.start_microbatch(last=True)
    total = engine.model(_inputs(mesh.rank, 0)).sum()
    engine.start_backward()
    with pytest.raises(RuntimeError) as caught:
        total.backward()
    return str(caught.value)


def test_a_change_in_place_of_what_backward_needs_is_still_an_error(ranks) -> None:
    for text in ranks.run(_change_in_place, 2):
        assert "was changed in place" in text


def test_reading_weights_on_their_way_is_an_error(ranks) -> None:
    ranks.run(_peek_ahead, 2)


def _peek_ahead(mesh) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)  # starts to gather blocks.1
            return x @ self.blocks[1].weight

    engine = make_engine(mesh, Net().double(), "zero3")
    with pytest.raises(RuntimeError, match="not allocated"), engine.evaluation():
        engine.model(_inputs(mesh.rank, 0))
