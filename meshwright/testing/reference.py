"""What one process computes with plain PyTorch: the reference of every parity test.

It shares no code with the engine: a plain model, plain autograd, `torch.optim` unfused, and the normaliser law
written out. The global batch is cut into the same micro-steps (the index law), not over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Trace:
    """What a run computed, step by step.

    Attributes:
        losses: loss of each step.
        norms: gradient norm of each step, before clipping.
        gradients: per step, name to the normalised, clipped gradient; None where a parameter got none.
        parameters: name to value after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def run_reference(
    model: nn.Module,
    loss: Callable[[Any, Any], tuple[Tensor, Any]],
    steps: Sequence[Sequence[Any]],
    *,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
) -> Trace:
    """Train `model` on `steps`, each a list of micro-batches, on this process alone.

    Args:
        model: plain module, changed in place.
        loss: (model, batch) -> (sum, count).
        steps: micro-batches of each step, each the whole global micro-batch.
        optimizer: over `model.parameters()`.
        clip_norm: as `torch.nn.utils.clip_grad_norm_`, or None.
    """
    trace = Trace()
    for micro_batches in steps:
        optimizer.zero_grad(set_to_none=True)
        loss_sum, count = 0.0, 0.0
        for batch in micro_batches:
            part, part_count = loss(model, batch)
            if part.requires_grad:
                part.backward()
            loss_sum, count = loss_sum + float(part.detach()), count + float(part_count)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        present = [grad for grad in gradients.values() if grad is not None]
        for grad in present:
            grad.div_(count)
        norm = torch.linalg.vector_norm(torch.stack([g.double().norm() for g in present])).item()
        if clip_norm is not None:
            for grad in present:
                grad.mul_(min(1.0, clip_norm / (norm + 1e-6)))
        trace.losses.append(loss_sum / count)
        trace.norms.append(norm)
        trace.gradients.append({n: None if g is None else g.clone() for n, g in gradients.items()})
        optimizer.step()
    trace.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace
