"""Which device a process computes on."""

from __future__ import annotations

import torch

from meshwright.comm.mesh import World
from meshwright.errors import PlanError
from meshwright.training.config import RunConfig


def choose_device(config: RunConfig, world: World) -> torch.device:
    """The device of this process, made current where it is a GPU.

    Raises:
        PlanError: E207 where a process has no GPU and needs one.
    """
    wants_gpu = config.plan.transport in ("auto", "nccl") and torch.cuda.is_available()
    if config.plan.transport == "nccl" and not torch.cuda.is_available():
        raise PlanError(
            "E207", 'plan.transport = "nccl" needs CUDA GPUs and this host shows none; use "gloo"'
        )
    if wants_gpu:
        if world.local_rank >= torch.cuda.device_count():
            raise PlanError(
                "E207",
                f"local rank {world.local_rank} has no GPU: {torch.cuda.device_count()} are visible. Start fewer "
                f'processes a host, or set plan.transport="gloo" for CPU processes.',
            )
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
