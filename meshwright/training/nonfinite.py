"""Where a loss stopped being a finite number: the first module, by name, whose output is not finite.

Runs only after it has happened: every rank runs its micro-batches forward once more with hooks on all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import ops
from meshwright.errors import NumericsError
from meshwright.nested import tensors_in
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.step import Loss

_TEXT_BYTES = 256


def explain_not_finite(
    engine: ShardingEngine, batches: Iterable[Any], *, loss: Loss, step: int
) -> NumericsError:
    """The error E601 for step `step`, naming module and rank. Every rank must call; all get the same text."""
    found = ""
    for number, batch in enumerate(batches):
        place = _first_not_finite(engine, batch, loss)
        if place and not found:
            found = f"{place} on rank {engine.group.ranks[engine.group.index]}, micro-batch {number}"
    texts = [text for text in _gather_texts(found, engine) if text]
    where = texts[0] if texts else "a gradient (every forward output is finite)"
    return NumericsError(
        "E601",
        f"loss or gradient is not finite at step {step}, first non-finite value: {where}. Step skipped, not applied. "
        f"Lower train.optimizer.lr, lengthen train.schedule.warmup, or look at the samples of this step.",
    )


def _first_not_finite(engine: ShardingEngine, batch: Any, loss: Loss) -> str:
    first: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not first and any(_bad(tensor) for tensor in tensors_in(output)):
                first.append(f"{name} output")

        return hook

    hooks = [m.register_forward_hook(watch(n)) for n, m in engine.model.named_modules() if n]
    try:
        with engine.evaluation():
            total, _ = loss(engine.model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not first and _bad(total):
        return "the loss"
    return first[0] if first else ""


def _bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())


def _gather_texts(text: str, engine: ShardingEngine) -> list[str]:
    group, raw = engine.groups.everyone, text.encode()[:_TEXT_BYTES]
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    mine = mine.to(engine.device)
    every = torch.zeros(_TEXT_BYTES * group.size, dtype=torch.uint8, device=engine.device)
    ops.all_gather(every, mine, group, cause="non-finite places").wait()
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in every.view(group.size, -1)]
