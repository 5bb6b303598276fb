"""Calls of torch's functions that were noted and can run again together; what autograd keeps: `holders.py`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.nested import tensors_in
from meshwright.recompute.holders import Arguments, Collector, Enough, Holder, Weights


@dataclass(eq=False)
class Step:
    """One call, and what puts randomness back for it."""

    function: Callable[..., Any]
    arguments: Arguments
    replay: Callable[[], AbstractContextManager[None]] | None


@dataclass(eq=False)
class Region:
    """Steps that run again together.

    Attributes:
        name: for error texts.
        weights: where they are.
        keeps_results: whether results are asked for beside what autograd kept of the steps.
        steps: in order.
        num_results: of all steps so far.
        holders: what autograd keeps of them, in order.
        made: results of the second run, where they are kept.
    """

    name: str
    weights: Weights
    keeps_results: bool = False
    steps: list[Step] = field(default_factory=list)
    num_results: int = 0
    holders: list[weakref.ref[Holder]] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def open(self, holder: Holder) -> Tensor:
        """The tensor in the place of which `holder` was kept."""
        if holder.value is None:
            self._again()
        return self.weights.unpack(holder.value)

    def result(self, number: int) -> Tensor:
        """A result, made again."""
        assert self.keeps_results, f"{self.name} gives its results up"
        if not self.made:
            self._again()
        return self.made[number]

    def _again(self) -> None:
        collector, made = Collector(self, self.weights, ends=not self.keeps_results), list[Tensor]()
        try:
            with torch.enable_grad(), collector.hooks():
                for step in self.steps:
                    with step.replay() if step.replay is not None else nullcontext():
                        args, kwargs = step.arguments.linked(made, self.name)
                        made += tensors_in(step.function(*args, **kwargs))
        except Enough:
            pass
        collector.check()
        self.steps.clear()
        self.made = [tensor.detach() for tensor in made] if self.keeps_results else []


def checkpoint_in_force() -> object:
    """The hook by which the innermost of torch's checkpoints keeps tensors, if it is the innermost hook."""
    # Private: nothing public tells which hooks are in force (guarded by a test).
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inner = None if hooks is None else hooks[0]
    return inner if getattr(inner, "__module__", "") == "torch.utils.checkpoint" else None
