"""Where in a rank's model faults may be committed: buckets, parameters, buffers, modules, ties."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from meshwright.adapt.batch_norm import BatchNorm
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.sharding.engine import ShardParameter
from meshwright.sharding.memory import BucketMemory
from meshwright.testing.faults.patching import trained
from meshwright.testing.faults.silent import Place, SilentFault, Site
from meshwright.verification.rank import CandidateRank


def owners(candidate: CandidateRank, memory: BucketMemory, name: str = "") -> tuple[int, ...]:
    """Global ranks that own a piece of the parameter, or of any in the bucket; all, where all update all."""
    ranks = candidate.engine.group.ranks
    if memory.owner_count == 1:
        return ranks
    return tuple(
        rank
        for index, rank in enumerate(ranks)
        if any(not name or piece.name == name for piece in memory.bucket.owned(index, memory.owner_count))
    )


def buckets(candidate: CandidateRank) -> list[Place]:
    """Buckets that get gradients, on ranks that own parts of them."""
    return [
        Place(m.bucket.name, tuple(p.name for p in m.bucket.parameters), owners(candidate, m))
        for m in trained(candidate)
    ]


def gathered_buckets(candidate: CandidateRank) -> list[Place]:
    """The same on ranks that get elements from another one; also modules whose weights lie in them may be named."""
    ranks = candidate.engine.group.ranks
    places = []
    for place, memory in zip(buckets(candidate), trained(candidate), strict=True):
        holders = set(owners(candidate, memory))
        modules = {ancestor for name in place.tensors for ancestor in _ancestors(name)}
        receivers = tuple(rank for rank in ranks if holders - {rank})
        if receivers:
            places.append(Place(place.name, (*place.tensors, *sorted(modules)), receivers))
    return places


def _ancestors(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
    yield "(model)"


def parameters(candidate: CandidateRank) -> list[Place]:
    """Trained parameters, on ranks that update a part of them."""
    return [
        Place(spec.name, (spec.name,), owners(candidate, memory, spec.name))
        for memory in trained(candidate)
        for spec in memory.bucket.parameters
    ]


def vectors(candidate: CandidateRank) -> list[Place]:
    """One place: all trained parameters with fewer than two dims."""
    return _by_dims(candidate, lambda dims: dims < 2)


def matrices(candidate: CandidateRank) -> list[Place]:
    """One place: all other trained parameters."""
    return _by_dims(candidate, lambda dims: dims >= 2)


def _by_dims(candidate: CandidateRank, wanted: Callable[[int], bool]) -> list[Place]:
    specs = [spec for memory in trained(candidate) for spec in memory.bucket.parameters]
    names = tuple(spec.name for spec in specs if wanted(len(spec.shape)))
    return [Place("", names)] if names else []


def alike_parameters(candidate: CandidateRank) -> list[Place]:
    """Pairs of parameters of one shape that some rank owns whole: `name other`."""
    found: dict[tuple[int, ...], list[Place]] = {}
    for place in parameters(candidate):
        memory = memory_of(candidate, place.name)
        spec = next(spec for spec in memory.bucket.parameters if spec.name == place.name)
        for index, rank in enumerate(candidate.engine.group.ranks):
            owner = index if memory.owner_count > 1 else 0
            pieces = memory.bucket.owned(owner, memory.owner_count)
            if any(p.name == spec.name and p.stop - p.start == spec.numel for p in pieces):
                found.setdefault((rank, *spec.shape), []).append(place)
    return [
        Place(f"{first.name} {second.name}", (first.name, second.name), (key[0],))
        for key, group in found.items()
        for first, second in itertools.pairwise(group)
    ]


def memory_of(candidate: CandidateRank, name: str) -> BucketMemory:
    """The bucket of a parameter."""
    return next(m for m in candidate.engine.memories if any(p.name == name for p in m.bucket.parameters))


def shards_of(candidate: CandidateRank, name: str) -> list[ShardParameter]:
    """This rank's pieces of a parameter."""
    return [shard for shard in candidate.engine.shards if shard.name == name]


def frozen_parameters(candidate: CandidateRank) -> list[Place]:
    """Parameters that are not trained."""
    named = candidate.engine.model.named_parameters()
    return [Place(name, (name,)) for name, parameter in named if not parameter.requires_grad]


