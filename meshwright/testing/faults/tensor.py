"""Silent faults of tensor parallelism: what every rank has whole is added, counted or summed as if it were a part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout.tensor_layout import TensorLayout
from meshwright.testing.faults.patching import Method, is_step, patch, with_weight
from meshwright.testing.faults.places import (
    anywhere,
    layout_of,
    memory_of,
    row_biases,
    tensor_fault,
)
from meshwright.testing.faults.silent import Place, Site
from meshwright.verification.rank import CandidateRank


def _norms(candidate: CandidateRank) -> list[Place]:
    """Weights of normalisations, which every rank has whole."""
    cuts = layout_of(candidate).cuts
    named = candidate.engine.model.named_parameters()
    return [
        anywhere(candidate, name, name)
        for name, _ in named
        if name.endswith("norm.weight") and name not in cuts
    ]


def _embeddings(candidate: CandidateRank) -> list[Place]:
    """Tables that are cut by rows."""
    cuts = layout_of(candidate).cuts
    named = candidate.engine.model.named_modules()
    return [
        anywhere(candidate, name)
        for name, module in named
        if type(module).__name__ == "Embedding" and f"{name}.weight" in cuts
    ]


def _everywhere(candidate: CandidateRank) -> list[Place]:
    return [anywhere(candidate, "")]


def _norm_gradient(candidate: CandidateRank, site: Site, factor: Callable[[TensorLayout], float]) -> None:
    layout = layout_of(candidate)

    def scaled(gradient: Tensor) -> Tensor:
        return gradient * factor(layout) if is_step(candidate, site) else gradient

    candidate.engine.model.get_parameter(site.place.name).register_hook(scaled)


def _not_summed(candidate: CandidateRank, site: Site) -> None:
    _norm_gradient(candidate, site, lambda layout: 2 * (layout.index + 1) / (layout.size * (layout.size + 1)))


def _summed_twice(candidate: CandidateRank, site: Site) -> None:
    _norm_gradient(candidate, site, lambda layout: float(layout.size))


def _counted_on_each_rank(candidate: CandidateRank, site: Site) -> None:
    layout = layout_of(candidate)

    def make(counts: Method) -> Method:
        return lambda name: is_step(candidate, site) or counts(name)

    patch(layout, "counts", make)


def bias_on_each_rank(candidate: CandidateRank, site: Site) -> None:
    """Add the bias of a row split once more for each further rank."""
    model = candidate.engine.model
    module, bias = model.get_submodule(site.place.name), model.get_parameter(f"{site.place.name}.bias")
    size = layout_of(candidate).size

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
    cuts = layout_of(candidate).cuts
    named = candidate.engine.model.named_modules()
    return [anywhere(candidate, n) for n, _ in named if n.endswith(".value") and f"{n}.weight" in cuts]


def _masks_of_the_first_rank(candidate: CandidateRank, site: Site) -> None:
    region = layout_of(candidate).region

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
    layout = layout_of(candidate)
    return [
        anywhere(candidate, name.removesuffix(".weight"))
        for name, cut in layout.cuts.items()
        if cut.dim == 1 and len(set(cut.sizes)) > 1
    ]


def _chunk_truncated(candidate: CandidateRank, site: Site) -> None:
    layout, name = layout_of(candidate), site.place.name
    kept = min(layout.cuts[f"{name}.weight"].sizes)

    def make(forward: Method) -> Method:
        def truncated(x: Tensor) -> Tensor:
            if is_step(candidate, site):
                x = torch.cat([x[..., :kept], torch.zeros_like(x[..., kept:])], -1)
            y: Tensor = forward(x)
            return y

        return truncated

    patch(candidate.engine.model.get_submodule(name), "forward", make)


def _repeated_heads(candidate: CandidateRank) -> list[Place]:
    """Layers of key/value heads that are fewer than ranks."""
    return [anywhere(candidate, name, name) for name in layout_of(candidate).repeated]


def _heads_of_neighbours(candidate: CandidateRank, site: Site) -> None:
    name = site.place.name
    width = layout_of(candidate).repeated[name].width
    module = candidate.engine.model.get_submodule(name)
    with_weight(module, lambda weight: weight.roll(width, 0), lambda: is_step(candidate, site))


def _cut_parameters(candidate: CandidateRank) -> list[Place]:
    cuts = layout_of(candidate).cuts
    named = candidate.engine.model.named_parameters()
    return [anywhere(candidate, name, name) for name, _ in named if name in cuts]


def _initialised_alike(candidate: CandidateRank, site: Site) -> None:
    name = site.place.name
    part = candidate.engine.model.get_parameter(name)
    memory = memory_of(candidate, name)
    # Ranks of one tensor-parallel index draw alike, so that only what tensor parallelism cuts is wrong.
    drawn = 0.02 * torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).flatten()
    for piece in memory.pieces():
        if piece.name == name:
            values = memory.weight_shard[piece.offset : piece.offset + piece.stop - piece.start]
            values.copy_(drawn[piece.start : piece.stop])


FAULTS = (
    tensor_fault(
        "norm_gradient_not_summed",
        "each tensor-parallel rank keeps its own part of the gradient of a normalisation's weight",
        "NVIDIA/Megatron-LM#1446",
        ("gradients",),
        (_not_summed, _norms),
    ),
    tensor_fault(
        "norm_gradient_summed_twice",
        "a normalisation's gradient, whole on every tensor-parallel rank, is summed over them",
        "NVIDIA/Megatron-LM#1446",
        ("gradients",),
        (_summed_twice, _norms),
    ),
    tensor_fault(
        "whole_weights_counted_on_each_rank",
        "weights that every tensor-parallel rank has whole enter the gradient norm once for each rank",
        "NVIDIA/Megatron-LM#7452",
        ("grad_norm",),
        (_counted_on_each_rank, _everywhere),
    ),
    tensor_fault(
        "row_bias_on_each_rank",
        "the bias of a row split is added on each rank before the sum over ranks",
        "huggingface/text-generation-inference#1036",
        ("activations", "loss"),
        (bias_on_each_rank, row_biases),
    ),
    tensor_fault(
        "vocabulary_rows_off_by_one",
        "each rank's range of the vocabulary begins one row late, so that tokens get their neighbour's row",
        "PaddlePaddle/PaddleFleet#104",
        ("activations", "loss"),
        (_rows_off_by_one, _embeddings),
    ),
    tensor_fault(
        "masks_of_the_first_rank",
        "every tensor-parallel rank drops attention weights of its heads by the first rank's mask",
        "InternLM/InternLM#405",
        ("activations", "loss"),
        (_masks_of_the_first_rank, _attentions),
        "dropout",
    ),
    tensor_fault(
        "uneven_chunk_truncated",
        "a rank whose chunk of the channels is larger than the smallest loses the rest of it",
        "huggingface/transformers#37051",
        ("activations", "loss"),
        (_chunk_truncated, _uneven_rows),
    ),
    tensor_fault(
        "heads_of_neighbours",
        "where key/value heads are fewer than ranks, a rank's query heads attend with their neighbour's",
        "huggingface/transformers#48307",
        ("activations", "loss"),
        (_heads_of_neighbours, _repeated_heads),
        "repeated heads",
    ),
    tensor_fault(
        "parts_initialised_alike",
        "each tensor-parallel rank draws its part of a weight from one seed, so that all parts are alike",
        "modelscope/ms-swift#7944",
        ("parameters",),
        (_initialised_alike, _cut_parameters),
    ),
)
