"""A micro-batch as one of the ranks that share its sequences holds it, before any of them runs: for the ledger.

Owns the group on paper, over which nothing travels. Must not know what is counted. All ranks are like the first: slices
are equally long, and where heads do not divide, it has most of them.

Simplification: models of transformers, and attention with dropout or padding, whose code looks at values, are not
followed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from meshwright.adapt.context_hf import models_in
from meshwright.adapt.context_parallel import ContextScope
from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group
from meshwright.comm.transports.base import Transport, Work
from meshwright.layout.sequence import cut_sequence
from meshwright.training.activations import Subject
from meshwright.training.sequences import cut_batch, length_of


class _OnPaper:
    """What attention asks of a transport, where tensors have no memory."""

    name = "on paper"

    def _nothing(self, *_: Any) -> Work:
        return Work([])

    send = receive = all_gather = reduce_scatter = all_to_all = _nothing


def on_slice(subject: Subject) -> Subject:
    """`subject` with the first rank's part of its batch, as `plan.cp` cuts it; itself without plan.cp.

    Raises:
        PlanError: E250, E251 for a batch that cannot be cut.
    """
    size, kind = subject.plan.mesh.size("cp"), subject.plan.cp_kind
    if size == 1:
        return subject
    group = Group("cp", tuple(range(size)), 0, cast(Transport, _OnPaper()), CommLog(0, size))
    scope = ContextScope(group, kind)
    part, place = cut_batch(subject.batch, cut_sequence(length_of(subject.batch), size, kind), 0)

    def loss(model: Any, batch: Any) -> tuple[Tensor, Any]:
        if models_in(model):
            raise NotImplementedError("a model of transformers under plan.cp")
        with scope.forward(place):
            return subject.loss(model, batch)

    return replace(subject, loss=loss, batch=part, around=scope.entered, whole=subject)
