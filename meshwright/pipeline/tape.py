"""What a loss does, as a list of calls on numbered values: modules that run as wholes, and the torch calls between.

Owns the values and what follows from them alone: where a storage is changed in place, which values need nothing but the
batch. Must not know how a tape is recorded, nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.errors import PlanError


@dataclass(frozen=True)
class Slot:
    """The value of that number, among the arguments of a call."""

    number: int


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of the model by its name, among the arguments of a call."""

    name: str


@dataclass(frozen=True)
class Value:
    """A tensor of the forward.

    Attributes:
        shape: of the part that a rank has.
        dtype: element type.
        needs_grad: whether a gradient may come back to it.
        storage: equal for values that share memory.
        maker: the call that makes it; -1 for a tensor of the batch.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    storage: int
    maker: int


@dataclass(frozen=True)
class Call:
    """One call of the forward.

    Attributes:
        module: name of the module that is called; "" for a torch function.
        function: what is called where it is no module.
        leaves: of its arguments, with `Slot` and `Held` for tensors.
        structure: the containers (positional, by name) that the leaves are in.
        inputs: numbers of the values it reads.
        outputs: numbers of its tensors, in the order in which they are found in its result; -1 for one known before.
        held: names of parameters and buffers it uses.
        changes: storages that it changes in place.
        draws: random calls inside.
        grad: whether gradients are recorded.
        cost: FLOPs of its forward, at least.
        number: how often the module has been called before it.
    """

    module: str
    function: Callable[..., Any] | None
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    held: tuple[str, ...] = ()
    changes: frozenset[int] = frozenset()
    draws: int = 0
    grad: bool = True
    cost: float = 0.0
    number: int = 0

    @property
    def anchor(self) -> str:
        """The call by a name that is the same for batches of all shapes: `blocks.2`, `shared call 2`."""
        return self.module + (f" call {self.number + 1}" if self.number else "")

    def describe(self) -> str:
        """For error texts."""
        if self.module:
            return f"module {self.module!r}"
        return f"{getattr(self.function, '__name__', self.function)}()"


@dataclass(frozen=True)
class Tape:
    """A forward with its loss.

    Attributes:
        calls: in order.
        values: by number.
        inputs: numbers of the batch's tensors, in the order in which they are found in it.
        total: number of the loss sum.
        count: number of the loss's count, or the count itself.
        trained: names of parameters and buffers that get a gradient.
        opened: modules that were not called as wholes.
        num_attentions: calls of attention that can be computed over ranks.
    """

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    total: int
    count: int | float | Slot
    trained: frozenset[str]
    opened: frozenset[str]
    num_attentions: int = 0
    is_free: tuple[bool, ...] = field(default=())

    def with_free(self) -> Tape:
        """The tape knowing which calls need nothing but the batch, buffers and constants: any stage may make them."""
        changed = {storage for call in self.calls for storage in call.changes}
        free: list[bool] = []
        for call in self.calls:
            plain = (
                not call.draws and not call.changes and not any(name in self.trained for name in call.held)
            )
            made = [self.values[n] for n in call.outputs if n >= 0]
            plain = plain and not any(v.needs_grad or v.storage in changed for v in made)
            plain = plain and not any(self.values[n].storage in changed for n in call.inputs)
            makers = (self.values[n].maker for n in call.inputs)
            free.append(plain and all(m < 0 or free[m] for m in makers))
        return replace(self, is_free=tuple(free))

    def joined(self) -> dict[int, str]:
        """Positions between which no stage may begin, with why: memory that is changed in place stays on one stage.

        Raises:
            PlanError: E262 where a tensor of the batch is changed.
        """
        first: dict[int, int] = {}
        last: dict[int, tuple[int, str]] = {}
        for number in self.inputs:
            first[self.values[number].storage] = -1
        for position, call in enumerate(self.calls):
            for number in (*call.inputs, *call.outputs):
                if number >= 0:
                    first.setdefault(self.values[number].storage, position)
            for storage in call.changes:
                last[storage] = (position, call.describe())
        found: dict[int, str] = {}
        for storage, (position, what) in last.items():
            begin = first.get(storage, position)
            if begin < 0:
                raise PlanError(
                    "E262",
                    f"{what} changes a tensor of the batch in place: stages get the batch each for itself, and would "
                    f"see different values. Use the operation that is not in place, or clone the tensor first.",
                )
            for cut in range(begin + 1, position + 1):
                found[cut] = f"{what} changes in place what was made before it"
        return found
