"""Which layers of a captured model are split over tensor-parallel ranks, and how: plain data, found from its graph.

A region is one axis (heads, channels) that runs from layers whose outputs have it to layers that sum over it, and
everything between runs on a part of it. `adapt/` carries regions out. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.graph.formula import Formula

# What computes with a weight: y = x·wᵀ (outputs, inputs), y = x·w (inputs, outputs), or rows that are looked up.
LayerKind = Literal["linear", "transposed", "table"]
ShapeKind = Literal["view", "expand", "split", "make"]


@dataclass(frozen=True)
class Part:
    """How an axis lies in a dim: `count` times after each other, its units of `width` elements side by side.

    The outputs of a fused query, key and value have 3 parts of `heads` units of the width of a head.
    """

    count: int
    width: int


@dataclass(frozen=True)
class Column:
    """A layer whose outputs are cut; layers with one `source` read the same tensor."""

    module: str
    part: Part
    source: int


@dataclass(frozen=True)
class Row:
    """A layer whose inputs are cut, and whose outputs are sums over the ranks."""

    module: str
    part: Part


@dataclass(frozen=True)
class OtherCut:
    """A parameter that is cut and needs no other call."""

    parameter: str
    dim: int
    part: Part


@dataclass(frozen=True)
class Size:
    """A size that code names or that a tensor has.

    Attributes:
        whole: on one device; None: it depends on the batch.
        is_cut: has the units of the axis as a factor.
    """

    whole: int | None
    is_cut: bool


@dataclass(frozen=True)
class ShapeCall:
    """A call in a module's own code that names sizes of a tensor that is cut.

    Attributes:
        module: whose forward makes it; "" for the root.
        kind: of the call.
        source: sizes of the tensor; () for one that is made.
        sizes: of the result of a view, of an expansion, of what is made; of each piece along the dim that is split.
        names: whether the code names a size that is cut; else it says -1.
    """

    module: str
    kind: ShapeKind
    source: tuple[Size, ...]
    sizes: tuple[Size, ...]
    names: bool


@dataclass(frozen=True)
class Region:
    """One axis that is cut.

    Attributes:
        units: its size: no more ranks than this can share it.
        heads: query heads of each unit, where tensors (batch, heads, ...) have it; 0 where none has.
        columns: layers that begin it.
        rows: layers that end it.
        others: parameters that are cut besides.
        summed: whole parameters that meet a part of the axis, so that ranks have parts of their gradients.
        shapes: calls that name sizes.
        forward_numel: elements that the ranks sum in a forward.
        backward_numel: in a backward.
        num_sums: all-reduces of a forward, of a backward.
    """

    units: int
    heads: int
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    others: tuple[OtherCut, ...]
    summed: tuple[str, ...]
    shapes: tuple[ShapeCall, ...]
    forward_numel: Formula
    backward_numel: Formula
    num_sums: tuple[int, int]


@dataclass(frozen=True)
class DerivedLayout:
    """What is split of a model.

    Attributes:
        regions: by axis.
        tables: embeddings whose rows are cut, looked up by the batch.
        heads: layers whose outputs are cut and gathered.
        whole: other layers with weights, and why every rank has them whole.
    """

    regions: tuple[Region, ...]
    tables: tuple[str, ...]
    heads: tuple[str, ...]
    whole: Mapping[str, str]

    def describe(self) -> list[str]:
        """Lines for people: each region once, with how many blocks repeat it, and what stays whole."""
        lines: dict[str, int] = {}
        for region in self.regions:
            text = (
                f"{_names([c.module for c in region.columns])} by columns -> "
                f"{_names([r.module for r in region.rows])} by rows: {region.units} "
                f"{'heads' if region.heads else 'channels'}, all-reduce {region.forward_numel} forward, "
                f"{region.backward_numel} backward"
            )
            lines[text] = lines.get(text, 0) + 1
        found = [text if count == 1 else f"{count} x {text}" for text, count in lines.items()]
        found += [f"{name}: rows of the vocabulary, all-reduce of what is looked up" for name in self.tables]
        found += [f"{name}: outputs cut, then gathered" for name in self.heads]
        return found + self.describe_whole()

    def describe_whole(self) -> list[str]:
        """A line for each kind of layer that every rank has whole, with the reason."""
        whole: dict[str, int] = {}
        for name, reason in self.whole.items():
            text = f"{_star(name)} stays whole: {reason}"
            whole[text] = whole.get(text, 0) + 1
        return [text if count == 1 else f"{count} x {text}" for text, count in whole.items()]


def _names(modules: list[str]) -> str:
    return ", ".join(dict.fromkeys(_star(name) for name in modules))


def _star(name: str) -> str:
    """A name with its numbers left open, so that those of repeated blocks are one."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
