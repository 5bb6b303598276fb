"""Silent faults of tensor parallelism: what every rank has whole is added, counted or summed as if it were a part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout.tensor_layout import TensorLayout
from meshwright.testing.faults.patching import Method, is_step, patch
from meshwright.testing.faults.silent import Place, SilentFault, Site
from meshwright.verification.candidate import CandidateRank


def _layout(candidate: CandidateRank) -> TensorLayout:
    layout = candidate.engine.tensor_layout
    assert layout is not None, "the need of these faults is tensor parallelism"
    return layout


def _place(candidate: CandidateRank, name: str, *tensors: str) -> Place:
    """A place whose site has the same rank everywhere: groups of samples differ by tp index."""
    return Place(name, tensors, tuple(candidate.engine.groups.all.ranks))


def _norms(candidate: CandidateRank) -> list[Place]:
    """Weights of normalisations, which every rank has whole."""
    cuts = _layout(candidate).cuts
    named = candidate.engine.model.named_parameters()
    return [
        _place(candidate, name, name)
        for name, _ in named
        if name.endswith("norm.weight") and name not in cuts
    ]


def _row_biases(candidate: CandidateRank) -> list[Place]:
    """Layers whose weight is cut by columns and whose bias is whole."""
    layout, found = _layout(candidate), []
    for name, _ in candidate.engine.model.named_parameters():
        module = name.removesuffix(".bias")
        cut = layout.cuts.get(f"{module}.weight")
        if module != name and cut is not None and cut.dim == 1:
            found.append(_place(candidate, module))
    return found


def _embeddings(candidate: CandidateRank) -> list[Place]:
    """Tables that are cut by rows."""
    cuts = _layout(candidate).cuts
    named = candidate.engine.model.named_modules()
    return [
        _place(candidate, name)
        for name, module in named
        if type(module).__name__ == "Embedding" and f"{name}.weight" in cuts
    ]


def _everywhere(candidate: CandidateRank) -> list[Place]:
    return [_place(candidate, "")]


def _norm_gradient(candidate: CandidateRank, site: Site, factor: Callable[[TensorLayout], float]) -> None:
    layout = _layout(candidate)

    def scaled(gradient: Tensor) -> Tensor:
        return gradient * factor(layout) if is_step(candidate, site) else gradient

    candidate.engine.model.get_parameter(site.place.name).register_hook(scaled)


def _not_summed(candidate: CandidateRank, site: Site) -> None:
    _norm_gradient(candidate, site, lambda layout: 2 * (layout.index + 1) / (layout.size * (layout.size + 1)))


def _summed_twice(candidate: CandidateRank, site: Site) -> None:
    _norm_gradient(candidate, site, lambda layout: float(layout.size))


def _counted_on_each_rank(candidate: CandidateRank, site: Site) -> None:
    layout = _layout(candidate)

    def make(counts: Method) -> Method:
        return lambda name: is_step(candidate, site) or counts(name)

    patch(layout, "counts", make)


def _bias_on_each_rank(candidate: CandidateRank, site: Site) -> None:
    model = candidate.engine.model
    module, bias = model.get_submodule(site.place.name), model.get_parameter(f"{site.place.name}.bias")
    size = _layout(candidate).size

    def make(forward: Method) -> Method:
        def added(x: Tensor) -> Tensor:
            y: Tensor = forward(x)
            return y + (size - 1) * bias if is_step(candidate, site) else y

        return added

    patch(module, "forward", make)


def _rows_off_by_one(candidate: CandidateRank, site: Site) -> None:
    module = candidate.engine.model.get_submodule(site.place.name)

    def make(forward: Method) -> Method:
        # Ids one lower: each rank's range of the vocabulary begins one row late.
        return lambda tokens: forward(tokens - 1 if is_step(candidate, site) else tokens)

    patch(module, "forward", make)


def _attentions(candidate: CandidateRank) -> list[Place]:
    """Value layers of attentions whose heads are cut: what runs after them drops weights of a rank's heads."""
    cuts = _layout(candidate).cuts
    named = candidate.engine.model.named_modules()
    return [_place(candidate, n) for n, _ in named if n.endswith(".value") and f"{n}.weight" in cuts]


