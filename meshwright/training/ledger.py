"""The memory ledger: bytes of a rank by category, predicted before the run and measured in it.

| category | predicted from | measured as |
|---|---|---|
| weights, gradients, optimizer, gathered | formulas over buckets (`layout/accounting.py`) | storages of the engine |
| activations, logits | the twin's run (`activations.py`) | storages that one micro-batch makes |
| communication | - | buffers of transports |
| host | formulas | storages in host memory (plan.offload) |

The peak is their sum: activations at their own peak, all else is there at every moment of a step. Also owns E301:
what a run lacks, and which changes would make it fit.
"""

from __future__ import annotations

import gc
import platform
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import DoesNotFitError, MeshwrightError
from meshwright.layout.accounting import memory_bytes, optimizer_bytes
from meshwright.layout.policy import find_policy
from meshwright.layout.recompute import parse_recompute
from meshwright.partitioning.checkpointing import Span
from meshwright.recompute.install import reruns_of_model
from meshwright.recompute.live_bytes import LiveBytes
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.units import plan_units
from meshwright.training.activations import Phase, Subject, count_activations, executed_flops, reason_of
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.precision import COMPUTE_DTYPES
from meshwright.training.slices import on_slice
from meshwright.training.tree import rows_of

CATEGORIES = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "communication")
# Of a device's memory a plan leaves so much free: fragments, workspaces, the context.
HEADROOM = 0.1
_MIB = 1 << 20


@dataclass(frozen=True)
class Ledger:
    """Bytes of one rank.

    Attributes:
        predicted: category to bytes; one that is unknown is missing.
        measured: the same, once a step has been measured.
        peak_at: the module at the predicted peak.
        unknown: why activations are not predicted; empty where they are.
    """

    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    peak_at: str = ""
    unknown: str = ""

    @property
    def predicted_peak(self) -> int:
        """Bytes of the device at the peak, as far as they are predicted."""
        return sum(value for name, value in self.predicted.items() if name != "host")

    def without_gathered(self) -> Ledger:
        """For ranks that share memory, where gathered weights are the shards themselves."""
        return replace(self, predicted={**self.predicted, "gathered": 0})

    def line(self) -> str:
        """All categories that hold anything, predicted / measured."""
        both = [name for name in (*CATEGORIES, "host") if self.predicted.get(name) or self.measured.get(name)]
        parts = [
            f"{name} {_mib(self.predicted.get(name))} / {_mib(self.measured.get(name))}" for name in both
        ]
        where = f"   peak in {self.peak_at}" if self.peak_at else ""
        text = f"memory a rank, predicted / measured MiB: {' · '.join(parts)}{where}"
        return f"{text}   activations unknown: {self.unknown}" if self.unknown else text

    def to_json(self) -> dict[str, Any]:
        """For a run's result; null where something is unknown."""
        names = (*CATEGORIES, "host")
        return {
            "predicted": {name: self.predicted.get(name) for name in names},
            "measured": {name: self.measured.get(name) for name in names},
            "peak_at": self.peak_at or None,
        }


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / _MIB:.2f}"


def optimizer_key(spec: OptimizerSpec) -> str:
    """The row of accounting's table for this optimizer."""
    return "sgd momentum" if spec.name == "sgd" and spec.momentum else spec.name


def predict_ledger(
    subject: Subject, spec: OptimizerSpec, *, schedules: Mapping[str, Span] | None = None, index: int = 0
) -> Ledger:
    """What a rank will hold, before anything is allocated.

    Args:
        subject: model, loss, micro-batch and plan.
        spec: the optimizer.
        schedules: of budgets.
        index: position of the rank among those that share a copy of the model.
    """
    again = reruns_of_model(subject.model, subject.plan.recompute, schedules)
    # In the backward of one block others run again: one is gathered behind the one that runs.
    at_once = 3 if any(len(ran) > 2 for ran in again.values()) else 2
    try:
        activations = count_activations(subject, schedules=schedules)
    except MeshwrightError:
        raise
    except Exception as error:  # whatever a model does that shapes alone cannot follow
        held = state_bytes(subject, spec, index=index, used=None, gathered_at_once=at_once)
        return Ledger(held, {}, unknown=reason_of(error))
    held = state_bytes(subject, spec, index=index, used=activations.used, gathered_at_once=at_once)
    return Ledger(
        {**held, "activations": activations.activations, "logits": activations.logits},
        {},
        peak_at=activations.peak_at,
    )


