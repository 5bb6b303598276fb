"""Models that torch.export cannot trace, watched while they run: operation by operation, or module by module.

Owns both ways of watching. Each runs `loss(model, batch)` once with real values, on a copy of the model, and notes for
each operation (of torch.fx) or module its tensors, its FLOPs and what autograd saves.
Limits: costs hold at this batch only; backward is taken as twice the forward; such a graph cannot be executed. Work of
a module outside its inner modules is one task, after theirs; a tensor that comes from no module counts as an input of
its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.export import Loss, Sizes, WithLoss, tensors_of
from meshwright.capture.kernels import flop_formulas
from meshwright.graph.formula import as_formula, total
from meshwright.graph.task_graph import Argument, Kind, Ref, Task, TaskGraph, Value


class Watch:
    """Tasks and values in the order in which they are seen."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.tasks: list[Task] = []
        self.values: dict[str, Value] = {}
        self._names: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._alive: list[Tensor] = []  # ids of freed tensors would come back
        self._saved: list[Tensor] = []
        self.counter = FlopCounterMode(display=False, custom_mapping=dict(flop_formulas()))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._add(parameter, "parameter", name)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self._add(buffer, "buffer", name)
        for i, x in enumerate(tensors_of(batch)):
            self._add(x, "input", f"batch_{i}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count FLOPs and collect saved tensors within."""

        def pack(x: Tensor) -> Tensor:
            self._saved.append(x)
            self._alive.append(x)
            return x

        with saved_tensors_hooks(pack, _identity), torch.enable_grad(), self.counter:
            yield

    def flops(self) -> int:
        """Counted so far."""
        return int(self.counter.get_total_flops())

    def refs(self, things: Any) -> tuple[Argument, ...]:
        """The tensors among arguments as refs; one that was never seen becomes an input."""
        return tuple(Ref(self._add(x, "input", "")) for x in tensors_of(things))

    def note(
        self, op: str, path: str, arguments: Any, result: Any, *, flops: int, inside: nn.Module | None
    ) -> None:
        """One task that has just run.

        Args:
            op: what ran.
            path: its module.
            arguments: of the call.
            result: of the call.
            flops: of its own.
            inside: the module whose own parameters it reads.
        """
        taken = self.refs(arguments)
        own = () if inside is None else tuple(self._names[id(p)] for p in inside.parameters(recurse=False))
        outputs = tuple(self._add(x, "activation", "") for x in tensors_of(result))
        known = [self._storages.get(_storage(x)) for x in self._saved]
        inner = {
            _storage(x): x.untyped_storage().nbytes()
            for x in self._saved
            if _storage(x) not in self._storages
        }
        self._storages.update(dict.fromkeys(inner, ""))
        self._saved.clear()
        read = [
            self.values[name].bytes
            for name in dict.fromkeys([*(r.name for r in taken if isinstance(r, Ref)), *own])
        ]
        self.tasks.append(
            Task(
                name=f"task_{len(self.tasks)}",
                op=op,
                path=path,
                arguments=taken,
                parameters=own,
                outputs=outputs,
                flops=as_formula(flops),
                backward_flops=as_formula(2 * flops),
                read_bytes=total(read),
                written_bytes=total(self.values[name].bytes for name in outputs),
                saved=tuple(dict.fromkeys(name for name in known if name)),
                saved_bytes=as_formula(sum(inner.values())),
            )
        )

    def graph(self, name: str, source: str, sizes: Sizes, result: Any, notes: tuple[str, ...]) -> TaskGraph:
        """What was seen."""
        outputs = tuple(
            Ref(self._add(part, "activation", "")) if isinstance(part, Tensor) else part
            for part in pytree.tree_leaves(result)
        )
        return TaskGraph(
            name=name,
            source=source,
            batch=sizes.batch,
            sequence=sizes.sequence,
            free=(),
            values=tuple(self.values.values()),
            tasks=tuple(self.tasks),
            outputs=outputs,
            notes=notes,
        )

    def _add(self, x: Tensor, kind: Kind, path: str) -> str:
        if id(x) in self._names and kind != "parameter":
            return self._names[id(x)]
        name = f"{kind[0]}_{path.replace('.', '_')}" if path else f"value_{len(self.values)}"
        self._alive.append(x)
        self._names.setdefault(id(x), name)
        storage = self._storages.setdefault(_storage(x), name) or name
        self.values[name] = Value(
            name=name,
            kind=kind,
            shape=tuple(as_formula(extent) for extent in x.shape),
            dtype=str(x.dtype).removeprefix("torch."),
            path=path,
            storage=storage,
            requires_grad=x.requires_grad,
        )
        return name


def observe_fx(model: nn.Module, loss: Loss, batch: Any, sizes: Sizes, about: tuple[str, str]) -> TaskGraph:
    """By torch.fx: traced without values, then run node by node.

    Args:
        model: with values.
        loss: of (model, batch).
        batch: on the model's device.
        sizes: of the batch.
        about: name of the graph, and why torch.export was not enough.
    """
    twin = copy.deepcopy(model)
    traced = fx.symbolic_trace(WithLoss(twin, loss))
    watch = Watch(twin, batch)
    with watch.watching(), torch.random.fork_rng(devices=[]):
        result = _Nodes(traced, watch).run(batch)
    note = f"read by torch.fx at this batch only: {about[1]}"
    return watch.graph(about[0], "torch.fx", sizes, result, (note,))


class _Nodes(fx.Interpreter):
    """Runs a traced graph and notes each node that gives tensors."""

    def __init__(self, traced: fx.GraphModule, watch: Watch) -> None:
        super().__init__(traced)
        self._watch = watch

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        before = self._watch.flops()
        result = super().run_node(n)
        if n.op.startswith("call_") and tensors_of(result):
            path = str(n.target).removeprefix("model.") if n.op == "call_module" else ""
            module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
            op = f"module:{type(module).__name__}" if module is not None else _called(n.target)
            arguments = self.fetch_args_kwargs_from_env(n)
            flops = self._watch.flops() - before
            self._watch.note(op, path, arguments, result, flops=flops, inside=module)
        return result


def observe_modules(
    model: nn.Module, loss: Loss, batch: Any, sizes: Sizes, about: tuple[str, str]
) -> TaskGraph:
    """By hooks on modules: each call of a module that does work of its own is one task; arguments as `observe_fx`."""
    twin = copy.deepcopy(model)
    watch = Watch(twin, batch)
    open_calls: list[list[int]] = []  # FLOPs at its start, FLOPs of its inner modules

    def before(_module: nn.Module, _args: Any) -> None:
        open_calls.append([watch.flops(), 0])

    def after(module: nn.Module, args: Any, kwargs: Mapping[str, Any], result: Any, *, path: str) -> None:
        start, inner = open_calls.pop()
        spent = watch.flops() - start
        if open_calls:
            open_calls[-1][1] += spent
        op = f"module:{type(module).__name__}"
        watch.note(op, path, (args, kwargs), result, flops=spent - inner, inside=module)

    for path, module in twin.named_modules():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(functools.partial(after, path=path), with_kwargs=True)
    with watch.watching(), torch.random.fork_rng(devices=[]):
        result = loss(twin, batch)
        known = sum(task.flops(0, 0) for task in watch.tasks)
        watch.note("loss", "", (), result, flops=watch.flops() - known, inside=None)
    note = f"W130 read module by module at this batch only: {about[1]}"
    return watch.graph(about[0], "modules", sizes, result, (note,))


def _called(target: Callable[..., Any] | str) -> str:
    if isinstance(target, str):
        return f"method:{target}"
    return f"function:{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _identity(x: Tensor) -> Tensor:
    return x


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
