"""Layers that run again: the same gradients to the bit, as often as the schedule says, and nothing kept too long."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.errors import NumericsError, PlanError
from meshwright.layout.recompute import parse_recompute
from meshwright.partitioning.checkpointing import Layer, Span, constant, every, forwards_of, optimal
from meshwright.recompute.executor import Recomputer
from meshwright.recompute.holders import StayingWeights
from meshwright.recompute.install import find_chains, install
from meshwright.recompute.live_bytes import LiveBytes, saved_bytes

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, gate: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (y if gate is None else y * gate)


class Stack(nn.Module):
    """`between` changes what goes from one block to the next."""

    def __init__(self, num_blocks: int, between=lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean(0).detach() * 0 + 1.5
        for block in self.blocks:
            x = self.between(block(x, gate=gate))
        return self.head(x)


def make(num_blocks: int = 6, between=lambda x: x) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    model = Stack(num_blocks, between).double()
    return model, torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def blocks_of(model: Stack) -> dict[str, nn.Module]:
    return {f"blocks.{i}": block for i, block in enumerate(model.blocks)}


SCHEDULES = {
    "full": every(6, 1),
    "every:2": every(6, 2),
    "every:4": every(6, 4),
    "constant": constant(6),
    "tight": optimal([Layer(1, 2, 1, 3)] * 6, input_bytes=1, limit=7, slots=7),
    "loose": optimal([Layer(1, 2, 1, 3)] * 6, input_bytes=1, limit=12, slots=12),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_the_same_to_the_bit(name: str) -> None:
    schedule = SCHEDULES[name]
    assert schedule is not None
    model, x = make()
    expected = gradients(model, x)
    recomputer = Recomputer(blocks_of(model), schedule, StayingWeights(model))
    undo = recomputer.install()
    for steps in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
        ran = [1 + count // steps for count in recomputer.reruns.values()]
        assert ran == list(forwards_of(schedule))
    undo()
    assert all("forward" not in vars(block) for block in model.blocks)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))


@pytest.mark.parametrize("schedule", [every(6, 3), constant(6)], ids=str)
def test_a_broken_chain_keeps_inputs_and_computes_the_same(schedule: Span) -> None:
    model, x = make(between=lambda y: y * 1.0)
    expected = gradients(model, x)
    recomputer = Recomputer(blocks_of(model), schedule, StayingWeights(model))
    recomputer.install()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    assert set(recomputer.reruns.values()) == {1}


def test_a_result_changed_in_place_is_no_link() -> None:
    model, x = make(between=lambda y: y.mul_(0.5))
    model.head.requires_grad_(False)
    expected = gradients_of_trained(model, x)
    Recomputer(blocks_of(model), every(6, 3), StayingWeights(model)).install()
    got = gradients_of_trained(model, x)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class _InPlace(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.ELU(inplace=True), nn.Linear(DIM, DIM))


@pytest.mark.parametrize("word", ["full", "every:2", "constant"])
def test_layers_that_overwrite_their_own_input_run_again_on_a_copy(word: str) -> None:
    """ELU of a result of ELU is another number: a second run on what the first left would be wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), *(_InPlace() for _ in range(4)), nn.ELU(inplace=True)).double()
    x = torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    expected = gradients(model, x)
    install(model, parse_recompute(word))
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))


def gradients_of_trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    gradients_of = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).sum(), [x, *gradients_of]))


def kept_bytes(num_blocks: int, schedule: Span | None) -> int:
    """Bytes that wait for the backward, beside the input, and 8 of the gate's storage a model."""
    model, x = make(num_blocks)
    if schedule is not None:
        Recomputer(blocks_of(model), schedule, StayingWeights(model)).install()
    return saved_bytes(lambda: model(x), [x, *model.parameters()])


def tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def test_what_is_kept_does_not_grow_with_the_depth() -> None:
    assert kept_bytes(4, constant(4)) == kept_bytes(12, constant(12))
    whole, one = kept_bytes(12, None), 4 * DIM * 8
    assert kept_bytes(12, every(12, 1)) == kept_bytes(12, constant(12)) + 11 * one
    assert kept_bytes(12, every(12, 4)) == kept_bytes(12, constant(12)) + 2 * one
    assert whole > 12 * 5 * one


