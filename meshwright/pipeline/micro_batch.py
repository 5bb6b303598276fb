"""Micro-batches of a pipeline: their tensors, and what every stage does with them, learned once for each shape.

Owns the tapes and how values of a batch are cut on their way. Must not know the order of computations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.ops import PipelineGroups
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.nested import tensors_in
from meshwright.pipeline.cut import Cut, Stage, make_stages
from meshwright.pipeline.part import Part
from meshwright.pipeline.record import Loss, Twin
from meshwright.pipeline.redistribute import (
    Parts,
    crossing,
    narrowed,
    num_samples_in,
    sample_dims,
    with_one_more,
)
from meshwright.pipeline.tape import Tape
from meshwright.pipeline.tokens import CutTokens, cut_tokens


@dataclass(frozen=True)
class Shape:
    """What every stage does for batches of one shape.

    Attributes:
        tape: of all stages, with shapes of this rank.
        stages: what each makes, gets and hands on.
        dims: of values that are cut on their way to unlike places, that of samples.
        tokens: which values ranks of `plan.sequence_parallel` have in part.
    """

    tape: Tape
    stages: list[Stage]
    dims: Mapping[int, int]
    tokens: CutTokens


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: its tensors by number, what the stages do with it, and what it is a part of.

    `parts`: who has which of its samples, where places of the pipeline have unlike numbers of ranks.
    """

    inputs: dict[int, Tensor]
    shape: Shape
    part: Part
    parts: Parts | None = None

    @property
    def tape(self) -> Tape:
        """Of all stages."""
        return self.shape.tape

    @property
    def stages(self) -> list[Stage]:
        """Of the whole model."""
        return self.shape.stages

    def part_for(self, peer: int) -> tuple[int, int] | None:
        """(first, number) of the samples that go to or come from a rank; None: all."""
        return None if self.parts is None else self.parts.shared_with(peer)

    def empty(self, number: int, peer: int, device: torch.device) -> Tensor:
        """Memory for what comes of a value from a rank."""
        value, part = self.tape.values[number], self.part_for(peer)
        shape = list(value.shape)
        if part is not None:
            shape[self.shape.dims[number]] = part[1]
        return torch.empty(shape, dtype=value.dtype, device=device)

    def for_peer(self, number: int, x: Tensor, peer: int) -> Tensor:
        """What of a value goes to a rank, contiguous."""
        return narrowed(x, self.shape.dims.get(number, 0), self.part_for(peer))

    def joined(self, number: int, pieces: list[Tensor]) -> Tensor:
        """A value from what came of it, in the order of its samples."""
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.shape.dims[number])


class Reader:
    """Makes micro-batches of batches.

    Args:
        twin: records what the loss does with batches of a new shape.
        cut: where the model is cut.
        loss: (model, batch) -> (sum, count).
        groups: the ranks of the pipeline.
        placement: see `Schedule`.

    Attributes:
        cut_batch: this rank's part of a batch.
        layout: this rank's part of matrices and tokens; None: it has them whole.
    """

    def __init__(
        self,
        twin: Twin,
        cut: Cut,
        loss: Loss,
        *,
        groups: PipelineGroups,
        placement: Sequence[Sequence[int]],
    ) -> None:
        self.twin, self._cut, self._loss = twin, cut, loss
        self._groups, self._placement = groups, placement
        self._shapes: dict[object, Shape] = {}
        self.cut_batch: Callable[[Any], Part] = Part
        self.layout: TensorLayout | None = None

    def prepared(self, batch: Any, parts: Parts | None, *, training: bool) -> MicroBatch:
        """A batch of this rank, ready to run."""
        part = self.cut_batch(batch)
        shape = self._shape_of(part.batch, training=training)
        inputs = dict(zip(shape.tape.inputs, tensors_in(part.batch), strict=True))
        return MicroBatch(inputs, shape, part, parts)

    def _shape_of(self, batch: Any, *, training: bool) -> Shape:
        key = (training, signature_of(batch))
        if key not in self._shapes:
            tape = self.twin.record(self._loss, batch, training=training)
            stages, dims = make_stages(tape, self._cut), dict[int, int]()
            wanted = crossing(stages, self._placement, self._groups)
            if wanted:
                taller = self.twin.record(self._loss, with_one_more(batch), training=training)
                dims = sample_dims(tape, taller, wanted, num_samples_in(batch))
            tape, tokens = cut_tokens(tape, self.layout or TensorLayout(1, 0))
            self._shapes[key] = Shape(tape, stages, dims, tokens)
        return self._shapes[key]

    def start_stage(self, batch: MicroBatch, stage: Stage) -> None:
        """Before a forward: whether its first modules get a part of the tokens; other micro-batches were between."""
        if self.layout is not None:
            self.layout.region.tokens = batch.shape.tokens.of_stage(stage)


def signature_of(batch: Any) -> object:
    """Equal for batches with which Python does the same: shapes and types of tensors, and whatever is no tensor."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    kinds = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    keys = tuple(batch) if isinstance(batch, dict) else ()
    return (keys, kinds)
