"""zero3: when the weights of each unit are gathered, and when they are freed.

A unit's weights are gathered before its module runs, one unit ahead, and freed after; gathered again before its
backward and freed when the next unit's backward starts. The order of use of the last micro-batch predicts the
next one; a wrong prediction costs time, never correctness.

Backward is found by hooks on the module's output tensors, not on modules: a tensor's gradient is complete exactly
when the backward of the module that made it may start. Autograd executes in reverse order of creation, so units
start backward in reverse order of use, on every rank alike.

What autograd saves of a unit's weights is their place, not their memory (saved-tensor hooks during the forward):
whatever part of a unit's backward runs first finds the weights, wherever they are gathered then. Inside of a
checkpoint around a unit that is left to the checkpoint; other saved-tensor hooks around a unit have no effect in it.

`torch.autograd.grad` in a loss is a backward inside the forward: it gathers weights and reduces nothing. Under
create_graph it saves weights for its own backward, as copies: such a graph holds the weights of all units it uses.

In a pipeline other forwards come between a forward and its backward: both are told which they are. Where graphs of an
unnamed earlier forward run backward, how often a unit is still to be used is unknown: units are then freed early and
reduced at the end.

Limits: a unit's weights may only be used inside its module's forward (released weights have no memory), and every
rank must run the same units in the same order (checked once a step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.comm import ops
from meshwright.comm.ops import Group, Handle
from meshwright.nested import tensors_in
from meshwright.sharding.memory import BucketMemory, BufferPool

Phase = Literal["idle", "forward", "backward", "evaluation"]
# (stage, micro-batch)
Turn = tuple[int, int]


@dataclass(eq=False)
class GatheredUnit:
    """A unit and the state of its weights.

    Attributes:
        name: module name; empty for the root.
        memories: its buckets.
    """

    name: str
    memories: list[BucketMemory]
    state: Literal["released", "coming", "ready"] = "released"
    handles: list[Handle] = field(default_factory=list)
    _saving: list[saved_tensors_hooks] = field(default_factory=list)

    def start_saving(self, pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]) -> None:
        """From here on, autograd saves through `pack`."""
        self._saving.append(saved_tensors_hooks(pack, unpack))
        self._saving[-1].__enter__()

    def stop_saving(self) -> None:
        """Undo the newest `start_saving`, if any."""
        if self._saving:
            self._saving.pop().__exit__()


@dataclass(eq=False)
class _Forward:
    """What a forward used.

    Attributes:
        stage: of the pipeline, whose forwards use the same units; None: there is none.
        order: units by use.
        pending: calls of each whose backward has not started.
    """

    stage: int | None = None
    order: list[GatheredUnit] = field(default_factory=list)
    pending: Counter[GatheredUnit] = field(default_factory=Counter)


class Gatherer:
    """Gathers and frees the weights of units around their use.

    Args:
        units: the root first where there is one.
        modules: unit name to module, for all but the root.
        group: ranks over which weights are sharded.
        pools: where each bucket's gathered weights get their memory.
        keep_last: keep one unit from forward to backward.
        finish_unit: called when a unit's backward is certainly over, before the next unit's starts.
    """

    def __init__(
        self,
        units: list[GatheredUnit],
        modules: dict[str, nn.Module],
        group: Group,
        *,
        pools: dict[BucketMemory, BufferPool],
        keep_last: bool,
        finish_unit: Callable[[GatheredUnit], None],
    ) -> None:
        self._group = group
        self._pools = pools
        self._keep_last = keep_last
        self._finish_unit = finish_unit
        self._root = units[0] if units and not units[0].name else None
        self._blocks = [unit for unit in units if unit.name]
        # By stage, the order of its newest forward; forwards of which the backward is to come.
        self._expected: dict[int | None, list[GatheredUnit]] = {None: self._blocks}
        self._waiting: dict[Turn, _Forward] = {}
        self._forward = _Forward()
        self._position = 0
        self._open: GatheredUnit | None = None
        # The newest unit that a gradient inside the forward needed.
        self._inner: GatheredUnit | None = None
        # Whether a backward meets another forward than its own; units it then reduces at its end.
        self._runs_old_graph = False
        self._owed: list[GatheredUnit] = []
        # Places in the graph, (node or leaf, output number), whose gradient already starts a unit's backward.
        self._hooked: set[tuple[object, int]] = set()
        self._phase: Phase = "idle"
        for unit in self._blocks:
            module = modules[unit.name]
            module.register_forward_pre_hook(lambda *_, unit=unit: self._before_forward(unit))
            module.register_forward_hook(
                lambda _module, _args, output, unit=unit: self._after_forward(unit, output)
            )
            module.register_forward_hook(lambda *_, unit=unit: unit.stop_saving(), always_call=True)

    @property
    def gathered(self) -> list[str]:
        """Names of units that are not released."""
        units = [*([self._root] if self._root else []), *self._blocks]
        return [unit.name or "root" for unit in units if unit.state != "released"]

    # Phases of a micro-batch, called by the engine.

    def start_forward(self, turn: Turn | None = None, *, evaluation: bool = False) -> None:
        """Gather the root and the first block; the root is ready on return.

        Args:
            turn: where other forwards come before its backward.
            evaluation: whether there is no backward.
        """
        self._note_order()
        self._phase = "evaluation" if evaluation else "forward"
        self._forward = _Forward() if turn is None else _Forward(turn[0])
        if turn is not None:
            self._waiting[turn] = self._forward
        self._hooked.clear()
        if self._root is not None:
            self._start_gather(self._root)
        if self._predicted:
            self._start_gather(self._predicted[0])
        if self._root is not None:
            self._wait(self._root)

    def start_backward(self, turn: Turn | None = None) -> None:
        """Gather the last block ahead; without keep_last also the root again.

        Args:
            turn: that of its forward.
        """
        self._note_order()
        if turn is not None:
            self._forward = self._waiting.pop(turn)
        self._finish_forward()
        self._phase = "backward"
        self._open = None
        order = self._forward.order
        self._position = len(order)
        if self._root is not None:
            self._start_gather(self._root)
        if order:
            self._start_gather(order[-1])
        if self._root is not None:
            self._wait(self._root)

    def finish_backward(self) -> None:
        """Finish and free whatever is left."""
        self._finish_open(None)
        owed, self._owed, self._runs_old_graph = self._owed, [], False
        for unit in [*self._blocks, *([self._root] if self._root else [])]:
            # Its output took no part in the loss, or no hook saw its backward (reentrant checkpoints).
            seen = self._forward.pending[unit] or unit in owed
            if unit is not self._root and (seen or any(memory.unreduced for memory in unit.memories)):
                self._finish_unit(unit)
            self._release(unit)
        self._forward.pending.clear()
        self._hooked.clear()
        self._phase = "idle"

    def finish_evaluation(self) -> None:
        """Free whatever an evaluation gathered."""
        for unit in [*self._blocks, *([self._root] if self._root else [])]:
            self._release(unit)
        if any(memory.common_weights is not None for unit in self._blocks for memory in unit.memories):
            # After a training step its reduction says that nobody reads weights any more; here nothing would.
            ops.barrier(self._group, cause="evaluation")
        self._phase = "idle"

    def _finish_forward(self) -> None:
        """Free blocks that were gathered ahead and not used, and the root unless it is the one kept."""
        self._inner = None
        last = self._forward.order[-1] if self._forward.order else None
        kept = (self._root or last) if self._keep_last else None
        for unit in [*self._blocks, *([self._root] if self._root else [])]:
            if unit is not kept:
                self._release(unit)

    def _note_order(self) -> None:
        """A forward that is over predicts the next one of its stage."""
        if self._phase == "forward" and self._forward.order:
            self._expected[self._forward.stage] = list(self._forward.order)

    @property
    def _predicted(self) -> list[GatheredUnit]:
        return self._expected.get(
            self._forward.stage, []
        )  # nothing is known of a stage before its first forward

    # While layers run again in backward, see `recompute/executor.py`.

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Within it the weights of module `name` are gathered; afterwards they are as before, or open to a backward."""
        units = [u for u in self._blocks if name == u.name or name.startswith(f"{u.name}.")]
        before = [unit.state for unit in units]
        for unit in units:
            self._wait(unit)
        try:
            yield
        finally:
            for unit, state in zip(units, before, strict=True):
                if state == "released" and unit is not self._open:
                    self._release(unit)

    def pack(self, tensor: Tensor) -> object:
        """What to keep of a tensor that autograd saves: where a weight lies, or the tensor."""
        for unit in self._blocks:
            if unit.state == "ready":
                packed = self._pack(unit, tensor)
                if isinstance(packed, _SavedWeight):
                    return packed
        return _SavedTensor(tensor, tensor._version)

    def unpack(self, packed: object) -> Tensor:
        """The tensor behind what `pack` returned; a weight is gathered if it is not."""
        return self._unpack(packed)

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a gathered weight or a view of one."""
        units = [*self._blocks, *([self._root] if self._root else [])]
        return any(memory.holds(tensor) for unit in units for memory in unit.memories)

    # Hooks.

    def _before_forward(self, unit: GatheredUnit) -> None:
        if self._phase == "idle":
            raise RuntimeError(
                f"module {unit.name!r} runs outside of a step: its weights are sharded (zero3); "
                f"call it through the training step or the engine's evaluation()"
            )
        self._wait(unit)
        if self._phase == "backward":  # recomputation: the output hook has gathered, nothing is freed here
            return
        if torch.is_grad_enabled() and not _is_checkpointed():
            unit.start_saving(partial(self._pack, unit), self._unpack)
        self._forward.order.append(unit)
        self._position = len(self._forward.order)
        if self._position < len(self._predicted):
            self._start_gather(self._predicted[self._position])

    def _after_forward(self, unit: GatheredUnit, output: object) -> None:
        if self._phase == "backward":
            return
        tensors = self._new_tensors(output) if torch.is_grad_enabled() else []
        if not tensors and torch.is_grad_enabled() and next(tensors_in(output), None) is None:
            raise RuntimeError(
                f"module {unit.name!r} returned {type(output).__name__}, in which no tensor is found: its backward "
                f"could not be seen (zero3). Return tensors, or tuples, lists, dicts or dataclasses of them; or use "
                f"zero2."
            )
        if tensors:
            self._forward.pending[unit] += 1
            once = _Once(partial(self._before_backward, unit, self._forward))
            for tensor in tensors:
                tensor.register_hook(once)
        if not self._is_kept(unit):
            self._release(unit)

    def _new_tensors(self, output: object) -> list[Tensor]:
        """Outputs that no unit made before: one that hands its input on does not end its predecessor."""
        new = []
        for tensor in tensors_in(output):
            place = (tensor if tensor.grad_fn is None else tensor.grad_fn, tensor.output_nr)
            if tensor.requires_grad and place not in self._hooked:
                self._hooked.add(place)
                new.append(tensor)
        return new

    def _is_kept(self, unit: GatheredUnit) -> bool:
        """Without a root, the last block of the forward is the unit that stays."""
        order = self._forward.order
        last = 0 < len(self._predicted) <= len(order) and unit is order[-1]
        return self._phase == "forward" and self._keep_last and self._root is None and last

    def _before_backward(self, unit: GatheredUnit, forward: _Forward) -> bool:
        """Whether this is the backward of the step, which comes once; else it is a gradient inside the forward."""
        if self._phase != "backward":
            self._open_inside_forward(unit)
            return False
        self._runs_old_graph |= forward is not self._forward
        self._finish_open(unit)
        self._wait(unit)
        forward.pending[unit] -= 1
        self._open = unit
        self._position = self._position_before(unit)
        if self._position > 0:
            self._start_gather(self._forward.order[self._position - 1])
        return True

    def _open_inside_forward(self, unit: GatheredUnit) -> None:
        if self._inner is not None and self._inner is not unit:
            self._release(self._inner)
        self._inner = unit
        self._wait(unit)

    def _position_before(self, unit: GatheredUnit) -> int:
        for position in range(self._position - 1, -1, -1):
            if self._forward.order[position] is unit:
                return position
        return 0

    def _finish_open(self, following: GatheredUnit | None) -> None:
        unit = self._open
        if unit is None or unit is following or self._forward.pending[unit]:
            # A shared module has more backward to come: it stays gathered until the last one.
            return
        self._open = None
        if self._runs_old_graph:
            self._owed.append(unit)
        else:
            self._finish_unit(unit)
        self._release(unit)

    # One unit.

    def _start_gather(self, unit: GatheredUnit) -> None:
        if unit.state != "released":
            return
        started = [m.start_gather(self._pools[m], self._group) for m in unit.memories if m.transient]
        unit.handles = [handle for handles in started for handle in handles]
        unit.state = "coming"

    def _wait(self, unit: GatheredUnit) -> None:
        if unit.state == "ready":
            return
        self._start_gather(unit)
        for handle in unit.handles:
            handle.wait()
        for memory in unit.memories:
            if memory.transient:
                memory.finish_gather()
        unit.state = "ready"

    def _release(self, unit: GatheredUnit) -> None:
        if unit.state == "released":
            return
        self._wait(unit)  # a gather ahead that nobody used still writes into its buffer
        for memory in unit.memories:
            if memory.transient:
                memory.release(self._pools[memory])
        unit.state = "released"

    # What autograd saves of weights.

    def _pack(self, unit: GatheredUnit, tensor: Tensor) -> object:
        for memory in unit.memories:
            if memory.holds(tensor):
                place = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
                return _SavedWeight(unit, memory, *place)
        return _SavedTensor(tensor, tensor._version)

    def _unpack(self, saved: object) -> Tensor:
        if isinstance(saved, _SavedWeight):
            self._wait(saved.unit)
            assert saved.memory.weights is not None
            weight = saved.memory.weights.as_strided(saved.size, saved.stride, saved.offset)
            # Grad mode is on only under create_graph: what is saved now is not seen by `_pack`.
            return weight.clone() if torch.is_grad_enabled() else weight
        assert isinstance(saved, _SavedTensor)
        if saved.tensor._version != saved.version:  # torch leaves this check to hooks where there are any
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was changed in place (version "
                f"{saved.tensor._version}, saved at {saved.version}); use the operation that is not in place"
            )
        return saved.tensor


@dataclass(frozen=True, eq=False)
class _SavedTensor:
    """A tensor that autograd saved, and its version then."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class _SavedWeight:
    """A view of a unit's weights that autograd saved: where it lies, not the memory, which is freed meanwhile."""

    unit: GatheredUnit
    memory: BucketMemory
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _is_checkpointed() -> bool:
    """Whether a non-reentrant checkpoint runs what comes now: it saves nothing, and runs it again in backward."""
    # Private: nothing public tells whose hooks are the newest (guarded by a test).
    newest = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return newest is not None and newest[0].__module__ == torch.utils.checkpoint.__name__


class _Once:
    """A hook of several output tensors that acts until its action says that it is done."""

    def __init__(self, action: Callable[[], bool]) -> None:
        self._action = action
        self._done = False

    def __call__(self, _grad: Tensor) -> None:
        if not self._done:
            self._done = self._action()
