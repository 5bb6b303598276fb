"""From a whole model to this rank's stages: what no stage here uses loses its parameters and buffers.

The module stays the same object with the same names, so everything that shards, adapts or saves it works as on a whole
one. A tied parameter that is used here stays under all its names, so that it is called the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from meshwright.pipeline.cut import Stage
from meshwright.pipeline.tape import Tape


def holders_of(tape: Tape, stages: Sequence[Stage], model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name of each parameter and buffer to the stages that use it; what no call uses is with what stands before it."""
    found: dict[str, set[int]] = {}
    for number, stage in enumerate(stages):
        for position in stage.calls:
            for name in tape.calls[position].held:
                found.setdefault(name, set()).add(number)
    before: tuple[int, ...] = (0,)
    result = {}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        before = (min(before),) if name not in found else tuple(sorted(found[name]))
        result[name] = before
    return result


def prune(model: nn.Module, keep: Collection[str]) -> None:
    """Take every parameter and buffer that is not in `keep` from its module."""
    kept = {id(x) for name, x in [*model.named_parameters(), *model.named_buffers()] if name in keep}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, x in table.items():
                if x is not None and id(x) not in kept:
                    table[name] = None
