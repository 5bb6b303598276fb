"""The user's loss run once without values, and what it does written down as a `Tape`.

Modules that hold repeated blocks are opened; all others, the blocks among them, stay calls of whole modules: whatever
their forwards do runs natively on the rank that has them. Between them every call of torch is written down. Shapes are
those of one batch, and Python decides by them as in training, so a tape holds for batches of that shape; another shape
is recorded anew.

Owns E261, E263. Must not know stages. Limits: a value that leaves a module by another way than its result cannot be
followed, and values that Python reads (`.item()`) are unknown.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from meshwright.adapt import context_hf, precision
from meshwright.adapt.context_parallel import Kind, described_attention
from meshwright.adapt.dropout import counting
from meshwright.capture.attention_masks import masks_as_in_training
from meshwright.capture.kernels import flop_formulas
from meshwright.errors import PlanError
from meshwright.nested import map_tensors, storage_key, tensors_in
from meshwright.pipeline.tape import Call, Held, Slot, Tape, Value
from meshwright.sharding.units import find_units, parameters_in_master_type

Loss = Callable[[Any, Any], tuple[Tensor, Any]]
_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_HARMLESS = (enum.Enum, type, nn.Module, torch.Generator, range, Kind)


class Twin:
    """The whole model without memory, which is run in the place of the stages to learn what they will do.

    Args:
        model: whole and not adapted yet; it stays as it is.
        device: where ranks compute.
        compute_dtype: of forward and backward, where that is another than the parameters have.
        open_also: names of further modules to open, so that stages may begin inside.
        cuts_sequences: whether attention meets over ranks, which have parts of sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        *,
        open_also: Collection[str] = (),
        cuts_sequences: bool = False,
    ) -> None:
        # Not of the documented API: capture/export.py relies on it too.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        memo: dict[int, Any] = {}
        kept = parameters_in_master_type(model)
        self.held: dict[int, str] = {}
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            learned = isinstance(x, nn.Parameter)
            dtype = compute_dtype if compute_dtype is not None and learned and x not in kept else x.dtype
            with self._mode:
                empty = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
            memo[id(x)] = nn.Parameter(empty, requires_grad=x.requires_grad) if learned else empty
            self.held[id(memo[id(x)])] = name
        self.model = copy.deepcopy(model, memo)
        precision.install(self.model, compute_dtype)
        if cuts_sequences:
            context_hf.install(self.model)
        self.names = {id(module): name for name, module in self.model.named_modules()}
        self.opened = opened_modules(self.model) | set(open_also)
        self.trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)

    def record(self, loss: Loss, batch: Any, *, training: bool) -> Tape:
        """What `loss(model, batch)` does.

        Raises:
            PlanError: E261 where Python reads a value, E262 or E263 for one that cannot be followed.
        """
        self.model.train(training)
        with self._mode:
            fake = map_tensors(
                batch, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
            )
        recorder = _Recorder(self, fake)
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.enable_grad(),
                masks_as_in_training(batch),
                recorder.installed(),
            ):
                total, count = loss(self.model, fake)
        except (PlanError, TypeError, AttributeError, NameError):
            raise
        except Exception as error:
            if not any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutput")):
                raise
            raise PlanError(
                "E261",
                f"plan.pp: between modules, after {recorder.last()}, the model's Python code asks for a value of a "
                f"tensor ({str(error).splitlines()[0][:120]}), which a stage that does not compute it cannot know. "
                f"Move that into a module of one stage, or set plan.pp=1.",
            ) from error
        return recorder.finish(total, count)


def opened_modules(model: nn.Module) -> set[str]:
    """Names of the modules that are no units and have some inside: the root, containers, stacks of blocks."""
    opened = {""}
    for unit in find_units(model):
        parts = unit.split(".")
        opened |= {".".join(parts[:i]) for i in range(len(parts))}
    return opened


