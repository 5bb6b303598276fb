"""Whole matrices where each tensor-parallel rank has a part: gathered to an owner, changed there, handed back in parts.

Owns the exchange for rules such as Muon's. Matrices go in rounds of as many as there are ranks: in a round each rank
gets the parts of one matrix by an all-to-all, and by a second one its part of each changed matrix. Parts of uneven
chunks travel padded to the largest of the round. In a round of tp ranks, where the largest part has n elements, a rank
sends 2 · (tp - 1) · n. Must not know optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm import ops
from meshwright.comm.ops import Group
from meshwright.layout.layout import Cut
from meshwright.sharding.engine import ShardingEngine


@dataclass(frozen=True)
class CutMatrices:
    """Parameters of which each rank of `group` has a part.

    Attributes:
        group: the tensor-parallel ranks.
        cuts: by parameter (its memory on this rank, as the optimizer sees it).
    """

    group: Group
    cuts: Mapping[Tensor, Cut]

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Of the matrix of which `parameter` is a part, or is all."""
        shape = list(parameter.shape)
        if parameter in self.cuts:
            shape[self.cuts[parameter].dim] = self.cuts[parameter].extent
        return tuple(shape)

    def num_rounds(self, num_matrices: int) -> int:
        """Rounds, of two all-to-alls each, for so many cut matrices."""
        return -(-num_matrices // self.group.size)

    def changed(
        self, parts: Sequence[tuple[Tensor, Tensor]], change: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """This rank's parts of `change` of whole matrices.

        Args:
            parts: (parameter, this rank's part of a matrix that is cut as the parameter is); the same on every rank.
            change: of a whole matrix; keeps the shape.
        """
        results: list[Tensor | None] = [None] * len(parts)
        cut = [number for number, (parameter, _) in enumerate(parts) if parameter in self.cuts]
        for number, (parameter, part) in enumerate(parts):
            if parameter not in self.cuts:
                results[number] = change(part)
        for first in range(0, len(cut), self.group.size):
            members = cut[first : first + self.group.size]
            for number, result in zip(members, self._round([parts[i] for i in members], change), strict=True):
                results[number] = result
        return [result for result in results if result is not None]

    def _round(
        self, parts: Sequence[tuple[Tensor, Tensor]], change: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        size, index = self.group.size, self.group.index
        largest = max(math.prod(self._shape(p, rank)) for p, _ in parts for rank in range(size))
        given, taken = (parts[0][1].new_zeros(size, largest) for _ in range(2))
        for owner, (_, part) in enumerate(parts):
            given[owner, : part.numel()] = part.reshape(-1)
        ops.all_to_all(taken.view(-1), given.view(-1), self.group, cause="parts of matrices").wait()
        if index < len(parts):
            self._change(parts[index][0], taken, change)
        ops.all_to_all(given.view(-1), taken.view(-1), self.group, cause="changed matrices").wait()
        return [
            given[owner, : part.numel()].view(part.shape).clone() for owner, (_, part) in enumerate(parts)
        ]

    def _change(self, parameter: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Put the parts of one matrix together, change it, and lay its parts where they were."""
        cut = self.cuts[parameter]
        whole = rows.new_empty(self.whole_shape(parameter))
        for rank, (places, shape) in enumerate(self._places(parameter)):
            whole.index_copy_(cut.dim, places, rows[rank, : math.prod(shape)].view(shape))
        whole = change(whole)
        for rank, (places, shape) in enumerate(self._places(parameter)):
            rows[rank, : math.prod(shape)] = whole.index_select(cut.dim, places).reshape(-1)

    def _places(self, parameter: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
        """For each rank the indices of the cut dim that it has, and the shape of its part."""
        found = []
        for rank in range(self.group.size):
            ranges = [torch.arange(*chunk) for chunk in self.cuts[parameter].chunks(rank)]
            found.append((torch.cat(ranges).to(parameter.device), self._shape(parameter, rank)))
        return found

    def _shape(self, parameter: Tensor, rank: int) -> tuple[int, ...]:
        cut, shape = self.cuts[parameter], list(parameter.shape)
        shape[cut.dim] = cut.sizes[rank] * cut.parts
        return tuple(shape)


def cut_matrices(engine: ShardingEngine) -> CutMatrices | None:
    """The hidden matrices of which this rank's optimizer has parts; None without tp."""
    layout, group = engine.tensor_layout, engine.groups.model
    if layout is None or group is None:
        return None
    found: dict[Tensor, Cut] = {
        shard.parameter: layout.cuts[shard.name]
        for shard in engine.shards
        if shard.is_hidden and shard.name in layout.cuts
    }
    return CutMatrices(group, found)
