"""Mesh arithmetic: which rank has which coordinates. No torch, no communication.

Ranks are numbered model-parallel first: the last axis varies fastest. With pp=1, dp=4, tp=2 the
eight ranks have tp index 0 1 0 1 0 1 0 1 and dp index 0 0 1 1 2 2 3 3, so the ranks of one tensor-parallel
group are neighbours and share the fastest link of a machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError

# Slowest to fastest. `ep` is a view over dp x cp, not a factor of the world size.
AXIS_NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# What each axis of a mesh cuts in an activation of shape (layer, batch, sequence, channel).
AXIS_CUTS = {"pp": "layer", "dp": "batch", "cp": "sequence", "tp": "channel"}
# Axes over which a gradient of a replicated parameter is summed.
DATA_AXES = ("dp_replicate", "dp_shard", "cp")


@dataclass(frozen=True)
class Axis:
    """One named axis of the mesh and its size in ranks."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if self.name not in AXIS_NAMES:
            raise PlanError("E200", f"unknown mesh axis {self.name!r}; axes are {', '.join(AXIS_NAMES)}")
        if self.size < 1:
            raise PlanError("E200", f"{self.name}={self.size}: an axis has at least 1 rank")


@dataclass(frozen=True)
class MeshSpec:
    """A mesh of ranks as numbers: an ordered tuple of axes, slowest first.

    `MeshSpec.of(dp_shard=4, tp=2)` fills the axes that are not named with size 1.

    Attributes:
        axes: all of them.
        teams: of a mesh that is no product, the ranks of each place along pp: `of_teams`. `dp_shard` then has the size
            of the largest, and only pp and dp_shard are more than 1.
    """

    axes: tuple[Axis, ...]
    teams: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        names = tuple(axis.name for axis in self.axes)
        assert names == AXIS_NAMES, f"a MeshSpec names every axis in order {AXIS_NAMES}, got {names}"

    @classmethod
    def of(cls, **sizes: int) -> MeshSpec:
        """Build a mesh from axis sizes; axes that are not named have size 1."""
        unknown = sorted(set(sizes) - set(AXIS_NAMES))
        if unknown:
            raise PlanError("E200", f"unknown mesh axis {unknown[0]!r}; axes are {', '.join(AXIS_NAMES)}")
        return cls(tuple(Axis(name, sizes.get(name, 1)) for name in AXIS_NAMES))

    @classmethod
    def of_teams(cls, teams: Sequence[Sequence[int]]) -> MeshSpec:
        """Build a mesh from the ranks of each place along pp: [[0], [1, 2, 3]].

        Where they are what `of(pp=..., dp_shard=...)` gives too, it is that mesh.

        Raises:
            PlanError: E231 unless each rank from 0 on is in one place, and each place has one.
        """
        held = sorted(rank for team in teams for rank in team)
        if held != list(range(len(held))) or not teams or not all(teams):
            raise PlanError(
                "E231",
                f"stages are on ranks {[list(team) for team in teams]}; each rank from 0 on belongs to one place of "
                "the pipeline, and each stage has a rank.",
            )
        ranks = tuple(tuple(sorted(team)) for team in teams)
        product = cls.of(pp=len(ranks), dp_shard=max(map(len, ranks)))
        alike = product.world_size == len(held) and all(
            product.peers(team[0], ("dp_shard",)) == team for team in ranks
        )
        return product if alike and list(itertools.chain(*ranks)) == held else cls(product.axes, ranks)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all axis sizes, or all ranks of the teams."""
        if self.teams:
            return sum(map(len, self.teams))
        return math.prod(axis.size for axis in self.axes)

    def size(self, *names: str) -> int:
        """Number of ranks along the named axes together."""
        sizes = {axis.name: axis.size for axis in self.axes}
        return math.prod(sizes[name] for name in names)

    @property
    def dp(self) -> int:
        """Data-parallel size: dp_replicate x dp_shard."""
        return self.size("dp_replicate", "dp_shard")

    def sizes(self) -> dict[str, int]:
        """The contract's view of a mesh: `{"pp", "dp", "cp", "tp"}` to size."""
        return {"pp": self.size("pp"), "dp": self.dp, "cp": self.size("cp"), "tp": self.size("tp")}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name to index of `rank` along it."""
        if not 0 <= rank < self.world_size:
            raise PlanError("E200", f"rank {rank} is outside the mesh of {self.world_size} ranks")
        if self.teams:
            place = next(i for i, team in enumerate(self.teams) if rank in team)
            here = {"pp": place, "dp_shard": self.teams[place].index(rank)}
            return {axis.name: here.get(axis.name, 0) for axis in self.axes}
        result = {}
        for axis in reversed(self.axes):
            rank, result[axis.name] = divmod(rank, axis.size)
        return {axis.name: result[axis.name] for axis in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`; axes left out count as index 0. Inverse of `coordinates`."""
        if self.teams:
            return self.teams[coordinates.get("pp", 0)][coordinates.get("dp_shard", 0)]
        rank = 0
        for axis in self.axes:
            index = coordinates.get(axis.name, 0)
            if not 0 <= index < axis.size:
                raise PlanError("E200", f"{axis.name} index {index} is outside 0..{axis.size - 1}")
            rank = rank * axis.size + index
        return rank

    def peers(self, rank: int, names: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along the axes `names`, ascending, `rank` included.

        Along pp, teams are peers as wholes.
        """
        here = self.coordinates(rank)
        if self.teams:
            team = self.teams[here["pp"]] if "dp_shard" in names else (rank,)
            return tuple(range(self.world_size)) if "pp" in names else team
        varied = [axis for axis in self.axes if axis.name in names]
        ranks = []
        for indices in itertools.product(*(range(axis.size) for axis in varied)):
            ranks.append(self.rank(here | dict(zip((axis.name for axis in varied), indices, strict=True))))
        return tuple(sorted(ranks))

    def groups(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """All peer groups along `names`, in order of their lowest rank. O(world) work, no O(world²) state."""
        if self.teams:
            return list(dict.fromkeys(self.peers(rank, names) for rank in range(self.world_size)))
        lowest = [r for r in range(self.world_size) if all(self.coordinates(r)[n] == 0 for n in names)]
        return [self.peers(rank, names) for rank in lowest]

    def index(self, rank: int, names: Sequence[str]) -> int:
        """Position of `rank` among its peers along `names`."""
        here, index = self.coordinates(rank), 0
        if self.teams:
            return self.peers(rank, names).index(rank)
        for axis in self.axes:
            if axis.name in names:
                index = index * axis.size + here[axis.name]
        return index
