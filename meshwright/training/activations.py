"""What forward and backward of one micro-batch hold and execute, known before any of it runs: from shapes alone.

A twin of the model whose tensors have no memory goes through the same forward, loss, recomputation and backward as the
run will, and every storage is counted from the operation that makes it to its end (`recompute/live_bytes.py`). Time is
linear in the number of operations: seconds for models of any size.

Owns the twin. Must not know memory of weights, gradients and optimizers: `layout/accounting.py` has formulas for them.

Simplifications: one rank's samples in one process; memory inside of operations is not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import default_collate

from meshwright.adapt import batch_norm, dropout, linear, precision
from meshwright.capture.attention_masks import masks_as_in_training
from meshwright.errors import PlanError
from meshwright.layout.plan import TrainPlan
from meshwright.layout.recompute import Recomputation, RecomputePlan
from meshwright.nested import map_tensors, tensors_in
from meshwright.partitioning.checkpointing import Layer, Span, optimal
from meshwright.recompute.forwards import replace_forwards
from meshwright.recompute.install import find_chains
from meshwright.recompute.install import install as install_recompute
from meshwright.recompute.live_bytes import LiveBytes
from meshwright.sharding.units import parameters_in_master_type
from meshwright.training.flops import counting_flops
from meshwright.training.precision import COMPUTE_DTYPES, MASTER_DTYPES
from meshwright.training.step import Loss
from meshwright.training.task import Task
from meshwright.training.tree import cast_batch

# Bytes that a device moves in the time of one FLOP, for layers without products: 50 FLOPs a byte, as an A100 in float32
# to an H100 in bf16 have between 10 and 300.
_FLOPS_A_BYTE = 50


@dataclass(frozen=True)
class Activations:
    """What one micro-batch holds beside weights, gradients and optimizer.

    Attributes:
        activations: bytes at the peak that blocks made.
        logits: bytes at the peak that what follows the last block made: head and loss.
        kept: bytes between forward and backward.
        peak_at: the module at the peak, and whether forward or backward.
        used: names of parameters that got a gradient.
    """

    activations: int
    logits: int
    kept: int
    peak_at: str
    used: frozenset[str]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.activations + self.logits


@dataclass(frozen=True, eq=False)
class Subject:
    """What is looked at.

    Attributes:
        model: with or without memory; it is not changed.
        loss: (model, batch) -> (sum, count).
        batch: one rank's micro-batch.
        plan: its recomputation and precision.
        around: entered around forward and backward.
        whole: the micro-batch before sequences were cut over ranks (`slices.py`); None: they are whole.
    """

    model: nn.Module
    loss: Loss
    batch: Any
    plan: TrainPlan
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    whole: Subject | None = None


def subject_of(task: Task, plan: TrainPlan) -> Subject:
    """A micro-batch as every rank will have them; the same samples on all ranks."""
    data = task.train_data
    samples = [data[i % len(data)] for i in range(plan.micro_batch)]
    return Subject(task.model, task.loss, default_collate(samples), plan)


def count_activations(subject: Subject, *, schedules: Mapping[str, Span] | None = None) -> Activations:
    """Run the twin of `subject` through one micro-batch.

    Args:
        subject: the run.
        schedules: of budgets, see `budget_schedules`.

    Raises:
        Whatever the model raises where its control flow depends on values.
    """
    with twin_of(subject) as (twin, batch, known):
        install_recompute(twin, subject.plan.recompute, schedules=schedules)
        phase, used = Phase(twin), set[str]()
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))
        with subject.around(), LiveBytes(known, label=phase.label, mark=phase.where) as meter:
            total, _ = subject.loss(twin, batch)
            kept = meter.total
            if total.requires_grad:
                total.backward()
            held = meter.at_peak
            found = held.get("activations", 0), held.get("logits", 0), kept, meter.peak_mark
            return Activations(*found, frozenset(used))


def executed_flops(subject: Subject, *, schedules: Mapping[str, Span] | None = None) -> float:
    """FLOPs of one micro-batch's forward and backward, what runs again included; see `count_activations`."""
    # A run of its own: torch's counter keeps tensors longer than the run does.
    with twin_of(subject) as (twin, batch, _):
        install_recompute(twin, subject.plan.recompute, schedules=schedules)
        with subject.around(), counting_flops() as flops:
            total, _ = subject.loss(twin, batch)
            if total.requires_grad:
                total.backward()
        return float(flops.get_total_flops())