def _masks_of_the_first_rank(candidate: CandidateRank, site: Site) -> None:
    region = _layout(candidate).region

    def make(forward: Method) -> Method:
        def cut(x: Tensor) -> Tensor:
            y: Tensor = forward(x)
            if is_step(candidate, site) and region.heads is not None:
                region.heads = (0, *region.heads[1:])
            return y

        return cut

    patch(candidate.engine.model.get_submodule(site.place.name), "forward", make)


def _uneven_rows(candidate: CandidateRank) -> list[Place]:
    """Layers with inputs in chunks of different sizes."""
    layout = _layout(candidate)
    return [
        _place(candidate, name.removesuffix(".weight"))
        for name, cut in layout.cuts.items()
        if cut.dim == 1 and len(set(cut.sizes)) > 1
    ]


def _chunk_truncated(candidate: CandidateRank, site: Site) -> None:
    layout, name = _layout(candidate), site.place.name
    kept = min(layout.cuts[f"{name}.weight"].sizes)

    def make(forward: Method) -> Method:
        def truncated(x: Tensor) -> Tensor:
            if is_step(candidate, site):
                x = torch.cat([x[..., :kept], torch.zeros_like(x[..., kept:])], -1)
            y: Tensor = forward(x)
            return y

        return truncated

    patch(candidate.engine.model.get_submodule(name), "forward", make)


def _fault(
    name: str,
    description: str,
    source: str,
    expected: tuple[str, ...],
    commit: tuple[
        Callable[[CandidateRank, Site], None],
        Callable[[CandidateRank], list[Place]],
    ],
    *needs: str,
) -> SilentFault:
    inject, places = commit
    return SilentFault(
        name=name,
        theme="tensor parallelism",
        description=description,
        source=source,
        expected=expected,
        inject=inject,
        needs=("tensor parallelism", *needs),
        places=places,
    )


FAULTS = (
    _fault(
        "norm_gradient_not_summed",
        "each tensor-parallel rank keeps its own part of the gradient of a normalisation's weight",
        "NVIDIA/Megatron-LM#1446",
        ("gradients",),
        (_not_summed, _norms),
    ),
    _fault(
        "norm_gradient_summed_twice",
        "a normalisation's gradient, whole on every tensor-parallel rank, is summed over them",
        "NVIDIA/Megatron-LM#1446",
        ("gradients",),
        (_summed_twice, _norms),
    ),
    _fault(
        "whole_weights_counted_on_each_rank",
        "weights that every tensor-parallel rank has whole enter the gradient norm once for each rank",
        "NVIDIA/Megatron-LM#7452",
        ("grad_norm",),
        (_counted_on_each_rank, _everywhere),
    ),
    _fault(
        "row_bias_on_each_rank",
        "the bias of a row split is added on each rank before the sum over ranks",
        "huggingface/text-generation-inference#1036",
        ("activations", "loss"),
        (_bias_on_each_rank, _row_biases),
    ),
    _fault(
        "vocabulary_rows_off_by_one",
        "each rank's range of the vocabulary begins one row late, so that tokens get their neighbour's row",
        "PaddlePaddle/PaddleFleet#104",
        ("activations", "loss"),
        (_rows_off_by_one, _embeddings),
    ),
    _fault(
        "masks_of_the_first_rank",
        "every tensor-parallel rank drops attention weights of its heads by the first rank's mask",
        "InternLM/InternLM#405",
        ("activations", "loss"),
        (_masks_of_the_first_rank, _attentions),
        "dropout",
    ),
    _fault(
        "uneven_chunk_truncated",
        "a rank whose chunk of the channels is larger than the smallest loses the rest of it",
        "huggingface/transformers#37051",
        ("activations", "loss"),
        (_chunk_truncated, _uneven_rows),
    ),
)
