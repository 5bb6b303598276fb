"""Runs a chain of modules by a schedule of `partitioning/checkpointing.py`: what it does not save is computed again.

Owns how a module's forward is wrapped, which inputs are kept, and the order in which parts run again. What autograd
keeps meanwhile: [Note: holders] in `holders.py`. Must not know policies, plans, or how weights are stored.

[Note: links] A layer's input is not kept where it *is* what the layer before returned: the same tensor, unchanged
since. Then it can be made again. Anything else that a layer is called with (masks, positions) is kept. A chain that is
broken, because a model changes something between two layers, keeps the input there: more memory, never another result.
Calls refer to earlier calls only, so that whatever backward is done with is freed at once.

Randomness replays: the state of generators before a layer's first run is put back for each later one. The last layer of
a part ends as soon as autograd has all it needs. A module that works in place (`nn.ReLU(inplace=True)`) may change its
own input: then a copy of it is kept, and each further run gets a copy.

Limits: a module must save the same tensors each time it runs on the same inputs (checked), and must not keep state of
its own that its forward changes, batch statistics apart (`adapt/batch_norm.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.layout.tensor_layout import CutRegion
from meshwright.nested import tensors_in
from meshwright.partitioning.checkpointing import Redo, Save, Span
from meshwright.recompute.forwards import Forward, replace_forwards
from meshwright.recompute.holders import (
    Arguments,
    Collector,
    Enough,
    Holder,
    Weights,
    differs,
    replay,
)


@dataclass(eq=False)
class _Call:
    """One run of one module in the forward.

    Attributes:
        name: for error texts.
        layer: its position in the chain.
        arguments: (args, kwargs).
        before: the call that makes some of the inputs; None where all are kept.
        again: how the part of the chain runs again that begins where inputs are kept.
        replay: puts randomness and autocast back.
        cut: what was cut over tp when it began; None: nothing ever is.
        holders: what autograd keeps of it, in order.
    """

    name: str
    layer: int
    arguments: Arguments
    before: _Call | None
    again: Span
    replay: Callable[[], AbstractContextManager[None]]
    cut: CutRegion | None = None
    holders: list[weakref.ref[Holder]] = field(default_factory=list)

    def part(self) -> list[_Call]:
        """The calls from the one whose inputs are kept to this one."""
        calls = [self]
        while calls[-1].before is not None:
            calls.append(calls[-1].before)
        return calls[::-1]

    def keep_inputs(self, made: list[Tensor]) -> None:
        """From now on all inputs are kept; `made`: the results of the call before."""
        for x in self.arguments.inputs:
            if x.source >= 0:
                x.value, x.source, x.version = made[x.source], -1, made[x.source]._version
        self.before = None

    def give_up(self) -> None:
        """It never runs again."""
        self.arguments, self.before = Arguments(None), None


class Recomputer:
    """Wraps the modules of one chain.

    Args:
        modules: name to module, in the order of the chain.
        schedule: over them.
        weights: where they are.
        region: what is cut over tp while the modules run; None: nothing ever is. They then run again to their end:
            which collectives a backward makes does not depend on what their last lines keep.

    Attributes:
        reruns: name of a module to how often it ran again so far.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        schedule: Span,
        weights: Weights,
        region: CutRegion | None = None,
    ) -> None:
        over = (schedule.first, schedule.stop)
        assert over == (0, len(modules)), f"{schedule} is not over {len(modules)} modules"
        self._modules = list(modules.items())
        self._weights = weights
        self._region = region
        self._redo = _redo_by_layer(schedule)
        self._forwards: list[Forward] = []
        # The newest call and its results: what the next one may be linked to. Weak: what nobody needs goes at once.
        self._newest: weakref.ref[_Call] | None = None
        self._results: list[tuple[weakref.ref[Tensor], int]] = []
        # Layers that change their inputs in place, or may: until a forward shows that they do not.
        self._overwriting = {
            layer for layer, (_, module) in enumerate(self._modules) if _may_overwrite(module)
        }
        self.reruns: dict[str, int] = {name: 0 for name in modules}

    def install(self) -> Callable[[], None]:
        """Wrap the forwards of the instances; returns what puts them back."""
        layers = {name: layer for layer, (name, _) in enumerate(self._modules)}

        def make(name: str, forward: Forward) -> Forward | None:
            self._forwards.append(forward)
            redo = self._redo[layers[name]]
            return None if redo is None else _Wrapped(self, layers[name], redo)

        return replace_forwards(dict(self._modules), make)

    def run(self, layer: int, redo: Redo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first run of a layer that is not saved."""
        if not torch.is_grad_enabled():
            return self._forwards[layer](*args, **kwargs)
        call = self._make_call(layer, redo, args, kwargs)
        given = list(tensors_in((args, kwargs))) if layer in self._overwriting else []
        versions = [tensor._version for tensor in given]
        before = call.arguments.copy() if given else []

        with saved_tensors_hooks(lambda tensor: Holder(call, tensor), self._open):
            result = self._forwards[layer](*args, **kwargs)
        if given and versions == [tensor._version for tensor in given]:
            self._overwriting.discard(layer)
            call.arguments.undo_copy(before)
        self._newest = weakref.ref(call)
        self._results = [(weakref.ref(tensor), tensor._version) for tensor in tensors_in(result)]
        return result

    def _make_call(self, layer: int, redo: Redo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        before = self._predecessor(layer, redo)
        made = self._made() if before is not None else {}
        arguments = Arguments.of(
            (args, kwargs), lambda tensor: made.get((id(tensor), tensor._version), -1), self._weights
        )
        linked = any(x.source >= 0 for x in arguments.inputs)
        name, module = self._modules[layer]
        device = next(tensors_in((args, kwargs)), next(module.parameters(), torch.empty(0))).device
        return _Call(
            f"module {name!r}",
            layer,
            arguments,
            before if linked else None,
            redo.again,
            replay=replay(device),
            cut=replace(self._region) if self._region is not None else None,
        )

    def _predecessor(self, layer: int, redo: Redo) -> _Call | None:
        """The newest call where it is of the layer before and of the same part."""
        newest = self._newest() if self._newest is not None else None
        belongs = newest is not None and newest.layer == layer - 1 and newest.again is redo.again
        return newest if belongs and layer != redo.again.first else None

    def _made(self) -> dict[tuple[int, int], int]:
        """(identity, version) of the newest results to their positions."""
        found = {}
        for number, (reference, version) in enumerate(self._results):
            tensor = reference()
            if tensor is not None:
                found[id(tensor), version] = number
        return found

    # Backward.

    def _open(self, holder: Holder) -> Tensor:
        call = holder.run
        assert isinstance(call, _Call)
        if holder.value is None:
            self._again(call)
        if holder.value is None:
            raise differs(call, "fewer")
        return self._weights.unpack(holder.value)

    def _again(self, last: _Call) -> None:
        """Run the part of the chain up to `last` again."""
        calls = last.part()
        span = last.again
        if [call.layer for call in calls] != list(range(span.first, span.stop)):
            span = Span(
                tuple(Save(call.layer) for call in calls)
            )  # the chain was broken, or its end not used
        position, made = 0, list[Tensor]()
        for number, item in enumerate(span.items):
            if isinstance(item, Save):
                made = self._run_again(calls[position], made, saves=True, ends=number == len(span.items) - 1)
                position += 1
                continue
            part = calls[position : position + item.again.stop - item.again.first]
            part[0].keep_inputs(made)
            for call in part:
                call.again = item.again
                made = self._run_again(call, made, saves=False, ends=False)
            position += len(part)

    def _run_again(self, call: _Call, made: list[Tensor], *, saves: bool, ends: bool) -> list[Tensor]:
        """One layer on what the layer before `made`; its results, none where it was ended early."""
        args, kwargs = call.arguments.again(made, call.name)
        collector = Collector(call, self._weights, ends=ends and call.cut is None)
        name = self._modules[call.layer][0]
        self.reruns[name] += 1
        hooks = collector.hooks() if saves else nullcontext()
        try:
            cut = nullcontext() if self._region is None or call.cut is None else self._region.as_in(call.cut)
            with self._weights.using(name), call.replay(), torch.set_grad_enabled(saves), hooks, cut:
                result = self._forwards[call.layer](*args, **kwargs)
        except Enough:
            result = None
        if saves:
            collector.check()
            call.give_up()
        return [tensor.detach() for tensor in tensors_in(result)]


class _Wrapped:
    """The forward of a module of a chain."""

    def __init__(self, owner: Recomputer, layer: int, redo: Redo) -> None:
        self._owner, self._layer, self._redo = owner, layer, redo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.run(self._layer, self._redo, args, kwargs)


def _may_overwrite(module: nn.Module) -> bool:
    """Whether a module of torch in it has been told to work in place."""
    return any(getattr(part, "inplace", False) for part in module.modules())


def _redo_by_layer(schedule: Span) -> list[Redo | None]:
    """What the first forward does with each layer: None saves it."""
    found: list[Redo | None] = []
    for item in schedule.items:
        found += [None] if isinstance(item, Save) else [item] * (item.again.stop - item.again.first)
    return found