def budget_schedules(subject: Subject) -> dict[str, Span]:
    """The schedule of each chain that has a budget, by the name of its first module; the same on every rank.

    Raises:
        PlanError: E243 where the leanest schedule takes more than the budget.
    """
    chains = [c for c in find_chains(subject.model, subject.plan.recompute) if c.kept.kind == "budget"]
    found = {}
    for chain in chains:
        names = list(chain.modules)
        try:
            layers, input_bytes = layer_costs(subject, names)
        except Exception as error:  # whatever a model does that shapes alone cannot follow
            raise PlanError(
                "E243",
                f'plan.recompute = "{chain.kept}" counts blocks by shapes alone, which cannot follow '
                f"{type(subject.model).__name__}: {reason_of(error)}. Choose full, selective, every:k or constant.",
            ) from error
        schedule = optimal(layers, input_bytes=input_bytes, limit=chain.kept.amount)
        if schedule is None:
            least = _least(layers, input_bytes)
            raise PlanError(
                "E243",
                f'plan.recompute = "{chain.kept}": blocks {names[0]} .. {names[-1]} need {least / 2**20:,.1f} MiB when '
                f"only one input is kept, for a micro-batch of {subject.plan.micro_batch}. Set a larger budget, a "
                f"smaller plan.micro_batch, or more ranks.",
            )
        found[names[0]] = schedule
    return found


def reason_of(error: Exception) -> str:
    """The first line of what a model raised, or the name of its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _least(layers: Sequence[Layer], input_bytes: float) -> float:
    """Least bytes in which a chain fits, to 1/64."""
    low, high = (
        input_bytes,
        2 * (input_bytes + sum(x.saved + x.forward_extra + x.backward_extra for x in layers)),
    )
    while high - low > high / 64:
        middle = (low + high) / 2
        if optimal(layers, input_bytes=input_bytes, limit=middle) is None:
            low = middle
        else:
            high = middle
    return high


def layer_costs(subject: Subject, names: Sequence[str]) -> tuple[list[Layer], float]:
    """Counted costs of the modules `names`, and bytes of the first one's input; times in FLOPs."""
    seen: dict[str, tuple[Layer, float]] = {}
    plain = Subject(subject.model, subject.loss, subject.batch, subject.plan)
    with twin_of(plain) as (twin, batch, known):
        modules = dict(twin.named_modules())
        replace_forwards(
            {name: modules[name] for name in names},
            lambda name, forward: _Measured(name, forward, seen, known),
        )
        with torch.no_grad():
            subject.loss(twin, batch)
    layers = [seen[name][0] for name in names]
    return layers, seen[names[0]][1]


