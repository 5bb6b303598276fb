"""On which device of this process everything lies, and the pools of buffers.

A model goes to the run's device. One that was built over several devices of that kind (its own forward moves
activations between them) stays where it is, in buckets of one device each; only ddp does that, because shards of such
a model would have to be cut by device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.bucket import Bucket, Unit
from meshwright.layout.policy import ShardingPolicy
from meshwright.sharding.memory import BucketMemory, BufferPool, Initialiser, give_memory
from meshwright.sharding.units import parameters_in_master_type


def several_devices(devices: Mapping[str, torch.device], kind: str) -> dict[str, torch.device]:
    """`devices` of parameters by name where these are several of one `kind` (`cuda`); else nothing."""
    distinct = set(devices.values())
    is_spread = len(distinct) > 1 and all(device.type == kind for device in distinct)
    return dict(devices) if is_spread else {}


def devices_of(model: nn.Module, device: torch.device) -> dict[str, torch.device]:
    """Parameter name to device where the model spans several devices of the run's kind; else nothing."""
    return several_devices({name: p.device for name, p in model.named_parameters()}, device.type)


def check_devices(devices: Mapping[str, torch.device], policy: ShardingPolicy, *, offload: bool) -> None:
    """E213 for a model over several devices with a policy that cannot leave it there."""
    if devices and (policy.shards_optimizer or offload):
        names = ", ".join(sorted({str(device) for device in devices.values()}))
        what = "plan.offload" if offload else f"plan.zero = {policy.name[-1]}"
        raise PlanError(
            "E213",
            f"the model lies on {names}, and {what} keeps what it holds on one device. Set plan.zero=0 without "
            f"plan.offload, or build the model on one device.",
        )


def place_of(bucket: Bucket, device: torch.device) -> torch.device:
    """The device of a bucket; `device` unless the model spans several."""
    own = bucket.parameters[0].device
    return torch.device(own) if own else device


def move_parameters(
    model: nn.Module,
    device: torch.device,
    initialiser: Initialiser | None,
    compute_dtype: torch.dtype | None,
    *,
    leave_out: Collection[nn.Parameter],
) -> None:
    """Parameters of no bucket (frozen, not sharded) get their place and the type of computation."""
    kept, places = parameters_in_master_type(model), devices_of(model, device)
    for name, parameter in model.named_parameters():
        if parameter in leave_out:
            continue
        dtype = parameter.dtype if compute_dtype is None or parameter in kept else compute_dtype
        place = places.get(name, device)
        if (parameter.device, parameter.dtype) == (place, dtype):
            continue
        values = parameter.data
        if values.is_meta:
            assert initialiser is not None, f"parameter {name} is on the meta device, without values"
            values = initialiser(name, 0, values.numel(), values.dtype).view(values.shape)
        give_memory(parameter, values.to(place, dtype))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers go to the device, unless the model spans several; they keep their type.

    Raises:
        PlanError: E206 for one without values.
    """
    is_spread = bool(devices_of(model, device))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                raise PlanError(
                    "E206",
                    f"buffer {name!r} of {type(module).__name__} is on the meta device: its values are "
                    f"unknown. Build the model on a real device.",
                )
            if buffer.device != device and not is_spread:
                setattr(module, name, buffer.to(device))  # nn.Module keeps it a (non-)persistent buffer


def make_pools(
    owners: list[tuple[Unit, BucketMemory]],
    allocate: Callable[..., Tensor],
    *,
    own_root: bool,
    dtype_of: Callable[[BucketMemory], torch.dtype],
) -> dict[BucketMemory, BufferPool]:
    """A pool for each (element type, trained or not) that blocks share; with `own_root` one for each root bucket.

    The root is open during the whole backward, so it has a buffer of its size. `allocate(numel, dtype=...)` gives a
    buffer.
    """
    shared: dict[tuple[torch.dtype, bool], list[BucketMemory]] = {}
    pools: dict[BucketMemory, BufferPool] = {}
    for unit, memory in owners:
        if unit.is_root and own_root:
            pools[memory] = BufferPool(memory.bucket.numel, partial(allocate, dtype=dtype_of(memory)))
        else:
            shared.setdefault((dtype_of(memory), memory.bucket.trainable), []).append(memory)
    for (dtype, _), memories in shared.items():
        pool = BufferPool(max(memory.bucket.numel for memory in memories), partial(allocate, dtype=dtype))
        pools |= dict.fromkeys(memories, pool)
    return pools


def pooled_bytes(pools: dict[BucketMemory, BufferPool]) -> int:
    """Bytes of all buffers of distinct pools."""
    distinct = {id(pool): pool for pool in pools.values()}
    return sum(b.untyped_storage().nbytes() for pool in distinct.values() for b in pool.buffers)
