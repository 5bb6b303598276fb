"""Silent faults of sequence parallelism: what belongs to a part of the tokens is taken for that of all or of others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshwright.comm.transports.base import Work
from meshwright.testing.faults.patching import Method, is_step, patch, then
from meshwright.testing.faults.places import anywhere, is_dropout, layout_of, row_biases, tensor_fault
from meshwright.testing.faults.silent import Place, Site
from meshwright.testing.faults.tensor import bias_on_each_rank
from meshwright.verification.rank import CandidateRank


def _partial(candidate: CandidateRank) -> list[Place]:
    """The one sum of all that has gradients of a rank's tokens alone."""
    return [anywhere(candidate, "", *sorted(layout_of(candidate).partial))]


def _partial_not_summed(candidate: CandidateRank, site: Site) -> None:
    group = candidate.engine.groups.tensor
    assert group is not None, "the need of these faults is tensor parallelism"
    assert group.transport is not None, "such a group has more than one rank"

    def make(issue: Method) -> Method:
        def kept(tensor: Tensor, *others: Any) -> Work:
            is_partial = group.log.events()[-1].cause == "partial gradients"
            if not (is_partial and is_step(candidate, site)):
                work: Work = issue(tensor, *others)
                return work
            own = tensor.clone()
            return then(issue(tensor, *others), lambda: tensor.copy_(own))

        return kept

    patch(group.transport, "all_reduce", make)


def _dropouts(candidate: CandidateRank) -> list[Place]:
    """Dropout layers inside of blocks; `verify` names one of them."""
    model = candidate.engine.model
    blocks = {name.rpartition(".")[0] for name in layout_of(candidate).partial}
    return [
        anywhere(candidate, name, name)
        for name, module in model.named_modules()
        if is_dropout(module) and any(block.startswith(f"{name.rpartition('.')[0]}.") for block in blocks)
    ]


def _tokens_of_the_first_rank(candidate: CandidateRank, site: Site) -> None:
    region = layout_of(candidate).region
    module: nn.Module = candidate.engine.model.get_submodule(site.place.name)

    def make(forward: Method) -> Method:
        def dropped(x: Tensor) -> Tensor:
            tokens = region.tokens
            if tokens is not None and is_step(candidate, site):
                dim, (_, ours, total) = tokens
                region.tokens = (dim, (0, ours, total))
            try:
                y: Tensor = forward(x)
            finally:
                region.tokens = tokens
            return y

        return dropped

    patch(module, "forward", make)


FAULTS = (
    tensor_fault(
        "partial_gradients_not_summed",
        "with sequence parallelism a rank keeps the gradient of its own tokens of what stands between the products",
        "EleutherAI/gpt-neox#1257",
        ("gradients",),
        (_partial_not_summed, _partial),
        "cut tokens",
    ),
    tensor_fault(
        "tokens_dropped_as_the_first",
        "with sequence parallelism each rank drops elements of its tokens by the mask of the first rank's tokens",
        "NVIDIA/Megatron-LM#1256",
        ("activations", "loss"),
        (_tokens_of_the_first_rank, _dropouts),
        "cut tokens",
        "dropout",
    ),
    tensor_fault(
        "row_bias_before_scatter",
        "with sequence parallelism the bias of a row split is added on each rank before the reduce-scatter",
        "awslabs/slapo#10",
        ("activations", "loss"),
        (bias_on_each_rank, row_biases),
        "cut tokens",
    ),
)