def float_buffers(candidate: CandidateRank) -> list[Place]:
    """Buffers of real numbers; where one changes, the outputs of its module and of those around it do too."""
    return [
        Place(name, (name, *_ancestors(name)))
        for name, buffer in candidate.engine.model.named_buffers()
        if buffer.is_floating_point() and buffer.numel()
    ]


def tied_parameters(candidate: CandidateRank) -> list[Place]:
    """Tied weights that a linear map uses last: the name of that use; `verify` names the first."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in candidate.engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model = candidate.engine.model
    return [
        Place(group[-1], tuple(group))
        for group in names.values()
        if len(group) > 1 and isinstance(model.get_submodule(group[-1].rpartition(".")[0]), nn.Linear)
    ]


def linears(candidate: CandidateRank) -> list[Place]:
    """Linear maps with a trained weight of their own; `verify` names the weight."""
    tied = {name for place in tied_parameters(candidate) for name in place.tensors}
    return [
        Place(name, (f"{name}.weight",))
        for name, module in candidate.engine.model.named_modules()
        if type(module) is nn.Linear and module.weight.requires_grad and f"{name}.weight" not in tied
    ]


def modules_where(test: Callable[[nn.Module], bool]) -> Callable[[CandidateRank], list[Place]]:
    """Modules that fulfil `test`; `verify` may name them, what is inside them, and what is around them."""

    def places(candidate: CandidateRank) -> list[Place]:
        return [
            Place(name, (*(f"{name}.{inner}" if inner else name for inner, _ in module.named_modules()),))
            for name, module in candidate.engine.model.named_modules()
            if test(module)
        ]

    return places


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention by its class's name."""
    return "Attention" in type(module).__name__


def is_dropout(module: nn.Module) -> bool:
    """Whether a module drops."""
    return isinstance(module, nn.Dropout) and module.p > 0


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises by statistics of the batch."""
    return isinstance(module, BatchNorm)


def statistics(candidate: CandidateRank) -> list[Place]:
    """Batch normalisations; `verify` names their buffers."""
    return [
        Place(name, tuple(f"{name}.{buffer}" for buffer, _ in module.named_buffers(recurse=False)))
        for name, module in candidate.engine.model.named_modules()
        if is_batch_norm(module)
    ]


def gaps(candidate: CandidateRank) -> list[Place]:
    """Buckets with padding inside the part that a rank counts, and these ranks."""
    return [
        Place(memory.bucket.name, (), ranks)
        for memory in trained(candidate)
        if (ranks := tuple(rank for rank in candidate.engine.group.ranks if gap_of(candidate, memory, rank)))
    ]


def gap_of(candidate: CandidateRank, memory: BucketMemory, rank: int) -> list[int]:
    """Flat places of padding that `rank` counts in the norm."""
    size = memory.bucket.numel // candidate.engine.group.size
    first = candidate.engine.group.ranks.index(rank) * size
    padding = torch.zeros(memory.bucket.numel, dtype=torch.bool)
    for start, stop in memory.bucket.gaps():
        padding[start:stop] = True
    return [int(place) + first for place in padding[first : first + size].nonzero().flatten()]


def layout_of(candidate: CandidateRank) -> TensorLayout:
    """Which part of the model this rank has."""
    layout = candidate.engine.tensor_layout
    assert layout is not None, "the need of these faults is tensor parallelism"
    return layout


def anywhere(candidate: CandidateRank, name: str, *tensors: str) -> Place:
    """A place whose site has the same rank everywhere: groups of samples differ by tp index."""
    return Place(name, tensors, tuple(candidate.engine.groups.all.ranks))


def row_biases(candidate: CandidateRank) -> list[Place]:
    """Layers whose weight is cut by columns and whose bias is whole."""
    layout, found = layout_of(candidate), []
    for name, _ in candidate.engine.model.named_parameters():
        module = name.removesuffix(".bias")
        cut = layout.cuts.get(f"{module}.weight")
        if module != name and cut is not None and cut.dim == 1:
            found.append(anywhere(candidate, module))
    return found


def tensor_fault(
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
    """A fault of tensor parallelism; `commit` is how and where it is committed."""
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
