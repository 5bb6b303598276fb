"""Forwards alone through all stages of a pipeline, one batch at a time: for evaluation.

Owns the messages of that; they are waited for at once. Must not know schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import Group, PipelineGroups
from meshwright.pipeline.micro_batch import MicroBatch, Reader
from meshwright.pipeline.redistribute import Parts, num_samples_in
from meshwright.pipeline.stage import Holder, StageRun

_CAUSE = "evaluation"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What this rank does in it.

    Attributes:
        reader: makes micro-batches.
        holder: finds this rank's modules.
        groups: the ranks of the pipeline.
        replicas: the ranks that hold the same stages.
        placement: the place of each stage.
    """

    reader: Reader
    holder: Holder
    groups: PipelineGroups
    replicas: Group
    placement: Sequence[int]

    def run(
        self, batch: Any, scopes: Sequence[Callable[[], AbstractContextManager[Any]]]
    ) -> tuple[Tensor, float]:
        """Loss sum and count of a batch on the ranks of the last stage, zeros elsewhere; in evaluation mode."""
        parts = self._parts_of(batch) if self.groups.teams else None
        prepared = self.reader.prepared(batch, parts, training=self.holder.module("").training)
        stages, values = prepared.stages, dict[int, Tensor]()
        result = (torch.zeros(()), 0.0)
        mine = self.groups.place
        for number, stage in enumerate(stages):
            here, before = self.placement[number], self.placement[number - 1] if number else -1
            if here != mine:
                if before == mine:
                    self._relay(values, prepared, here, number)
                continue
            if number and before != here:
                values = self._relayed(prepared, before, number)
            run = StageRun(prepared.tape, stage, prepared.inputs, dict(values))
            with ExitStack() as stack:
                for scope in (*scopes, prepared.part.forward):
                    stack.enter_context(scope())
                self.reader.start_stage(prepared, stage)
                run.forward(self.holder)
            if number == len(stages) - 1:
                total, count = run.loss()
                prepared.part.check_count(count)
                result = (total.detach(), count)
            else:
                values = {n: run.output(n) for n in stage.sends}
        return result

    def _parts_of(self, batch: Any) -> Parts:
        """Who has what of a batch whose size only all ranks of a place know together."""
        size = torch.tensor([num_samples_in(batch)], device=self.reader.twin.device)
        ops.all_reduce(size, self.replicas, cause=_CAUSE).wait()
        return Parts.of(self.groups, int(size))

    def _peers(self, batch: MicroBatch, place: int) -> list[int]:
        return [place] if batch.parts is None else batch.parts.peers_at(place)

    def _relay(self, values: dict[int, Tensor], batch: MicroBatch, to: int, stage: int) -> None:
        for peer in self._peers(batch, to):
            group = self.groups.to(peer)
            for place, (number, x) in enumerate(values.items()):
                part, tag = batch.for_peer(number, x, peer), stage * 64 + place % 64
                ops.send(part, group, index=peer, tag=tag, cause=_CAUSE).wait()

    def _relayed(self, batch: MicroBatch, before: int, stage: int) -> dict[int, Tensor]:
        found: dict[int, list[Tensor]] = {}
        for peer in self._peers(batch, before):
            group = self.groups.coming_from(peer)
            for place, number in enumerate(batch.stages[stage].receives):
                buffer, tag = batch.empty(number, peer, self.reader.twin.device), stage * 64 + place % 64
                ops.receive(buffer, group, index=peer, tag=tag, cause=_CAUSE).wait()
                found.setdefault(number, []).append(buffer)
        return {number: batch.joined(number, pieces) for number, pieces in found.items()}
