"""Composing meshes: which rank has which coordinates, which groups share a node, and what a factorisation costs.

A job on N ranks is a factorisation N = tp x cp x dp x pp. The axis that varies fastest has neighbours as its groups,
and neighbours share a node's fast links. Everything here is arithmetic on paper; prices are the cost model's.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.lessons.pictures import bars
from meshwright.mesh import AXIS_CUTS, MeshSpec
from meshwright.planner.plans import describe
from meshwright.planner.request import make_request
from meshwright.planner.search import BEST_ONLY, search
from meshwright.planner.space import meshes
from meshwright.presets import find_model
from meshwright.presets.calibration import calibration_of
from meshwright.simulation.collectives import collective_seconds
from meshwright.simulation.job import Workload
from meshwright.simulation.reading import parse_cluster

_MODEL = "llama-3.1-8b"


def main() -> None:
    """Run the lesson."""
    mesh = MeshSpec.of(pp=2, dp_shard=2, tp=2)
    print("1. Eight ranks as pp 2 x dp 2 x tp 2. The last axis varies fastest: rank = (pp·2 + dp)·2 + tp.\n")
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        assert mesh.rank(at) == rank
        print(f"   rank {rank}: pp {at['pp']} dp {at['dp_shard']} tp {at['tp']}")
    print("\n2. Groups: ranks that differ along one axis only. Each rank is in one group of each axis.\n")
    for name in ("tp", "dp_shard", "pp"):
        cut = AXIS_CUTS[name.removesuffix("_shard")]
        print(f"   {name:9} cuts {cut:8} {mesh.groups((name,))}")
    print("\n3. What a group of 8 pays for an all-reduce of 64 MiB, by the distance of its members.\n")
    print(bars(distances(), unit="ms", digits=2))
    print("\n4. All factorisations of 16 ranks for one job, and the fastest on each that fits.\n")
    found = factorisations()
    for line in found:
        print(f"   {line}")


def distances() -> dict[str, float]:
    """Milliseconds by stride, on nodes of eight A100."""
    cluster = parse_cluster("64xa100")
    fit = calibration_of(cluster.machine)
    return {
        f"{stride} apart": 1e3
        * collective_seconds(cluster, fit, 64 * 2**20, ranks=8, stride=stride, passes=2)
        for stride in (1, 2, 4, 8)
    }


def factorisations() -> list[str]:
    """The count of meshes, the best plan on some of them, and what fixing one axis costs."""
    request = make_request(Workload(find_model(_MODEL), 8192, 64), parse_cluster("16xa100"), {})
    best = search(request).best
    assert best is not None, "16 A100 hold a model of 8 billion parameters"
    lines = [
        f"{len(list(meshes(request)))} meshes; the fastest: {describe(best.layout)}, {best.seconds:.2f} s"
    ]
    for axis, size in (("tp", 8), ("tp", 16), ("pp", 4), ("cp", 4)):
        other = search(replace(request, fixed={axis: size}), BEST_ONLY).best
        text = "nothing fits" if other is None else f"{other.seconds:.2f} s: {describe(other.layout)}"
        lines.append(f"{axis}={size:<3} {text}")
    return lines
