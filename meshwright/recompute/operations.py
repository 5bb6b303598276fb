"""Named operations run again in backward: inputs are kept, not what they or their consumers save of results.

Any function of torch by name, e.g. `gelu`, `dropout`, `layer_norm`. Neighbours that feed each other form one
region, of which only the first inputs are kept. Whatever saves a result of a region, inside of it or behind it, keeps
its number instead of its memory; what autograd keeps inside: [Note: holders] in `holders.py`.

Limits: calls in place run as they are; operations inside of other functions (of a fused kernel, of a module of compiled
code) are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.errors import PlanError
from meshwright.nested import storage_key, tensors_in
from meshwright.recompute.forwards import Forward, replace_forwards
from meshwright.recompute.holders import Arguments, Holder, Weights, replay
from meshwright.recompute.regions import Region, Step, checkpoint_in_force


@dataclass(frozen=True, eq=False)
class _Result:
    """A view of a region's result that autograd saved."""

    region: Region
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.region.result(self.number).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, eq=False)
class _Made:
    """A result of a region while it is alive."""

    tensor: weakref.ref[Tensor]
    version: int
    region: Region
    number: int


class _Watch(TorchFunctionMode):
    """Finds named operations in one run of a module's forward."""

    def __init__(self, name: str, names: frozenset[str], weights: Weights) -> None:
        super().__init__()
        self._name, self._names, self._weights = name, names, weights
        self._made: dict[int, _Made] = {}  # by storage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in self._names or not torch.is_grad_enabled() or checkpoint_in_force() is not None:
            return func(*args, **kwargs)
        return self._step(func, name, args, kwargs)

    def _step(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = [(t, t._version) for t in tensors_in((args, kwargs))]
        if not before:
            return func(*args, **kwargs)
        source = next((made for t, _ in before if (made := self._result_of(t)) is not None), None)
        if source is not None:
            region = source.region
        else:
            region = Region(f"{name} in module {self._name!r}", self._weights, keeps_results=True)
        arguments = Arguments.of((args, kwargs), lambda t: self._number_in(region, t), self._weights)
        again = replay(before[0][0].device) if "dropout" in name else None
        held: list[Holder] = []

        def hold(tensor: Tensor) -> Holder:
            held.append(Holder(region, tensor, self._weights.pack(tensor)))
            return held[-1]

        with saved_tensors_hooks(hold, region.open):
            result = func(*args, **kwargs)
        if any(t._version != version for t, version in before):
            del region.holders[len(region.holders) - len(held) :]  # in place: it keeps what it kept
            return result
        for holder in held:
            holder.value = None
        region.steps.append(Step(func, arguments, again))
        for tensor in tensors_in(result):
            made = _Made(weakref.ref(tensor), tensor._version, region, region.num_results)
            self._made[storage_key(tensor)] = made
            region.num_results += 1
        return result

    def _result_of(self, tensor: Tensor) -> _Made | None:
        """The result that lies in the same memory, unchanged."""
        made = self._made.get(storage_key(tensor))
        alive = made is not None and made.tensor() is not None
        return made if alive and made is not None and tensor._version == made.version else None

    def _number_in(self, region: Region, tensor: Tensor) -> int:
        made = self._result_of(tensor)
        return made.number if made is not None and made.region is region and made.tensor() is tensor else -1

    def pack(self, tensor: Tensor) -> object:
        """What anything else in the module saves."""
        made = self._result_of(tensor)
        if made is None:
            return self._weights.pack(tensor)
        return _Result(made.region, made.number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """The inverse of `pack`."""
        return packed.tensor() if isinstance(packed, _Result) else self._weights.unpack(packed)


def install(modules: Mapping[str, nn.Module], names: Iterable[str], weights: Weights) -> Callable[[], None]:
    """Watch the forwards of `modules` for operations called `names`; returns what undoes it.

    Raises:
        PlanError: E240 for a name that torch has no function of.
    """
    wanted = frozenset(names)
    for name in sorted(wanted):
        if not any(callable(getattr(place, name, None)) for place in (F, torch, Tensor)):
            raise PlanError(
                "E240",
                f'plan.recompute = "selective:{name}": torch has no function {name!r}. Write names as of '
                f'torch.nn.functional, joined by +: "selective:gelu+dropout".',
            )

    def make(name: str, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            watch = _Watch(name, wanted, weights)
            with watch, saved_tensors_hooks(watch.pack, watch.unpack):
                return forward(*args, **kwargs)

        return run

    return replace_forwards(modules, make)