def state_bytes(
    subject: Subject,
    spec: OptimizerSpec,
    *,
    index: int,
    used: Collection[str] | None,
    gathered_at_once: int,
    apart: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """Weights, gradients, optimizer and gathered weights of a rank by category; `used`: parameters with gradients."""
    plan = subject.plan
    # An asynchronous worker's engine is of the rank alone, and servers have the optimizer.
    policy = plan.policy if plan.staleness is None else find_policy("ddp")
    shards = (plan.mesh.size("dp_shard") if policy.shards_optimizer else plan.mesh.dp) * plan.mesh.size("cp")
    shards = shards + plan.servers if plan.staleness is None else 1
    units = plan_units(
        subject.model,
        policy,
        shards,
        COMPUTE_DTYPES[plan.precision],
        first_owner=plan.mesh.dp if policy.name == "parameter_server" else 0,
        apart=apart,
    )
    offload = plan.offload == "optimizer"
    memory = memory_bytes(policy, units, index=index, offload=offload, gathered_at_once=gathered_at_once)
    updates = plan.staleness is None
    key = optimizer_key(spec)
    state = optimizer_bytes(policy, units, optimizer=key, index=index, used=used) if updates else 0
    transient = policy.shards_parameters and shards > 1
    return {
        "weights": memory.weight_shards + memory.masters + (0 if transient else memory.weights),
        "gradients": memory.gradients + memory.gradient_shards + memory.pool,
        "optimizer": 0 if offload else state,
        "gathered": memory.weights if transient else 0,
        "host": memory.host + (state if offload else 0),
    }


def recompute_share(subject: Subject, *, schedules: Mapping[str, Span] | None = None) -> float | None:
    """Executed FLOPs over those of the model, for HFU; None where shapes alone cannot follow the model."""
    if not subject.plan.recompute.is_active:
        return 1.0
    plain = replace(subject, plan=replace(subject.plan, recompute=parse_recompute("none")))
    try:
        model = executed_flops(plain)
        return executed_flops(subject, schedules=schedules) / model if model else None
    except MeshwrightError:
        raise
    except Exception:  # as in `predict_ledger`
        return None


def measured_state(engine: ShardingEngine, optimizer: ShardedOptimizer, *, offload: bool) -> dict[str, int]:
    """Bytes that the engine and the optimizer hold now."""
    held = engine.storage_bytes()
    transient = any(memory.transient for memory in engine.memories)
    state = optimizer.state_bytes()
    return {
        "weights": held["weight_shards"] + held["masters"] + (0 if transient else held["weights"]),
        "gradients": held["gradients"] + held["gradient_shards"] + held["pool"],
        "optimizer": 0 if offload else state,
        "gathered": held["weights"] if transient else 0,
        "communication": held["communication"],
        "host": held["host"] + (state if offload else 0),
    }


class ActivationMeter:
    """Counts the storages of one real micro-batch: put around the randomness of a step.

    Attributes:
        held: category to bytes at the peak; None before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.held: Mapping[str, int] | None = None

    @contextmanager
    def around(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Enter `inner` and measure what a micro-batch makes inside."""
        known = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        phase = Phase(self._model)
        try:
            with inner, LiveBytes(known, label=phase.label) as meter:
                yield
        finally:
            phase.remove()
        self.held = {name: meter.at_peak.get(name, 0) for name in ("activations", "logits")}


def usable_bytes(device: torch.device, *, local_size: int) -> int | None:
    """What a rank may use: of its GPU, or its share of what the host has free now; None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * (1 - HEADROOM))
    if platform.system() != "Linux":
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return None if found is None else int(int(found[1]) * 1024 * (1 - HEADROOM)) // local_size


def check_fits(
    ledger: Ledger, usable: int | None, changes: Callable[[], list[tuple[str, Ledger, float]]]
) -> None:
    """Raise E301 where the predicted peak exceeds what is usable, with the changes that fit.

    Args:
        ledger: predicted.
        usable: bytes; None: unknown.
        changes: () -> (what to set, what it would take, executed FLOPs over those of now) to choose from.
    """
    if usable is None or ledger.predicted_peak <= usable:
        return
    largest = max(ledger.predicted, key=lambda name: ledger.predicted[name])
    fitting = [change for change in changes() if change[1].predicted_peak <= usable]
    fitting.sort(key=lambda change: (change[2], change[1].predicted_peak))
    gib = 1 << 30
    listed = " · ".join(
        f"{text} {other.predicted_peak / gib:.2f} GiB" + (f", +{share - 1:.0%} FLOPs" if share > 1 else "")
        for text, other, share in fitting
    )
    raise DoesNotFitError(
        "E301",
        f"does not fit: {ledger.predicted_peak / gib:.2f} of {usable / gib:.2f} GiB usable ({HEADROOM:.0%} left free). "
        f"Largest: {largest} {ledger.predicted[largest] / gib:.2f}. "
        + (
            f"Changes that fit, fastest first: {listed}"
            if listed
            else "No single change fits: use more ranks."
        ),
    )


def possible_changes(
    subject: Subject, spec: OptimizerSpec, predict: Callable[[Subject], Ledger] | None = None
) -> list[tuple[str, Ledger, float]]:
    """Single changes of the plan that take less memory: (what to set, its ledger, executed FLOPs over those of now).

    `predict`: of a subject whose micro-batches stay; None: `predict_ledger`.
    """
    plan, found = subject.plan, []
    predicted = predict or partial(predict_ledger, spec=spec)
    for word in ("selective", "full"):
        other = replace(subject, plan=replace(plan, recompute=parse_recompute(word)))
        try:
            share = recompute_share(other) or 1.0
            found.append((f'plan.recompute="{word}"', predicted(other), share))
        except MeshwrightError:  # a model without repeated blocks
            continue
    if plan.micro_batch > 1 and predict is None:
        half = _half(subject)
        found.append((f"plan.micro_batch={half.plan.micro_batch}", predict_ledger(half, spec), 1.0))
    stages = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
    for stage in range(stages[plan.policy.name] + 1, 4):
        policy = find_policy(stage, ownership=plan.policy.ownership)
        other = replace(subject, plan=replace(plan, policy=policy))
        found.append((f"plan.zero={stage}", predicted(other), 1.0))
    return found


def _half(subject: Subject) -> Subject:
    size = subject.plan.micro_batch // 2
    whole = subject if subject.whole is None else subject.whole
    plan = replace(subject.plan, micro_batch=size)
    return on_slice(replace(whole, batch=rows_of(whole.batch, slice(0, size)), plan=plan))