class _Flops(TorchDispatchMode):
    """Adds up the FLOPs of products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self._own = flop_formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula, own = flop_registry.get(func._overloadpacket), self._own.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        elif own is not None:
            self.total += own(*map_tensors(args, lambda x: x.shape))
        return result


class _Recorder(TorchFunctionMode):
    """Writes down calls between modules, and those of whole modules."""

    def __init__(self, twin: Twin, batch: Any) -> None:
        super().__init__()
        self._twin = twin
        self._calls: list[Call] = []
        self._values: list[Value] = []
        self._numbers: dict[int, int] = {}
        self._keep: list[Tensor] = []
        self._storages: dict[int, int] = {}
        self._times: Counter[str] = Counter()
        self._inside = False
        self._num_attentions = 0
        self._flops = _Flops()
        self._draws: Callable[[], int] = lambda: 0
        self._inputs = tuple(self._new(x, -1) for x in tensors_in(batch))

    @contextmanager
    def installed(self) -> Iterator[None]:
        original, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
        recorder = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = recorder._twin.names.get(id(module))
            if name is None or name in recorder._twin.opened or recorder._inside:
                return original(module, *args, **kwargs)
            return recorder._whole(name, original, module, args, kwargs)

        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            bound = apply.__get__(None, kind)
            if recorder._inside:
                return bound(*args, **kwargs)
            return recorder._write("", bound, args, kwargs, run=bound)

        # Restored below: nothing public is called for every module whatever its class.
        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
        try:
            with self._twin._mode, self._flops, counting() as draws:
                self._draws = draws
                with self:
                    yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run = kwargs or {}, func
        if func is described_attention:
            run = _attention_of_any_mask
        self._num_attentions += func in (described_attention, F.scaled_dot_product_attention)
        return run(*args, **kwargs) if self._inside else self._write("", func, args, kwargs, run=run)

    def _whole(self, name: str, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def run(*a: Any, **k: Any) -> Any:
            self._inside = True
            try:
                return original(module, *a, **k)
            finally:
                self._inside = False

        return self._write(name, None, args, kwargs, run=run, module=module)

    def _write(
        self, name: str, func: Any, args: Any, kwargs: Any, *, run: Any, module: nn.Module | None = None
    ) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        held = [] if module is None else [*module.parameters(), *module.buffers()]
        watched = [*tensors, *held]
        before = [x._version for x in watched]
        flops, draws = self._flops.total, self._draws()
        was_inside, self._inside = self._inside, True
        try:
            result = run(*args, **kwargs)
        finally:
            self._inside = was_inside
        made = list(tensors_in(result))
        changed = [x for x, version in zip(watched, before, strict=True) if x._version != version]
        if not made and not changed:
            return result
        names = [n for x in held if (n := self._twin.held.get(id(x)))]
        inputs: list[int] = []
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves = [self._argument(leaf, inputs, names, name or func) for leaf in leaves]
        position = len(self._calls)
        # A module's own buffers stay with it, so what it does to them is its own business.
        changes = frozenset(
            self._storage(x) for x in changed if module is None or any(x is t for t in tensors)
        )
        outputs = tuple(self._number_or_new(x, position) for x in made)
        self._calls.append(
            Call(
                name,
                func if module is None else None,
                tuple(leaves),
                structure,
                tuple(dict.fromkeys(inputs)),
                outputs,
                tuple(dict.fromkeys(names)),
                changes,
                self._draws() - draws,
                torch.is_grad_enabled(),
                self._flops.total - flops,
                self._times[name],
            )
        )
        if name:
            self._times[name] += 1
        return result

    def _number_or_new(self, x: Tensor, position: int) -> int:
        if id(x) in self._twin.held:
            return -1
        known = self._numbers.get(id(x))
        return self._new(x, position) if known is None else known

    def _new(self, x: Tensor, position: int) -> int:
        self._keep.append(x)
        self._numbers[id(x)] = len(self._values)
        needs = x.requires_grad and x.is_floating_point()
        self._values.append(Value(tuple(x.shape), x.dtype, needs, self._storage(x), position))
        return len(self._values) - 1

    def _storage(self, x: Tensor) -> int:
        return self._storages.setdefault(storage_key(x), len(self._storages))

    def _argument(self, leaf: Any, inputs: list[int], names: list[str], what: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) in self._twin.held:
                names.append(self._twin.held[id(leaf)])
                return Held(names[-1])
            number = self._numbers.get(id(leaf))
            if number is not None:
                inputs.append(number)
                return Slot(number)
            if isinstance(leaf, FakeTensor):
                raise PlanError(
                    "E262",
                    f"plan.pp: {_named(what)} after {self.last()} uses a tensor of shape {tuple(leaf.shape)} that left "
                    f"a module by another way than its result (an attribute, a list), so no stage can be sent it. "
                    f"Return it from the module's forward, or set plan.pp=1.",
                )
            return leaf.detach().clone()
        if leaf is None or isinstance(leaf, (*_PLAIN, *_HARMLESS)) or callable(leaf) or leaf is Ellipsis:
            return leaf
        raise PlanError(
            "E263",
            f"plan.pp: {_named(what)} gets a {type(leaf).__name__}, which may carry tensors that are not seen, so it "
            f"cannot travel between stages. Pass tensors in tuples, lists or dicts; for a cache of transformers set "
            f"use_cache=False.",
        )

    def last(self) -> str:
        """The newest call, for error texts."""
        modules = [call for call in self._calls if call.module]
        return modules[-1].describe() if modules else "the start"

    def finish(self, total: Any, count: Any) -> Tape:
        """The whole tape."""
        number = self._numbers.get(id(total))
        if number is None or not isinstance(total, Tensor):
            raise PlanError(
                "E263", "plan.pp: the loss must return (sum, count) with a sum that depends on the batch"
            )
        counted: int | float | Slot
        if isinstance(count, Tensor):
            known = self._numbers.get(id(count))
            if known is None:
                raise PlanError("E263", "plan.pp: the loss's count is a tensor that no call made")
            counted = Slot(known)
        else:
            counted = count
        opened = frozenset(name for name in self._twin.opened)
        tape = Tape(
            tuple(self._calls),
            tuple(self._values),
            self._inputs,
            number,
            counted,
            self._twin.trained,
            opened,
            self._num_attentions,
        )
        return tape.with_free()


def _attention_of_any_mask(
    query: Tensor, key: Tensor, value: Tensor, kind: Kind, *, dropout_p: float, scale: float | None
) -> Tensor:
    """What `described_attention` will give, by its shape, with its random call."""
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, enable_gqa=True)


def _named(what: Any) -> str:
    return f"module {what!r}" if isinstance(what, str) else f"{getattr(what, '__name__', what)}()"
