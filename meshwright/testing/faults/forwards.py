"""Silent faults of the forward: masks, dropout, batch statistics, buffers, ties, modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.adapt.dropout import stateless
from meshwright.comm.rng import MicroStep
from meshwright.testing.faults.patching import Method, after, before, is_step, patch
from meshwright.testing.faults.places import (
    float_buffers,
    is_attention,
    is_batch_norm,
    is_dropout,
    linears,
    modules_where,
    statistics,
    tied_parameters,
)
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.verification.rank import CandidateRank


def _module(candidate: CandidateRank, site: Site) -> nn.Module:
    return candidate.engine.model.get_submodule(site.place.name)


class _WithoutMask(TorchFunctionMode):
    """Attention inside sees all positions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["is_causal"] = False
        return func(*args, **kwargs)


def _causal_mask_dropped(candidate: CandidateRank, site: Site) -> None:
    def make(forward: Method) -> Method:
        def unmasked(*args: Any, **kwargs: Any) -> Any:
            with _WithoutMask():
                return forward(*args, **kwargs)

        return unmasked

    patch(_module(candidate, site), "forward", make)


# Dropout.


def _change_masks(candidate: CandidateRank, change: Callable[[MicroStep], MicroStep]) -> None:
    """Draw masks for the place that `change` makes of this rank's place."""
    geometry, seed = candidate.batches.geometry, candidate.batches.seed
    total = geometry.global_batch // geometry.num_microbatches

    def enter(step: int, microbatch: int) -> AbstractContextManager[None]:
        rows = geometry.rank_range(step, microbatch)
        first = rows.start - step * geometry.global_batch
        return stateless(change(MicroStep(seed, step, first, len(rows), total)))

    candidate.state.randomness = enter


def _masks_alike(candidate: CandidateRank, _site: Site) -> None:
    def change(place: MicroStep) -> MicroStep:
        return replace(place, first_row=place.first_row // place.total_rows * place.total_rows)

    _change_masks(candidate, change)


def _mask_seed_by_rank(candidate: CandidateRank, _site: Site) -> None:
    _change_masks(candidate, lambda place: replace(place, seed=place.seed + candidate.rank))


def _masks_repeat(candidate: CandidateRank, _site: Site) -> None:
    _change_masks(candidate, lambda place: replace(place, step=0))


def _dropout_off(candidate: CandidateRank, site: Site) -> None:
    _module(candidate, site).eval()


def _evaluation_mode(candidate: CandidateRank, site: Site) -> None:
    def leave() -> None:
        if candidate.state.step >= site.step - 1:
            candidate.engine.model.eval()

    before(candidate.engine, "start_step", leave)


# State of modules.


def _local_statistics(candidate: CandidateRank, site: Site) -> None:
    module = _module(candidate, site)
    patch(module, "forward", lambda _synchronised: lambda x: type(module).forward(module, x))


def _statistics_twice(candidate: CandidateRank, site: Site) -> None:
    module = cast(nn.BatchNorm1d, _module(candidate, site))
    assert module.momentum is not None, "a cumulative average has no weight to repeat"
    keep = 1 - module.momentum

    def make(forward: Method) -> Method:
        def again(x: Tensor) -> Tensor:
            old = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
            y = forward(x)
            for name, buffer in module.named_buffers(recurse=False):
                moved = buffer - old[name]
                buffer.add_(moved if name == "num_batches_tracked" else keep * moved)
            return y

        return again

    patch(module, "forward", make)


def _statistics_not_updated(candidate: CandidateRank, site: Site) -> None:
    module = _module(candidate, site)
    old: dict[str, Tensor] = {}

    def remember() -> None:
        old.update({name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)})

    def restore() -> None:
        if is_step(candidate, site) and candidate.rank == site.rank:
            for name, buffer in module.named_buffers(recurse=False):
                buffer.copy_(old[name])

    before(candidate.engine, "start_step", remember)
    after(candidate.engine, "finish_step", restore)


def _buffer_lost(candidate: CandidateRank, site: Site) -> None:
    def lose() -> None:
        if is_step(candidate, site) and candidate.rank == site.rank:
            candidate.engine.model.get_buffer(site.place.name).zero_()

    after(candidate.engine, "finish_step", lose)


# Weights.


def _last_use(candidate: CandidateRank, site: Site) -> nn.Linear:
    name = site.place.name.rpartition(".")[0]
    return cast(nn.Linear, candidate.engine.model.get_submodule(name))


def _tie_broken(candidate: CandidateRank, site: Site) -> None:
    module = _last_use(candidate, site)
    module.weight = nn.Parameter(module.weight.detach().clone())
    patch(module, "forward", lambda _lending: lambda x: F.linear(x, module.weight, module.bias))


