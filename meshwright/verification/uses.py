"""What a plain run makes a parallel one communicate: the order in which units are used, and batch statistics.

Owns hooks on the reference's model. Knows nothing of engines: it sees when modules run and when their backwards start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.adapt.batch_norm import find_batch_norms, num_sums
from meshwright.layout.uses import UnitUses
from meshwright.nested import tensors_in
from meshwright.sharding.units import find_units
from meshwright.verification.job import Uses


class UseObserver:
    """Watches a model through the micro-steps of a plain loop.

    Attributes:
        seen: of every micro-step so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Uses] = []
        self._clear()
        for name, unit in find_units(model).items():
            unit.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            unit.register_forward_hook(lambda _m, _args, output, name=name: self._leave(name, output))
        names = {module: name for name, module in model.named_modules()}
        for module in find_batch_norms(model):
            module.register_forward_pre_hook(partial(self._before_statistics, names[module]))
            module.register_forward_hook(self._after_statistics)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _p, name=name: self._trained.add(name))

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """A forward and its backward happen inside."""
        self._clear()
        yield
        units = UnitUses(tuple(self._forwards), tuple(self._backwards), frozenset(self._trained))
        self.seen.append(Uses(units, self._num_statistics, tuple(self._statistics.items())))
        self._clear()  # places hold a graph, which holds parameters, whose hooks hold this: no collector sees that

    def _clear(self) -> None:
        self._forwards: list[tuple[str, bool]] = []
        self._backwards: list[tuple[str, bool]] = []
        self._trained: set[str] = set()
        self._places: set[tuple[object, int]] = set()
        self._num_statistics = 0
        self._statistics: Counter[str] = Counter()

    def _enter(self, name: str) -> None:
        if _in_backward():
            self._backwards.append((name, False))
        else:
            self._forwards.append((name, False))

    def _leave(self, name: str, output: object) -> None:
        if _in_backward() or not torch.is_grad_enabled():
            return
        new = [tensor for tensor in tensors_in(output) if self._is_new(tensor)]
        if not new:
            return
        position = max(i for i, (used, _) in enumerate(self._forwards) if used == name)
        self._forwards[position] = (name, True)
        started: list[str] = []

        def start(_grad: Tensor) -> None:
            if not started:  # the first gradient of several outputs
                started.append(name)
                self._backwards.append((name, True))

        for tensor in new:
            tensor.register_hook(start)

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether no unit returned the tensor before."""
        place = (tensor if tensor.grad_fn is None else tensor.grad_fn, tensor.output_nr)
        is_new = tensor.requires_grad and place not in self._places
        self._places.add(place)
        return is_new

    def _before_statistics(self, name: str, module: nn.Module, args: Any) -> None:
        sums = num_sums(args[0]) if module.training else 0
        self._num_statistics += sums
        if not _in_backward():
            self._statistics[name] += sums

    def _after_statistics(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training and output.requires_grad and args[0].requires_grad:
            output.register_hook(self._count_backward)

    def _count_backward(self, _grad: Tensor) -> None:
        self._num_statistics += 1


def _in_backward() -> bool:
    # Private, as torch.utils.checkpoint has it: nothing public tells backward from forward (guarded by a test).
    return torch._C._current_graph_task_id() != -1
