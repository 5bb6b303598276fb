"""Faults that tests commit in candidate ranks; each takes the `CandidateRank` that `inject` gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.verification.rank import CandidateRank


def twice_on_rank_1(rank: CandidateRank) -> None:
    """One rank's gradient counts double; its loss stays right."""
    if rank.rank != 1:
        return
    plain = rank.loss

    def loss(model: Any, batch: Any) -> tuple[Tensor, Any]:
        total, count = plain(model, batch)
        return 2 * total - total.detach(), count

    rank.loss = loss


def all_twice(rank: CandidateRank) -> None:
    """Gradients are summed over dp and then multiplied by its size once more."""
    norm, scale = rank.engine.norm_squared, rank.engine.scale_gradients
    size = rank.engine.group.size
    rank.engine.norm_squared = lambda: norm() * size**2  # type: ignore[method-assign]
    rank.engine.scale_gradients = lambda factor: scale(factor * size)  # type: ignore[method-assign]


def no_reduction(rank: CandidateRank) -> None:
    """The bucket's all-reduce is never issued."""
    from meshwright.sharding import memory

    class Silent:
        """`comm.ops` without one operation."""

        all_gather = staticmethod(ops.all_gather)
        reduce_scatter = staticmethod(ops.reduce_scatter)

        @staticmethod
        def all_reduce(_tensor: Tensor, _group: ops.Group, *, cause: str) -> ops.Handle:
            return ops.DONE

    memory.ops = Silent  # type: ignore[assignment]


def skipped_last_micro_step(rank: CandidateRank) -> None:
    """Every rank stops one micro-step early."""
    rank.num_microbatches -= 1


def seed_per_rank(rank: CandidateRank) -> None:
    """Each rank shuffles by its own seed."""
    rank.batches.seed += rank.rank


def one_element_of(check: str, name: str, *, rank: int, step: int) -> Any:
    """Change one element by 1e-8 of its tensor's largest magnitude, on one rank in one step (from 1).

    Args:
        check: gradients, parameters or activations.
        name: of the parameter or module.
        rank: which rank.
        step: which step.
    """

    def inject(candidate: CandidateRank) -> None:
        if candidate.rank == rank:
            {"gradients": _gradient, "parameters": _parameter, "activations": _activation}[check](
                candidate, name, step
            )

    return inject


def _spoil(values: Tensor, largest: Tensor) -> None:
    values.view(-1)[values.numel() // 2] += 1e-8 * largest.abs().max()


def _gradient(candidate: CandidateRank, name: str, step: int) -> None:
    scale = candidate.engine.scale_gradients

    def spoiling(factor: float) -> None:
        scale(factor)
        if candidate.state.step == step - 1:
            for shard in candidate.engine.shards:
                if shard.name == name:
                    _spoil(shard.gradient, shard.gradient)

    candidate.engine.scale_gradients = spoiling  # type: ignore[method-assign]


def _parameter(candidate: CandidateRank, name: str, step: int) -> None:
    update = candidate.state.optimizer.step

    def spoiling(**arguments: Any) -> None:
        update(**arguments)
        if candidate.state.step == step - 1:
            for shard in candidate.engine.shards:
                if shard.name == name:
                    _spoil(shard.parameter.data, shard.parameter)

    candidate.state.optimizer.step = spoiling  # type: ignore[method-assign]


def _activation(candidate: CandidateRank, name: str, step: int) -> None:
    def spoiling(_module: Any, _args: Any, output: Tensor) -> Tensor | None:
        if candidate.state.step != step - 1:
            return None
        error = torch.zeros_like(output)
        _spoil(error, output.detach())
        return output + error

    candidate.engine.model.get_submodule(name).register_forward_hook(spoiling)
