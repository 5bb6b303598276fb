"""What a step on this process really holds and executes, for lessons that predict it. Plain PyTorch, no engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models import language_model_loss


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all elements; None counts nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def activation_bytes(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Run forward and backward; bytes of the distinct storages that autograd saved, weights and data left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *batch.values()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total, count = language_model_loss(model, batch)
    (total / count).backward()
    return sum(saved.values())


def executed_flops(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """FLOPs of the products of one forward and backward; attention runs as plain products, so all are seen."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        language_model_loss(model, batch)[0].backward()
    return int(counter.get_total_flops())


def step_seconds(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> float:
    """Median wall time of nine steps after one that warms up."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        optimizer.zero_grad()
        total, count = language_model_loss(model, batch)
        (total / count).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
