"""One element of a tensor of a candidate rank, changed by a given amount at a random place, for trials."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from torch import Tensor, nn

from meshwright.nested import tensors_in
from meshwright.training.clip import clip_coefficient
from meshwright.verification.job import Reference
from meshwright.verification.rank import CandidateRank
from meshwright.verification.tensors import NEGLIGIBLE, Recorded

KINDS = ("gradients", "parameters", "activations")
RELATIVE = 1e-8


@dataclass(frozen=True)
class Site:
    """Where a tensor is spoiled, once.

    Attributes:
        item: the reference's tensor; its check, step, micro-step and name say when and where.
        rank: whose copy or whose samples; the owner's, wherever the tensor is cut into shards.
        place: 0..1, the element in the order of the tensor.
        amount: what is added.
    """

    item: Recorded
    rank: int
    place: float
    amount: float

    @property
    def element(self) -> int:
        """Flat index in a gradient or parameter."""
        return min(int(self.place * self.item.numel), self.item.numel - 1)

    def inject(self, candidate: CandidateRank) -> None:
        """To be given to verify."""
        {"gradients": _gradient, "parameters": _parameter, "activations": _activation}[self.item.check](
            self, candidate
        )


def draw_site(reference: Reference, kind: str, *, num_ranks: int, draw: Random) -> Site:
    """A random tensor of this kind that is not mathematically zero, and one of its elements.

    A tensor that mathematics makes zero (the bias of keys, a bias in front of batch statistics) holds nothing but
    rounding: 1e-8 of that is no change.
    """
    items = [item for item in reference.recorded if item.check == kind and is_telling(item)]
    item = draw.choice(items)
    amount = RELATIVE * item.scale.largest * draw.choice((-1, 1))
    if kind == "gradients":  # what is compared was clipped
        norm = next(
            other.scale.largest
            for other in reference.recorded
            if (other.check, other.step) == ("grad_norm", item.step)
        )
        amount *= clip_coefficient(norm, reference.clip_norm)
    return Site(item, draw.randrange(num_ranks), draw.random(), amount)


def is_telling(item: Recorded) -> bool:
    """Whether the tensor holds more than rounding errors of its module."""
    return item.scale.largest > NEGLIGIBLE["fp64"] * item.scale.module_largest


def _once(site: Site, values: Tensor, start: int) -> None:
    """Change the element if it lies in `values`, the flat elements of the tensor from `start` on."""
    index = site.element - start
    if 0 <= index < values.numel():
        values.detach().view(-1)[index] += site.amount


def _is_mine(site: Site, candidate: CandidateRank) -> bool:
    """Of a replicated tensor one rank's copy is changed; of a sharded one whoever holds the element."""
    return candidate.engine.policy.shards_optimizer or candidate.rank == site.rank


def _gradient(site: Site, candidate: CandidateRank) -> None:
    scale = candidate.engine.scale_gradients

    def spoiling(factor: float) -> None:
        scale(factor)
        for shard in candidate.engine.shards:
            if candidate.state.step == site.item.step - 1 and shard.name == site.item.name:
                _once(site, shard.gradient, shard.piece.start)

    if _is_mine(site, candidate):
        candidate.engine.scale_gradients = spoiling  # type: ignore[method-assign]


def _parameter(site: Site, candidate: CandidateRank) -> None:
    if site.item.step == 0:
        _spoil_parameter(site, candidate)
        return
    update = candidate.state.optimizer.step

    def spoiling(**arguments: Any) -> None:
        update(**arguments)
        if candidate.state.step == site.item.step - 1:
            _spoil_parameter(site, candidate)

    candidate.state.optimizer.step = spoiling  # type: ignore[method-assign]


def _spoil_parameter(site: Site, candidate: CandidateRank) -> None:
    name = site.item.name
    bucketed = False
    for memory in candidate.engine.memories:
        bucketed |= any(parameter.name == name for parameter in memory.bucket.parameters)
        for piece in memory.pieces():
            if piece.name == name and _is_mine(site, candidate):
                part = memory.master_shard[piece.offset : piece.offset + piece.stop - piece.start]
                _once(site, part, piece.start)
    if not bucketed and candidate.rank == site.rank:  # frozen and not sharded: whole on every rank
        _once(site, candidate.engine.model.get_parameter(name), 0)


def _activation(site: Site, candidate: CandidateRank) -> None:
    if candidate.rank != site.rank:
        return
    called, _, number = site.item.name.partition(" output ")
    name, _, call = called.partition(" call ")
    wanted_call, wanted_output = int(call or 1), int(number or 0)
    module: nn.Module = (
        candidate.engine.model if name == "(model)" else candidate.engine.model.get_submodule(name)
    )
    place, calls = (-1, -1), 0
    wanted = (site.item.step - 1, site.item.microbatch)
    micro_batch = candidate.batches.micro_batch

    def following(step: int, microbatch: int) -> Any:
        nonlocal place, calls
        place, calls = (step, microbatch), 0
        return micro_batch(step, microbatch)

    def spoiling(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if place == wanted and calls == wanted_call:
            tensor = list(tensors_in(output))[wanted_output].data  # behind autograd's back
            index = min(int(site.place * tensor.numel()), tensor.numel() - 1)
            tensor[np.unravel_index(index, tuple(tensor.shape))] += site.amount

    candidate.batches.micro_batch = following  # type: ignore[method-assign]
    module.register_forward_hook(spoiling)
