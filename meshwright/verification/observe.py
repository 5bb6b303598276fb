"""Outputs of modules, seen as they are made, and which of their dims is cut by samples.

Owns the hooks. Knows nothing of engines: a module's output is the same logical tensor whoever shards its weights.
Simplification: only outputs whose rows belong to samples one by one are compared; `probe_rows` finds them by running
parts of a batch in evaluation mode, and what mixes samples is seen in the loss and in gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nested import tensors_in
from meshwright.sharding.units import find_units

# (name of the output, value) -> None
Sink = Callable[[str, Tensor], None]
_SAME_ROWS = 1e-5


class ModuleObserver:
    """Hands the outputs of leaf modules, units, children of the root and the root to a function.

    Outside of `forward` nothing is seen, so that recomputation in a backward is not.

    Attributes:
        order: module name to its position in the order of first use.
    """

    def __init__(self, model: nn.Module) -> None:
        self.order: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._sink: Sink | None = None
        wanted = set(find_units(model)) | {name for name, _ in model.named_children()} | {""}
        self._handles = []
        for name, module in model.named_modules():
            chosen = name in wanted or not any(True for _ in module.children())
            self._handles.append(
                module.register_forward_pre_hook(lambda *_args, name=name: self._enter(name))
            )
            if chosen:
                self._handles.append(
                    module.register_forward_hook(
                        lambda _module, _args, output, name=name: self._leave(name, output)
                    )
                )

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def forward(self, sink: Sink, before: Mapping[str, int] = MappingProxyType({})) -> Iterator[None]:
        """Outputs of modules that run inside go to `sink`; calls are counted anew, from those made `before`."""
        self._calls = dict(before)
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    def calls(self, name: str) -> int:
        """How often the module ran in the newest forward."""
        return self._calls.get(name, 0)

    def _enter(self, name: str) -> None:
        if self._sink is not None:
            self.order.setdefault(name, len(self.order))
            self._calls[name] = self._calls.get(name, 0) + 1

    def _leave(self, name: str, output: object) -> None:
        if self._sink is None:
            return
        number = self._calls.get(name, 1)
        called = (name or "(model)") + (f" call {number}" if number > 1 else "")
        for index, tensor in enumerate(tensors_in(output)):
            if tensor.is_floating_point() or tensor.is_complex():
                self._sink(called + (f" output {index}" if index else ""), tensor.detach())


@dataclass(frozen=True)
class Rows:
    """Where samples lie in an output: `per_sample` rows each along `dim`; None: the output has no samples in it."""

    dim: int | None
    per_sample: int = 1

    def fits(self, shape: torch.Size | tuple[int, ...], num_samples: int) -> bool:
        """Whether an output of this shape can hold that many samples."""
        return self.dim is None or (
            len(shape) > self.dim and shape[self.dim] == num_samples * self.per_sample
        )


def probe_rows(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    part: Callable[[int, int], Any],
    *,
    num_samples: int,
    seed: int,
) -> dict[str, Rows]:
    """Which outputs are cut by samples: those that the parts of a batch give row by row as the whole batch does.

    Args:
        model: stays as it is; a copy runs, in evaluation mode.
        loss: (model, batch) -> anything.
        part: (start, stop) -> the batch of these samples.
        num_samples: samples of the whole batch; of parts that are too small for a layer, what ran before it counts.
        seed: of torch's generator before each forward.
    """
    twin = copy.deepcopy(model).eval()
    observer = ModuleObserver(twin)
    cut = max(1, num_samples // 2)

    def outputs(start: int, stop: int) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]), observer.forward(_keep(seen)):
            torch.manual_seed(seed)
            try:
                loss(twin, part(start, stop))
            except (ValueError, RuntimeError):  # a part may be too small for a layer that mixes samples
                if stop - start == num_samples:
                    raise
        return seen

    whole = outputs(0, num_samples)
    if num_samples == 1:
        return {name: Rows(None) for name in whole}
    first = _matching(whole, outputs(0, cut), start=0, count=cut, total=num_samples)
    second = _matching(
        whole, outputs(cut, num_samples), start=cut, count=num_samples - cut, total=num_samples
    )
    return {name: rows for name, rows in first.items() if second.get(name) == rows}


def _keep(seen: dict[str, Tensor]) -> Sink:
    # Copies: later modules may write in place.
    return lambda name, tensor: seen.__setitem__(name, tensor.clone())


def _matching(
    whole: dict[str, Tensor], parts: dict[str, Tensor], *, start: int, count: int, total: int
) -> dict[str, Rows]:
    """Outputs of which `parts` holds the samples [start, start + count) of `whole`."""
    found = {}
    for name, tensor in parts.items():
        rows = _rows_of(whole.get(name), tensor, start=start, count=count, total=total)
        if rows is not None:
            found[name] = rows
    return found


def _rows_of(whole: Tensor | None, part: Tensor, *, start: int, count: int, total: int) -> Rows | None:
    if whole is None or whole.dim() != part.dim():
        return None
    if whole.shape == part.shape:
        return Rows(None) if _close(whole, part) else None
    for dim, size in enumerate(whole.shape):
        per_sample, rest = divmod(size, total)
        if rest or not per_sample or part.shape[dim] != count * per_sample:
            continue
        expected = whole.narrow(dim, start * per_sample, count * per_sample)
        if expected.shape == part.shape and _close(expected, part):
            return Rows(dim, per_sample)
    return None


def _close(expected: Tensor, actual: Tensor) -> bool:
    if not expected.numel():
        return True
    return float((expected - actual).abs().max()) <= _SAME_ROWS * float(expected.abs().max())
