"""Loops of a user's own: on ranks and any policy they compute what plain PyTorch does on one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.sharding.harness import POLICIES
from tests.training.own_programs import PROGRAMS, PlainLab, ShardedLab, Tower, draw

CLIP = 0.7
Outcome = dict[str, tuple[list[float], list[tuple[str, int, Tensor]]]]


def _run(mesh: Any, policy: str, copies: int, names: list[str], recompute: str = "none") -> Outcome:
    labs = {name: ShardedLab(mesh, policy, CLIP, copies=copies, recompute=recompute) for name in names}
    return {name: PROGRAMS[name](lab) for name, lab in labs.items()}


@pytest.fixture(scope="module")
def expected() -> Outcome:
    return {name: program(PlainLab(CLIP)) for name, program in PROGRAMS.items()}


def _check(expected: Outcome, ranks: list[Outcome]) -> None:
    for outcome in ranks:
        for name, (numbers, pieces) in outcome.items():
            plain_numbers, plain_pieces = expected[name]
            assert numbers == pytest.approx(plain_numbers, rel=1e-12), name
            whole = {parameter: values for parameter, _, values in plain_pieces}
            for parameter, start, values in pieces:
                wanted = whole[parameter][start : start + len(values)]
                torch.testing.assert_close(values, wanted, rtol=1e-11, atol=1e-13, msg=f"{name}: {parameter}")


CASES = [(policy, world, 1) for policy in POLICIES for world in (1, 2, 3)]
COPIES = [("zero1", 2, 2), ("zero3/whole", 3, 1), ("zero1/whole", 2, 1), ("zero2", 6, 3), ("zero3", 6, 2)]


@pytest.mark.parametrize(
    ("policy", "world", "copies"),
    [*CASES, *COPIES[:3], *(pytest.param(*case, marks=pytest.mark.parity) for case in COPIES[3:])],
)
def test_programs_compute_what_plain_pytorch_does(
    ranks, expected: Outcome, policy: str, world: int, copies: int
) -> None:
    _check(expected, ranks.run(_run, world, policy, copies, list(PROGRAMS), timeout=120.0))


@pytest.mark.parametrize(
    ("policy", "recompute"),
    [
        ("zero3", "constant"),
        pytest.param("ddp", "full", marks=pytest.mark.parity),
        pytest.param("zero1", "every:2", marks=pytest.mark.parity),
        pytest.param("zero3/whole", "full", marks=pytest.mark.parity),
    ],
)
def test_what_runs_again_changes_no_program(ranks, expected: Outcome, policy: str, recompute: str) -> None:
    with_blocks = ["mean_loss", "weighted_loss", "gradient_penalty", "several_backwards"]
    _check(expected, ranks.run(_run, 2, policy, 1, with_blocks, recompute, timeout=120.0))


def _low_precision(mesh: Any, policy: str, precision: str, largest: float) -> Any:
    """Losses of the same steps, called whole and in lines, and whether each was applied."""
    outcomes = []
    for in_one_call in (True, False):
        lab = ShardedLab(mesh, policy, CLIP, precision=precision)
        model = lab.build(Tower, loss=lambda model, x: ((model(x).float() - 1).square().sum(), len(x)))
        optimizer = lab.optimizer(model, torch.optim.AdamW, lr=0.01)
        if model.state.loss_scale is not None:
            model.state.loss_scale = replace(model.state.loss_scale, value=largest)
        seen = []
        for step in range(8):
            x = lab.part(draw(step)).float()
            if in_one_call:
                model.step(x)
            else:
                with model.accumulate():
                    total = (model(x).float() - 1).square().sum()
                    (total / len(x)).backward()
            optimizer.step()
            seen.append((model.result.loss, model.result.applied, model.result.overflowed))
        outcomes.append((seen, lab.state(model)))
    return outcomes


@pytest.mark.parametrize(
    ("policy", "precision", "largest"),
    [("ddp", "bf16", 1.0), ("zero3", "bf16", 1.0), ("zero1", "fp16", 2.0**20), ("zero3", "fp16", 2.0**10)],
)
def test_low_precision_has_one_training_step_too(ranks, policy: str, precision: str, largest: float) -> None:
    for whole, lines in ranks.run(_low_precision, 2, policy, precision, largest, timeout=120.0):
        assert [state for _, *state in whole[0]] == [state for _, *state in lines[0]]
        skipped = [overflowed for _, _, overflowed in whole[0]]
        assert skipped[0] == (largest == 2.0**20)  # the scale was too large at first
        assert not skipped[-1]
        for (loss, *_), (other, *_) in zip(whole[0], lines[0], strict=True):
            assert loss == pytest.approx(other, rel=0.02)
        for (name, _, values), (_, _, others) in zip(whole[1], lines[1], strict=True):
            torch.testing.assert_close(values, others, rtol=0.05, atol=0.05, msg=name)


class Recomputed(Tower):
    """Its blocks run again in every backward, with their dropout."""

    recomputes = True

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = (
                checkpoint(self._block, block, x, use_reentrant=False)
                if self.recomputes
                else self._block(block, x)
            )
        return x

    def _block(self, block: Any, x: Tensor) -> Tensor:
        return x + self.drop(block(x))


class Kept(Recomputed):
    recomputes = False


def _slopes(mesh: Any, policy: str, recomputes: bool) -> tuple[Tensor, list[tuple[str, int, Tensor]]]:
    lab = ShardedLab(mesh, policy, seed=8)
    model = lab.build(lambda: (Recomputed if recomputes else Kept)(dropout=0.4))
    optimizer = lab.optimizer(model, torch.optim.SGD, lr=0.1)
    x = lab.part(draw(3)).requires_grad_()
    with model.accumulate():
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        out.square().mean().backward()
    optimizer.step()
    return slope, lab.state(model)


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_gradients_in_a_step_recompute_the_masks_of_the_forward(ranks, policy: str) -> None:
    ((slope, pieces),) = ranks.run(_slopes, 1, "ddp", False)
    outcomes = ranks.run(_slopes, 2, policy, True)
    torch.testing.assert_close(torch.cat([part for part, _ in outcomes]), slope, rtol=1e-12, atol=1e-14)
    for _, held in outcomes:
        _check({"step": ([], pieces)}, [{"step": ([], held)}])
