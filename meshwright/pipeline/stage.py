"""One stage of one micro-batch: its calls made on real values, forward and backward.

Owns the values of a micro-batch on a stage while its backward is to come. Must not know schedules or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.errors import PlanError
from meshwright.nested import tensors_in
from meshwright.pipeline.cut import Stage
from meshwright.pipeline.tape import Call, Held, Slot, Tape


class Holder:
    """Finds modules, parameters and buffers of a model by name, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())

    def module(self, name: str) -> nn.Module:
        """The module of that name."""
        return self._modules[name]

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer of that name.

        Raises:
            PlanError: E264 where another stage has it.
        """
        owner, _, attribute = name.rpartition(".")
        found = getattr(self._modules[owner], attribute)
        if found is None:
            raise PlanError(
                "E264",
                f"plan.pp: the forward of this micro-batch uses {name!r} on a stage that does not have it: none of "
                f"the first micro-batch did. All micro-batches must use the same parameters on the same stages.",
            )
        return found


class StageRun:
    """The forward of a stage for one micro-batch, and its backward later.

    Args:
        tape: of the micro-batch.
        stage: what of it is made here.
        inputs: the tensors of the batch, in order.
        received: values from the stage before, by number; those that need a gradient are leaves.
    """

    def __init__(
        self, tape: Tape, stage: Stage, inputs: Mapping[int, Tensor], received: dict[int, Tensor]
    ) -> None:
        self.tape, self.stage = tape, stage
        self._received = received
        self._env: dict[int, Tensor] = {**inputs, **received}
        self._kept: dict[int, Tensor] = {}

    def forward(self, holder: Holder) -> None:
        """Make all calls of the stage."""
        env = self._env
        recording = torch.is_grad_enabled()
        for position, drops in zip(self.stage.calls, self.stage.drops, strict=True):
            call = self.tape.calls[position]
            leaves = [self._resolve(leaf, holder) for leaf in call.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, call.structure)
            with torch.set_grad_enabled(recording and call.grad):
                target = holder.module(call.module) if call.module else call.function
                assert target is not None
                result = target(*args, **kwargs)
            made = list(tensors_in(result))
            if len(made) != len(call.outputs):
                raise _differs(call, f"{len(made)} tensors instead of {len(call.outputs)}")
            env.update((n, x) for n, x in zip(call.outputs, made, strict=True) if n >= 0)
            for number in drops:
                env.pop(number, None)
        kept = {*self.stage.sends, self.tape.total}
        kept |= {self.tape.count.number} if isinstance(self.tape.count, Slot) else set()
        self._kept = {n: env[n] for n in kept if n in env}
        for number in self.stage.sends:
            self._check(number)
        self._env = {}

    def _resolve(self, leaf: Any, holder: Holder) -> Any:
        if isinstance(leaf, Slot):
            return self._env[leaf.number]
        return holder.tensor(leaf.name) if isinstance(leaf, Held) else leaf

    def _check(self, number: int) -> None:
        value, made = self.tape.values[number], self._kept[number]
        if tuple(made.shape) != value.shape or made.dtype != value.dtype:
            call = self.tape.calls[value.maker]
            raise _differs(
                call, f"{tuple(made.shape)} of {made.dtype} instead of {value.shape} of {value.dtype}"
            )

    def output(self, number: int) -> Tensor:
        """A value for the stage behind, outside of any graph."""
        return self._kept[number].detach()

    def loss(self) -> tuple[Tensor, float]:
        """(sum, count), on the last stage."""
        count = self.tape.count
        number = float(self._kept[count.number]) if isinstance(count, Slot) else float(count)
        return self._kept[self.tape.total], number

    @property
    def wanted(self) -> list[int]:
        """Values of which the stage behind sends gradients."""
        return [n for n in self.stage.sends if self.tape.values[n].needs_grad]

    @property
    def owed(self) -> list[int]:
        """Values of which the stage before gets gradients."""
        return [n for n in self.stage.receives if self.tape.values[n].needs_grad]

    def backward(
        self,
        gradients: Mapping[int, Tensor],
        *,
        divisor: float | None,
        watch: Callable[[Iterable[Tensor]], None] | None = None,
    ) -> dict[int, Tensor]:
        """Run the backward.

        Args:
            gradients: of the values that were sent, by number.
            divisor: on the last stage what the loss sum is divided by; else None.
            watch: is told what the backward begins with, if somebody wants to know.

        Returns:
            Gradients of the values that were received.
        """
        made = [n for n in gradients if n not in self._received and self._kept[n].requires_grad]
        roots = [self._kept[n] for n in made]
        starts: list[Tensor | None] = [gradients[n] for n in made]
        if divisor is not None:
            total = self._kept[self.tape.total]
            if total.requires_grad:
                roots.append(total / divisor)
                starts.append(None)
        if roots and watch is not None:
            watch(roots)
        if roots:
            torch.autograd.backward(roots, starts)
        owed = {}
        for number in self.owed:
            own = self._received[number].grad
            passed = gradients.get(number)  # of a value that went on to the stages behind
            parts = [x for x in (own, passed) if x is not None]
            total_of = parts[0] + parts[1] if len(parts) == 2 else next(iter(parts), None)
            owed[number] = (
                torch.zeros_like(self._received[number]) if total_of is None else total_of.contiguous()
            )
        self._kept, self._received = {}, {}
        return owed


def _differs(call: Call, how: str) -> PlanError:
    return PlanError(
        "E266",
        f"plan.pp: {call.describe()} returned {how} that were foreseen without values. A stage behind cannot get them: "
        f"the result of a module must depend on shapes alone. Set plan.pp=1.",
    )
