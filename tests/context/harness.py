"""One call of attention over ranks against one device: output and all gradients, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.context.attend import attend
from meshwright.context.blocks import Attention, positions_of
from meshwright.context.masks import AttentionMask
from meshwright.layout.sequence import CpKind, SequenceCut, cut_sequence

BATCH, WIDTH = 2, 4
DOCUMENT_ENDS = ((3, 9, 10), (5, 14))
PADDED = (3, 0)


def masks(length: int) -> dict[str, AttentionMask]:
    """One of each kind. Documents cross borders of slices; the first sample's last keys are padding."""
    ends = [torch.tensor([end for end in own if end < length]) for own in DOCUMENT_ENDS]
    documents = torch.stack([torch.bucketize(torch.arange(length), own, right=True) for own in ends])
    valid = torch.stack([torch.arange(length) < length - number for number in PADDED])
    return {
        "full": AttentionMask(),
        "causal": AttentionMask(is_causal=True),
        "window": AttentionMask(is_causal=True, window=4),
        "both sides": AttentionMask(window=3),
        "prefix": AttentionMask(is_causal=True, prefix=6),
        "documents": AttentionMask(is_causal=True, documents=documents),
        "padding": AttentionMask(valid=valid),
        "all of them": AttentionMask(is_causal=True, window=6, documents=documents, valid=valid.flip(1)),
    }


@dataclass(frozen=True)
class Case:
    """One call."""

    kind: CpKind
    mask: str
    heads: tuple[int, int]
    length: int
    zigzag: bool = True
    dropout: bool = False
    value_width: int = WIDTH


def tensors(case: Case) -> list[Tensor]:
    """Query, key, value and the output's gradient of the whole sequence."""
    generator = torch.Generator().manual_seed(case.length)
    query, kv = case.heads
    shapes = [(query, WIDTH), (kv, WIDTH), (kv, case.value_width), (query, case.value_width)]
    return [
        torch.randn(BATCH, heads, case.length, width, generator=generator, dtype=torch.float64)
        for heads, width in shapes
    ]


def keep_weights(case: Case):
    """Dropout as a table of the whole sequence, whose part a block takes."""
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, case.heads[0], case.length, case.length)
    table = (torch.rand(shape, generator=generator) < 0.7).double() / 0.7
    last = case.length - 1

    def keep(heads: slice, queries: Tensor, keys: Tensor) -> Tensor:
        return table[:, heads][:, :, queries.clamp(max=last)[:, None], keys.clamp(max=last)]

    return table, (keep if case.dropout else None)


def expected(case: Case) -> list[Tensor]:
    """Output and gradients of query, key and value on one device, with the mask written out."""
    query, key, value, grad = tensors(case)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    group = case.heads[0] // case.heads[1]
    everywhere = torch.arange(case.length)
    visible = masks(case.length)[case.mask].visible(everywhere, everywhere)
    scores = query @ key.repeat_interleave(group, 1).mT / WIDTH**0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    if case.dropout:
        weights = weights * keep_weights(case)[0]
    out = weights @ value.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def local(x: Tensor, cut: SequenceCut, index: int) -> Tensor:
    """This rank's positions, zeros where they are padding."""
    shape = (*x.shape[:2], cut.padded - cut.length, x.shape[3])
    return torch.cat([x, x.new_zeros(shape)], 2)[:, :, positions_of(cut.runs(index), x.device)]


def make_cut(case: Case, size: int) -> SequenceCut:
    return cut_sequence(case.length, size, case.kind, zigzag=case.zigzag)


def found(mesh, case: Case) -> list[Tensor]:
    """The same over ranks, this rank's part."""
    group = mesh.group("dp")
    cut = make_cut(case, group.size)
    *inputs, grad = (local(x, cut, group.index) for x in tensors(case))
    leaves = [x.requires_grad_() for x in inputs]
    call = Attention(masks(case.length)[case.mask], case.length, WIDTH**-0.5, keep_weights(case)[1])
    out = attend(*leaves, call=call, cut=cut, group=group, kind=case.kind)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def worst_error(mesh, case: Case) -> float:
    """Largest difference of this rank's valid positions from one device, relative to the largest value."""
    cut, index = make_cut(case, mesh.group("dp").size), mesh.group("dp").index
    is_valid = positions_of(cut.runs(index), torch.device("cpu")) < cut.length
    worst = 0.0
    for ours, whole in zip(found(mesh, case), expected(case), strict=True):
        assert torch.isfinite(ours).all()
        difference = (ours - local(whole, cut, index))[:, :, is_valid]
        if difference.numel():
            worst = max(worst, float(difference.abs().max() / whole.abs().max()))
    return worst


def worst_errors(mesh, cases: list[Case]) -> list[float]:
    """One call a case, all on the same ranks."""
    return [worst_error(mesh, case) for case in cases]