class _Measured:
    """A forward that is measured when it runs, alone with its backward."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        seen: dict[str, tuple[Layer, float]],
        known: list[Tensor],
    ) -> None:
        self._name, self._forward, self._seen, self._known = name, forward, seen, known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs: list[Tensor] = []

        def take(tensor: Tensor) -> Tensor:
            inputs.append(tensor.detach().requires_grad_(tensor.is_floating_point()))
            return inputs[-1]

        args, kwargs = map_tensors((args, kwargs), take)
        with torch.enable_grad():
            self._seen.setdefault(self._name, self._measure(inputs, args, kwargs))
        with torch.no_grad():
            return self._forward(*args, **kwargs)

    def _measure(
        self, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Layer, float]:
        with LiveBytes([*self._known, *inputs]) as meter:
            result = self._forward(*args, **kwargs)
            saved, peak, made = meter.total, meter.peak, meter.made
            outputs = [t for t in tensors_in(result) if t.requires_grad]
            output = sum(t.nbytes for t in outputs)
            meter.restart_peak()
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
            extra = max(0, meter.peak - saved - output)
            made_backward = meter.made - made
        with counting_flops() as flops:
            outputs = [t for t in tensors_in(self._forward(*args, **kwargs)) if t.requires_grad]
            forward_time = flops.get_total_flops() + _FLOPS_A_BYTE * made
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
            backward_time = flops.get_total_flops() + _FLOPS_A_BYTE * (made + made_backward) - forward_time
        first = sum(x.nbytes for x in inputs[:1])
        return Layer(forward_time, backward_time, output, saved, max(0, peak - saved), extra), float(first)


@contextmanager
def twin_of(subject: Subject) -> Iterator[tuple[nn.Module, Any, list[Tensor]]]:
    """A copy of the model without memory, adapted as a rank's would be, a batch, and the tensors that are its state."""
    dtype = COMPUTE_DTYPES[subject.plan.precision]
    kept = parameters_in_master_type(subject.model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        memo: dict[int, Any] = {}
        for parameter in subject.model.parameters():
            kind = parameter.dtype if parameter in kept else dtype
            empty = torch.empty(parameter.shape, dtype=kind, device="cpu")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in subject.model.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        twin = copy.deepcopy(subject.model, memo)
        twin.train(subject.model.training)
        precision.install(twin, dtype)
        ranks = subject.plan.mesh.dp if subject.plan.staleness is None else 1
        batch_norm.install(twin, batch_norm.GroupOnPaper(ranks))
        lends = _Lends(twin, has_masters=dtype != MASTER_DTYPES[subject.plan.precision])
        linear.install(twin, lends)
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        batch = cast_batch(subject.batch, MASTER_DTYPES[subject.plan.precision])
        batch = map_tensors(batch, fake.from_tensor)
        known = [*twin.parameters(), *twin.buffers(), *tensors_in(batch), *lends.lent.values()]
        with torch.random.fork_rng(devices=[]), dropout.by_shape(), masks_as_in_training(batch):
            yield twin, batch, known


class _Lends:
    """Lends memory for the gradients of plain linear layers, as the engine does where there are no masters."""

    def __init__(self, twin: nn.Module, *, has_masters: bool) -> None:
        matrices = [] if has_masters else [m.weight for m in twin.modules() if type(m) is nn.Linear]
        self.lent = {w: torch.empty_like(w, requires_grad=False) for w in matrices if w.requires_grad}

    def lender(self, parameter: nn.Parameter) -> Callable[[], Tensor | None] | None:
        """See `Gradients`."""
        memory = self.lent.get(parameter)
        return None if memory is None else memory.detach

    def adder(self, _parameter: nn.Parameter) -> None:
        """Outside of pipelines nothing goes past autograd."""


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class Phase:
    """Where a micro-batch is: in or before the blocks of `model`, or behind the last one; and in which module."""

    def __init__(self, model: nn.Module) -> None:
        self._is_behind = False
        self._stack: list[str] = []
        self._backward = ""
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)),
                module.register_forward_hook(
                    lambda _m, _a, out, name=name: self._leave(name, out), always_call=True
                ),
            ]
        blocks = (
            find_chains(model, RecomputePlan((("", Recomputation("full")),))) if _has_blocks(model) else []
        )
        if blocks:
            last = list(blocks[-1].modules.values())[-1]
            self._handles.append(last.register_forward_hook(lambda _m, _a, out: self._pass(out)))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def label(self) -> str:
        """Category of what is made now."""
        return "logits" if self._is_behind else "activations"

    def where(self) -> str:
        """The innermost module that runs, or whose backward does."""
        if _in_backward():
            return f"backward of {self._backward or 'the loss'}"
        inner = self._stack[-1] if self._stack else ""
        return f"forward of {inner or 'the loss'}"

    def _enter(self, name: str) -> None:
        if not _in_backward():
            self._stack.append(name)

    def _leave(self, name: str, output: object) -> None:
        if _in_backward():  # a module that runs again
            return
        if self._stack:
            self._stack.pop()

        def start(_grad: Tensor) -> None:
            self._backward = name

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(start)

    def _pass(self, output: object) -> None:
        if _in_backward():
            return
        self._is_behind = True

        def come_back(_grad: Tensor) -> None:
            self._is_behind = False

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(come_back)


def _in_backward() -> bool:
    # Private, as torch.utils.checkpoint has it: nothing public tells backward from forward (guarded by a test).
    return torch._C._current_graph_task_id() != -1


def _has_blocks(model: nn.Module) -> bool:
    return any(isinstance(m, nn.ModuleList | nn.Sequential) and len(m) for m in model.modules())