def test_nothing_waits_for_the_garbage_collector() -> None:
    model, x = make()
    Recomputer(blocks_of(model), every(6, 2), StayingWeights(model)).install()
    gradients(model, x)
    gc.collect()
    gc.disable()
    try:
        before = len(tensors())
        gradients(model, x)
        model(x)  # whose backward never comes
        gradients(model, x)
        assert len(tensors()) <= before + len(blocks_of(model))
    finally:
        gc.enable()


def test_evaluation_keeps_nothing() -> None:
    model, x = make()
    recomputer = Recomputer(blocks_of(model), every(6, 2), StayingWeights(model))
    recomputer.install()
    with torch.no_grad():
        model(x)
    assert set(recomputer.reruns.values()) == {0}


def test_two_backwards_and_a_kept_graph() -> None:
    model, x = make()
    loss = model(x).sum()
    torch.manual_seed(1)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    Recomputer(blocks_of(model), every(6, 2), StayingWeights(model)).install()
    torch.manual_seed(1)
    loss = model(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])
    assert torch.equal(first, expected)


def test_around_and_inside_of_torchs_checkpoint() -> None:
    model, x = make()
    expected = gradients(model, x)
    Recomputer(blocks_of(model), every(6, 2), StayingWeights(model)).install()
    forward = model.forward
    model.forward = lambda y: checkpoint(forward, y, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))


def test_autocast_is_replayed() -> None:
    model, x = make()
    model, x = model.float(), x.detach().float().requires_grad_()

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().sum()
        loss.backward()
        return [p.grad for p in model.parameters()]

    expected = run()
    Recomputer(blocks_of(model), every(6, 2), StayingWeights(model)).install()
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


class Moody(nn.Module):
    """Does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(DIM, DIM), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.linear(x).tanh() if self.runs % 2 else self.linear(x).tanh().sin().exp()


@pytest.mark.parametrize(("runs", "how"), [(0, "more"), (1, "fewer")])
def test_a_module_that_saves_other_tensors_is_named(runs: int, how: str) -> None:
    moody = Moody()
    moody.runs = runs
    model = nn.Sequential(moody, nn.Linear(DIM, 1))
    Recomputer(dict(model.named_children()), every(2, 2), StayingWeights(model)).install()
    with pytest.raises(NumericsError, match=f"module '0' saved {how} tensors when it ran again") as caught:
        model(torch.randn(2, DIM, requires_grad=True)).sum().backward()
    assert caught.value.code == "E241"


def test_an_input_changed_in_place_is_named() -> None:
    model, _ = make()
    Recomputer(blocks_of(model), every(6, 1), StayingWeights(model)).install()
    x = torch.zeros(4, DIM, dtype=torch.float64)
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(
        NumericsError, match=r"an input of module .blocks.0., of shape .* was changed in place"
    ):
        loss.backward()


def test_patterns_choose_modules_and_form_chains() -> None:
    model, _ = make()
    plan = parse_recompute({"blocks.0": "none", "blocks.*": "every:2"})
    chains = find_chains(model, plan)
    assert [(list(chain.modules), str(chain.kept)) for chain in chains] == [
        (["blocks.0"], "none"),
        ([f"blocks.{i}" for i in range(1, 6)], "every:2"),
    ]
    inner = find_chains(model, parse_recompute({"blocks.?.up": "full"}))
    assert [list(chain.modules) for chain in inner] == [[f"blocks.{i}.up"] for i in range(6)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"blocks.*": "none", "*.up": "full"}, "only such as stand in a module of an earlier rule"),
        ({"layers.*": "full"}, "pattern 'layers.*' matches no module of Stack"),
        ("full", "Linear has no nn.ModuleList or nn.Sequential"),
    ],
)
def test_what_matches_nothing_is_refused(value, text: str) -> None:
    model = make()[0] if isinstance(value, dict) else nn.Linear(2, 2)
    with pytest.raises(PlanError, match=text) as caught:
        install(model, parse_recompute(value))
    assert caught.value.code == "E242"


def test_live_bytes_counts_storages_once_and_frees_them() -> None:
    with LiveBytes(label=lambda: "made") as meter:
        a = torch.zeros(100)
        b = a.view(10, 10)[2:]
        c = a + 1
        del a, b
        d = c.mul_(2)
        del c
        assert (meter.now, meter.peak) == ({"made": 400}, 800)
        del d
        assert meter.total == 0
