"""A tensor-parallel layout from a model's graph: the model is read with its loss and a few samples before it is cut.

Owns that meeting of `capture/` and `partitioning/derive_tensor.py`. Every rank does the same and finds the same; the
model does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from meshwright.capture.capture import capture
from meshwright.data.batches import MapStyle
from meshwright.errors import ConfigError, PlanError
from meshwright.graph.task_graph import TaskGraph
from meshwright.layout.plan import Precision
from meshwright.partitioning.derive_tensor import derive_layout
from meshwright.partitioning.tensor_regions import DerivedLayout, LayerKind
from meshwright.training.precision import MASTER_DTYPES
from meshwright.training.step import Loss
from meshwright.training.tree import cast_batch

# A batch of one sample would fix the size of all batches.
_FEWEST_SAMPLES = 2


@dataclass(frozen=True)
class Example:
    """What a model is read with.

    Attributes:
        loss: (model, batch) -> (sum, count).
        data: whose first samples make a batch.
        num_samples: of a micro-batch.
        precision: of the run.
    """

    loss: Loss
    data: MapStyle
    num_samples: int
    precision: Precision

    def batch(self) -> Any:
        """The first samples, at least 2."""
        samples = range(max(_FEWEST_SAMPLES, self.num_samples))
        collated = default_collate([self.data[i % len(self.data)] for i in samples])
        return cast_batch(collated, MASTER_DTYPES[self.precision])


def deriver(model: nn.Module, example: Example) -> Callable[[Mapping[str, LayerKind], int], DerivedLayout]:
    """What `adapt/tensor_parallel.py` asks for the layout of `model`.

    Raises, where it is asked:
        PlanError: E290 for a model whose graph cannot be read.
    """

    def derive(kinds: Mapping[str, LayerKind], num_ranks: int) -> DerivedLayout:
        return derive_layout(_read(model, example), kinds, num_ranks)

    return derive


def _read(model: nn.Module, example: Example) -> TaskGraph:
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        graph = capture(model, example.loss, example.batch())
    except ConfigError as error:
        raise _unread(model, error.message) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if graph.source != "torch.export":
        raise _unread(model, "; ".join(graph.notes))
    return graph


def _unread(model: nn.Module, why: str) -> PlanError:
    return PlanError(
        "E290",
        f"plan.tp > 1: no layout is known for {type(model).__name__}, and its graph, which would tell one, cannot be "
        f"read: {why}. Name the roles of its layers in plan.layout, or set plan.tp=1.",
    )