def _tie_gradient_of_one_use(candidate: CandidateRank, site: Site) -> None:
    module = _last_use(candidate, site)
    patch(module, "forward", lambda _lending: lambda x: F.linear(x, module.weight.detach(), module.bias))


def _input_changed_in_place(candidate: CandidateRank, site: Site) -> None:
    def make(forward: Method) -> Method:
        def changing(x: Tensor) -> Tensor:
            saved = x.clone()
            y = forward(saved)
            with torch.no_grad():
                saved.data.mul_(1.5)  # through `.data`: autograd's check of versions does not see it
            return y

        return changing

    patch(_module(candidate, site), "forward", make)


FAULTS = (
    SilentFault(
        name="causal_mask_dropped",
        theme="attention mask",
        description="one attention sees later positions too",
        source="keras-team/keras#23038",
        expected=("activations",),
        inject=_causal_mask_dropped,
        needs=("causal attention",),
        places=modules_where(is_attention),
    ),
    SilentFault(
        name="masks_alike",
        theme="dropout",
        description="all ranks drop the same places of their samples",
        source="huggingface/transformers#31412",
        expected=("activations",),
        inject=_masks_alike,
        needs=("2 ranks", "dropout"),
    ),
    SilentFault(
        name="mask_seed_by_rank",
        theme="dropout",
        description="each rank draws its dropout masks by a seed of its own",
        source="NVIDIA/Megatron-LM#1256",
        expected=("activations",),
        inject=_mask_seed_by_rank,
        needs=("2 ranks", "dropout"),
    ),
    SilentFault(
        name="masks_repeat",
        theme="dropout",
        description="every step drops what the first one dropped",
        source="pytorch/pytorch#189285",
        expected=("activations",),
        inject=_masks_repeat,
        needs=("dropout",),
    ),
    SilentFault(
        name="dropout_off",
        theme="dropout",
        description="one layer drops nothing in training",
        source="NVIDIA/Megatron-LM#411",
        expected=("activations",),
        inject=_dropout_off,
        needs=("dropout",),
        places=modules_where(is_dropout),
    ),
    SilentFault(
        name="evaluation_mode",
        theme="evaluation mode",
        description="after an evaluation the model stays in evaluation mode",
        source="huggingface/lerobot#3668",
        expected=("activations",),
        inject=_evaluation_mode,
        needs=("modes differ",),
        first_step=2,
    ),
    SilentFault(
        name="local_statistics",
        theme="batch statistics",
        description="one batch normalisation takes the statistics of its own rank's samples",
        source="LibreYOLO/libreyolo#531",
        expected=("activations",),
        inject=_local_statistics,
        needs=("2 ranks", "batch normalisation"),
        places=modules_where(is_batch_norm),
    ),
    SilentFault(
        name="statistics_twice",
        theme="batch statistics",
        description="running statistics of one layer move twice a forward, as when backward recomputes it",
        source="pytorch/pytorch#96136",
        expected=("buffers",),
        inject=_statistics_twice,
        needs=("batch normalisation",),
        places=statistics,
    ),
    SilentFault(
        name="statistics_not_updated",
        theme="buffers",
        description="in one step one rank does not move the running statistics of one layer",
        source="pytorch/pytorch#63916",
        expected=("buffers",),
        inject=_statistics_not_updated,
        needs=("batch normalisation",),
        places=statistics,
    ),
    SilentFault(
        name="buffer_lost",
        theme="buffers",
        description="after some step a buffer of one rank is zero",
        source="hiyouga/LlamaFactory#10820",
        expected=("buffers",),
        inject=_buffer_lost,
        needs=("buffers",),
        places=float_buffers,
    ),
    SilentFault(
        name="tie_broken",
        theme="ties",
        description="the last use of a tied weight gets a copy of its own, and the copies drift apart",
        source="NVIDIA/Megatron-LM#656",
        expected=("ties",),
        inject=_tie_broken,
        needs=("ties", "whole weights"),
        places=tied_parameters,
    ),
    SilentFault(
        name="tie_gradient_of_one_use",
        theme="ties",
        description="the gradient of a tied weight lacks its last use",
        source="NVIDIA/Megatron-LM#844",
        expected=("gradients",),
        inject=_tie_gradient_of_one_use,
        needs=("ties",),
        places=tied_parameters,
    ),
    SilentFault(
        name="input_changed_in_place",
        theme="autograd",
        description="what backward needs of one layer is overwritten after its forward",
        source="huggingface/diffusers#14265",
        expected=("gradients",),
        inject=_input_changed_in_place,
        places=linears,
    ),
)
