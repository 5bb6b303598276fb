"""What a step of a user's own loop is made of: its rules, its batch, its open and its closed state, its backward calls.

Plain values that `own_loop.py` moves along; it owns what they mean together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.adapt.dropout import DropoutKind, StatelessDropout
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import LoopError
from meshwright.sharding.engine import ShardParameter
from meshwright.training.step import Agreed


@dataclass(frozen=True)
class LoopRules:
    """What a job fixes for the loops over its models.

    Attributes:
        seed: of dropout.
        dropout: `stateless` or `native`, as `train.dropout`.
        clip_norm: limit of each optimizer's gradient norm, or None.
    """

    seed: int = 0
    dropout: DropoutKind = "stateless"
    clip_norm: float | None = None


class StepBatch(Sequence[Any]):
    """This rank's part of one step: a sequence of micro-batches, read when they are asked for.

    Attributes:
        geometry: how the global batch is cut.
    """

    def __init__(self, geometry: BatchGeometry, read: Callable[[int], Any]) -> None:
        self.geometry = geometry
        self._read = read

    def __len__(self) -> int:
        return self.geometry.num_microbatches

    def __getitem__(self, index: Any) -> Any:
        """Micro-batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        return self._read(index)


@dataclass(frozen=True, eq=False)
class Part:
    """The parameters of one optimizer.

    Attributes:
        names: of the parameters.
        shards: this rank's pieces of them.
        is_all: whether no other trained parameter exists.
        flag: an empty parameter in the optimizer's first group; it has a gradient when the others may have one, also on
            a rank that owns no piece, and zero_grad() takes it away.
    """

    names: frozenset[str]
    shards: tuple[ShardParameter, ...]
    is_all: bool
    flag: nn.Parameter


@dataclass
class OpenStep:
    """An open `accumulate`: what has come so far."""

    num_microbatches: int
    backwards: int
    tally: Tensor
    done: int = 0
    rows: int = 1
    counts_rows: bool = True
    kind: str = ""
    dropout: StatelessDropout | None = None

    @property
    def expected(self) -> int:
        """Backward calls that the block announced."""
        return self.num_microbatches * self.backwards

    @property
    def is_complete(self) -> bool:
        """Whether all of them came."""
        return self.done == self.expected


@dataclass
class StepGradients:
    """Gradients of a closed step, until the next one begins."""

    tally: Tensor
    limit: float | None
    kind: str = ""
    agreed: Agreed | None = None
    stepped: list[Part] = field(default_factory=list)


class BackwardWatch(TorchFunctionMode):
    """Sees the backward calls in a user's block.

    Args:
        run: is called in their place with tensors, their gradients (None: one) and retain_graph.
    """

    def __init__(self, run: Callable[[list[Tensor], list[Tensor | None], bool | None], None]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward or func is torch.autograd.backward:
            return self._backward(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _backward(
        self,
        func: Any,
        tensors: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *,
        grad_tensors: Any = None,
        inputs: Any = None,
    ) -> None:
        gradient = grad_tensors if gradient is None else gradient
        if inputs is not None:  # a gradient of other leaves: the user's
            func(tensors, gradient, retain_graph, create_graph, inputs=inputs)
            return
        if create_graph:
            raise LoopError(
                "E701",
                "backward(create_graph=True): gradients that go into sharded memory have no graph. Take "
                "torch.autograd.grad(..., create_graph=True) and call backward() on what you make of it.",
            )
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = [gradient] if gradient is None or isinstance(gradient, Tensor) else list(gradient)
        if len(gradients) == 1 and gradients[0] is None:
            gradients = [None] * len(tensors)
        self._run(tensors, gradients, retain_graph)
