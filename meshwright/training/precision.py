"""What the four precisions mean: element types of computation and of state, and what a model must be to have them.

| precision | weights in forward and backward | masters, gradient sums, optimizer state | weights on the wire |
|---|---|---|---|
| fp64, fp32 | as named | the same memory | as named |
| bf16, fp16 | as named | float32 | as named |

fp16 has a loss scale besides (`loss_scale.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.adapt import precision as adapter
from meshwright.errors import PlanError
from meshwright.layout.plan import Precision, TrainPlan
from meshwright.recompute.install import offload_warnings
from meshwright.sharding.units import parameters_in_master_type
from meshwright.training.tree import cast_batch

COMPUTE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
MASTER_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32}
)


def is_low(precision: Precision) -> bool:
    """Whether weights are computed with in fewer bits than their masters have."""
    return COMPUTE_DTYPES[precision] != MASTER_DTYPES[precision]


def warnings_of(plan: TrainPlan, device: torch.device) -> list[str]:
    """W207, W208 and W210: what brings nothing on this device; W209: what rounds more than one device does."""
    texts = offload_warnings(plan.recompute, device)
    tp = plan.mesh.size("tp")
    if tp > 1 and is_low(plan.precision):
        texts.append(
            f"W209 plan.tp = {tp} in {plan.precision}: every rank rounds its partial products to 16 bits before they "
            f"are summed, which one device does not, so results depend on tp by as much. "
            f'plan.precision = "fp32" has no such step.'
        )
    if plan.precision == "fp16" and device.type == "cpu":
        texts.append(
            'W207 plan.precision = "fp16" on CPU processes: products of fp16 matrices are slower than in float32, '
            'often 10 times or more. Use it to try a run; "bf16" is faster where the CPU has instructions for it.'
        )
    if plan.offload == "optimizer" and device.type == "cpu":
        texts.append(
            'W208 plan.offload = "optimizer" on CPU processes: device memory is host memory, so it frees nothing and '
            "costs a copy of weights and of gradients. Leave it out; plan.zero = 1 cuts the state over ranks."
        )
    return texts


def to_master(model: nn.Module, precision: Precision) -> nn.Module:
    """Cast parameters and buffers to the type of the masters; the engine casts parameters on from there.

    Raises:
        PlanError: E212 for a complex parameter, or one of float64 in a plan of 16 bits.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise PlanError(
                "E212",
                f'parameter {name!r} is {_name(parameter.dtype)}: plan.precision = "{precision}" makes parameters real '
                f"and would drop its imaginary part. Hold real and imaginary part as two parameters "
                f"(torch.view_as_real) and join them in forward.",
            )
        if is_low(precision) and parameter.dtype == torch.float64:
            raise PlanError(
                "E212",
                f'parameter {name!r} is float64, and with plan.precision = "{precision}" masters are float32. Build '
                f'the model in float32 if that is enough, or set plan.precision = "fp64".',
            )
    return model.to(MASTER_DTYPES[precision])


def cast_parameters(model: nn.Module, precision: Precision) -> None:
    """Make a whole model on one device what the engine makes of it: parameters cast, inputs and outputs too."""
    kept = parameters_in_master_type(model)
    dtype = COMPUTE_DTYPES[precision]
    for parameter in model.parameters():
        if parameter not in kept:
            parameter.data = parameter.data.to(dtype)
    adapter.install(model, dtype)


def check_runs(
    model: nn.Module, loss: Callable[[Any, Any], Any], samples: Sequence[Any], *, precision: Precision
) -> None:
    """Run forward and backward of a copy on `samples` in the plan's 16 bits.

    Args:
        model: with values, as `to_master` leaves it; stays as it is.
        loss: the user's function.
        samples: some items of the dataset.
        precision: nothing is done for fp64 and fp32.

    Raises:
        PlanError: E212 when an operation has no kernel, or meets two element types.
    """
    if not is_low(precision):
        return
    twin = copy.deepcopy(model)
    cast_parameters(twin, precision)
    batch = cast_batch(default_collate(list(samples)), MASTER_DTYPES[precision])
    error = _error_of(twin, loss, batch)
    # What fails in float32 too is not a matter of precision, and training will say it better.
    if error is not None and _error_of(copy.deepcopy(model), loss, batch) is None:
        raise _cannot_run(twin, error, precision) from error


def _error_of(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> Exception | None:
    """What forward and backward of `batch` raise; None if they run."""
    try:
        with torch.random.fork_rng(devices=[]):
            value = loss(model, batch)
            total = value[0] if isinstance(value, tuple) else value
            if total.requires_grad:
                total.backward()
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    return None


def _cannot_run(model: nn.Module, error: Exception, precision: Precision) -> PlanError:
    text = str(error).strip().splitlines()[0]
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    note = ""
    if buffers:
        more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
        note = f" Buffers stay float32 ({buffers[0]!r}{more}): where one meets activations, write buffer.to(x.dtype)."
    return PlanError(
        "E212",
        f'the model runs in float32 and not with plan.precision = "{precision}": {text}.{note} Cast around that '
        f'operation in forward, x.float(), or set plan.precision = "fp32".',
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
