"""FLOPs of a model, counted from what it executes, and the peak they are divided by.

Matmuls, convolutions and attention count; elementwise work does not. Backward costs twice the forward, so a sample
costs three forwards. Two conventions are in use for causal attention: the full square of scores (PaLM, appendix B)
and the half that a causal kernel needs; both are kept.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.kernels import flop_formulas
from meshwright.errors import ConfigError
from meshwright.nested import map_tensors
from meshwright.presets import machine_of_device
from meshwright.training.precision import COMPUTE_DTYPES
from meshwright.training.tree import cast_batch

_MEASURED_SIZE = 1024
_MEASURED_SECONDS = 0.2


@dataclass(frozen=True)
class FlopsPerSample:
    """Forward and backward FLOPs of one sample.

    Attributes:
        full: attention counted as the full square.
        causal: causal attention counted as half of it (equal to `full` where that is not known).
    """

    full: float
    causal: float


@dataclass(frozen=True)
class Peak:
    """The denominator of MFU for one device.

    Attributes:
        flops_per_second: peak of the plan's element type.
        name: what it is, e.g. `h100 bf16 dense` or `measured 1024³ matmul`.
    """

    flops_per_second: float
    name: str


@torch.no_grad()
def count_flops(model: nn.Module, loss: Callable[[Any, Any], Any], samples: Sequence[Any]) -> FlopsPerSample:
    """Count one forward of `loss` over `samples` on a copy of `model`; nothing of the model changes."""
    twin = copy.deepcopy(model).eval()
    dtype = next((p.dtype for p in twin.parameters()), torch.float32)
    batch = cast_batch(default_collate(list(samples)), dtype)
    with torch.random.fork_rng(devices=[]):
        return _counted(lambda: loss(twin, batch), len(samples))


@torch.no_grad()
def count_flops_without_memory(
    skeleton: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], sample: Any
) -> FlopsPerSample:
    """Count one forward of `loss` over one sample by shapes alone, whatever the size of the model.

    Args:
        skeleton: builds the model on the meta device.
        loss: must not look at values.
        sample: an item of the dataset.
    """
    model = skeleton().eval()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model.to_empty(device="cpu")
        batch = map_tensors(default_collate([sample]), fake.from_tensor)
        return _counted(lambda: loss(model, batch), 1)


def count_flops_by_graph(
    model: nn.Module, loss: Callable[[Any, Any], Any], samples: Sequence[Any]
) -> FlopsPerSample | None:
    """Read the loss over `samples` as a task graph; causal attention is known then. None where it cannot be read.

    Args:
        model: may be on meta.
        loss: of (model, batch).
        samples: at least two, or costs of one are not told from those of a batch.
    """
    # Tracing brings sympy along, half a second at the start of a run; few runs need it.
    from meshwright.capture.capture import capture

    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    try:
        graph = capture(model, loss, cast_batch(default_collate(list(samples)), dtype))
    except ConfigError:
        return None
    sizes = (graph.batch, graph.sequence)
    full, causal = graph.flops()(*sizes), graph.causal_flops()(*sizes)
    return FlopsPerSample(3.0 * full / graph.batch, 3.0 * causal / graph.batch)


def counting_flops() -> FlopCounterMode:
    """torch's counter with the formulas that it lacks, to be entered around what is counted."""
    return FlopCounterMode(display=False, custom_mapping=dict(flop_formulas()))


def _counted(forward: Callable[[], Any], num_samples: int) -> FlopsPerSample:
    with counting_flops() as counter:
        forward()
    per_sample = 3.0 * counter.get_total_flops() / num_samples
    return FlopsPerSample(per_sample, per_sample)


def device_peak(device: torch.device, precision: str) -> Peak | None:
    """Peak FLOP/s of one device: from the table for a known GPU, measured for a CPU process, else None.

    A wrong denominator makes MFU lie, so an unknown GPU has none.
    """
    if device.type == "cuda":
        machine = machine_of_device(torch.cuda.get_device_name(device))
        if machine is None or precision not in machine.flops:
            return None
        return Peak(machine.flops[precision], f"{machine.name} {precision} dense, from the table")
    # torch has no fp16 product worth the name on CPUs: a share of its rate would say nothing.
    return None if precision == "fp16" else _measured_peak(precision)


def _measured_peak(precision: str) -> Peak:
    """Best rate of a square product on this process's threads."""
    dtype = COMPUTE_DTYPES[precision]
    size = _MEASURED_SIZE
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    out, best, end = torch.empty_like(a), float("inf"), time.perf_counter() + _MEASURED_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    threads = torch.get_num_threads()
    name = f"measured {size}³ {precision} matmul on {threads} thread{'s' if threads > 1 else ''}"
    return Peak(2 * size**3 / best, name)
