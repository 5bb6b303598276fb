"""One unit of a model run alone, by the code that runs a stage: seconds, and bytes that it keeps for backward.

Owns random weights and inputs, and gradients that are added up as in a run. Must not know which units are alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.adapt import linear
from meshwright.adapt.linear import Deferral
from meshwright.pipeline.cut import Stage
from meshwright.pipeline.record import Twin
from meshwright.pipeline.redistribute import num_samples_in
from meshwright.pipeline.stage import Holder, StageRun
from meshwright.pipeline.tape import Tape

# At least so many timings of a unit, and until they took so long together, but never more than the last.
_FEWEST, _SECONDS, _MOST = 3, 0.06, 25


# samples -> around a forward (True) or a backward (False)
Randomness = Callable[[int], Callable[[bool], AbstractContextManager[None]]]


def torchs(_samples: int) -> Callable[[bool], AbstractContextManager[None]]:
    """Random numbers are torch's."""
    return lambda _is_forward: nullcontext()


@dataclass(frozen=True)
class Sized:
    """A micro-batch of one size.

    Attributes:
        inputs: its tensors, by number.
        tape: what the loss does with it.
        taller: the same with one sample more.
        units: what each unit does of it.
    """

    inputs: Mapping[int, Tensor]
    tape: Tape
    taller: Tape
    units: list[Stage]


@dataclass(frozen=True)
class Timed:
    """Of one unit at one size."""

    forward: float
    backward: float
    kept_bytes: float


class _Gradients:
    """Sums of gradients in `.grad`, to which products are added past autograd as in a run."""

    def lender(self, parameter: nn.Parameter) -> Callable[[], Tensor | None] | None:
        """There is always an earlier sum."""
        return None if parameter.is_meta or parameter.grad is None else lambda: None

    def adder(self, parameter: nn.Parameter) -> Callable[[Tensor, Tensor], bool]:
        """Of a parameter with a sum."""

        def add(left: Tensor, right: Tensor) -> bool:
            assert parameter.grad is not None, "trained weights have a sum"
            parameter.grad.addmm_(left, right)
            return True

        return add


class Bench:
    """Runs units of a twin on tensors with memory, and takes the memory away again."""

    def __init__(self, twin: Twin, randomness: Randomness) -> None:
        self._randomness, self._deferral = randomness, Deferral()
        self._twin, self._device = twin, twin.device
        named = [*twin.model.named_parameters(), *twin.model.named_buffers()]
        self._empty = {twin.held[id(x)]: x for _, x in named}
        self._generator = torch.Generator(twin.device).manual_seed(0)

    def time(self, at: Sized, number: int) -> Timed:
        """Median seconds of one unit, and bytes that it keeps."""
        stage, tape = at.units[number], at.tape
        names = {name for position in stage.calls for name in tape.calls[position].held}
        weights = {name: self._real(self._empty[name]) for name in names}
        self._swap(weights)
        undo = linear.install(self._twin.model, _Gradients(), self._deferral)
        try:
            known = [*weights.values(), *at.inputs.values()]
            holder = Holder(self._twin.model)
            received = {n: self._random(tape, n) for n in stage.receives}
            kept = _Keeping(known)
            with saved_tensors_hooks(kept.pack, _same):
                self._once(at, number, holder, received)
            times: list[tuple[float, float]] = []
            while len(times) < _FEWEST or (sum(map(sum, times)) < _SECONDS and len(times) < _MOST):
                times.append(self._once(at, number, holder, received))
        finally:
            undo()
            self._swap({name: self._empty[name] for name in names})
        forwards, backwards = zip(*times, strict=True)
        return Timed(statistics.median(forwards), statistics.median(backwards), float(kept.bytes))

    def _once(
        self, at: Sized, number: int, holder: Holder, received: Mapping[int, Tensor]
    ) -> tuple[float, float]:
        fresh = {n: x.detach().requires_grad_(x.requires_grad) for n, x in received.items()}
        run = StageRun(at.tape, at.units[number], at.inputs, fresh)
        divisor = 1.0 if number == len(at.units) - 1 else None
        around = self._randomness(num_samples_in(list(at.inputs.values())))
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            started = seconds_here(self._device)
            with around(True):
                run.forward(holder)
            middle = seconds_here(self._device)
            gradients = {n: torch.ones_like(run.output(n)) for n in run.wanted}
            ready = seconds_here(self._device)
            with around(False):
                run.backward(gradients, divisor=divisor, watch=self._deferral.watch)
            return middle - started, seconds_here(self._device) - ready

    def _real(self, empty: Tensor) -> Tensor:
        """Random values in the place of a parameter or buffer; buffers may be variances: none is below zero."""
        shape, dtype = empty.shape, empty.dtype
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        values = torch.rand(shape, dtype=dtype, device=self._device, generator=self._generator)
        if not isinstance(empty, nn.Parameter):
            return values
        made = nn.Parameter((values - 0.5) * 0.1, requires_grad=empty.requires_grad)
        made.grad = torch.zeros_like(made) if made.requires_grad else None
        return made

    def _random(self, tape: Tape, number: int) -> Tensor:
        value = tape.values[number]
        if not value.dtype.is_floating_point:  # masks let everything through
            return torch.full(value.shape, value.dtype == torch.bool, dtype=value.dtype, device=self._device)
        values = torch.randn(value.shape, dtype=value.dtype, device=self._device, generator=self._generator)
        return values.requires_grad_(value.needs_grad)

    def _swap(self, tensors: Mapping[str, Tensor]) -> None:
        """Put `tensors` where the model has what is called so now, under all its names."""
        model = self._twin.model
        now = {id(x): name for name, x in [*model.named_parameters(), *model.named_buffers()]}
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for key, x in table.items():
                    if x is not None and now[id(x)] in tensors:
                        table[key] = tensors[now[id(x)]]

    def close(self) -> None:
        """The twin is without memory again."""
        self._swap(self._empty)


def seconds_here(device: torch.device) -> float:
    """A clock of what this process computes: of one CPU thread its own seconds, so that nobody else matters."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time() if is_alone else time.perf_counter()


class _Keeping:
    """Bytes of the storages that autograd saves, but for those of `known` tensors."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self._seen = {x.untyped_storage().data_ptr() for x in known}
        self.bytes = 0

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return x


def _same(x: Tensor) -> Tensor:
    return x
