"""Which part of each parameter a rank of a tensor-parallel group holds, and what the group communicates for it.

Owns the arithmetic of chunks: sizes that need not divide, heads that stay whole, key/value heads that are fewer than
ranks. Values only; `adapt/tensor_roles.py` and its neighbours find a model's roles and swap its calls. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from meshwright.errors import PlanError
from meshwright.layout.layout import Cut, Layout
from meshwright.layout.stripes import Stripe, stripes_of

# What a module is in a layout: rows of a table; outputs that stay cut (of heads or of any width); inputs that are cut;
# whole inputs with outputs that are gathered; whole inputs whose parts' outputs are summed.
# "between" is a module between a column and a row split whose own parameters are whole: their gradients are parts.
# "derived" is for a whole model: its roles are found from its graph.
Role = Literal[
    "vocabulary",
    "query",
    "key",
    "value",
    "output",
    "column",
    "row",
    "gathered",
    "summed",
    "between",
    "derived",
]
# The dim along which tokens are cut, and (first, ours, all) of it.
TokenRange = tuple[int, tuple[int, int, int]]


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` chunks that differ by 1 at most, larger ones first: 6 6 5 5 5 5."""
    small, larger = divmod(total, parts)
    return tuple(small + (index < larger) for index in range(parts))


@dataclass(frozen=True)
class HeadSplit:
    """How the heads of one attention are spread over the ranks.

    Attributes:
        query: query heads of each rank.
        kv: key/value heads of each rank; None: every rank holds all of them and uses those of its query heads.
        num_kv_heads: of the whole attention.
    """

    query: tuple[int, ...]
    kv: tuple[int, ...] | None
    num_kv_heads: int

    def kv_heads_of(self, index: int) -> tuple[int, ...]:
        """Key/value head of each query head of rank `index`, where all ranks hold all of them."""
        share = sum(self.query) // self.num_kv_heads
        first = sum(self.query[:index])
        return tuple(head // share for head in range(first, first + self.query[index]))


@dataclass(frozen=True)
class RepeatedHeads:
    """An output with one key/value head for each of a rank's query heads.

    Attributes:
        width: of a head.
        heads: which one each is.
        num_heads: of the whole attention.
    """

    width: int
    heads: tuple[int, ...]
    num_heads: int

    @property
    def rows(self) -> list[int]:
        """Rows of the whole weight that this rank computes with."""
        return [head * self.width + place for head in self.heads for place in range(self.width)]


def split_heads(num_heads: int, num_kv_heads: int, size: int, *, where: str) -> HeadSplit:
    """Spread whole groups of heads that share a key/value head, or where these are fewer than ranks, query heads.

    Raises:
        PlanError: E201 for more ranks than query heads.
    """
    if size > num_heads:
        raise too_many_ranks(size, num_heads, f"heads of {where}")
    if num_kv_heads >= size:
        kv = even_sizes(num_kv_heads, size)
        return HeadSplit(tuple(n * (num_heads // num_kv_heads) for n in kv), kv, num_kv_heads)
    return HeadSplit(even_sizes(num_heads, size), None, num_kv_heads)


def too_many_ranks(size: int, limit: int, what: str) -> PlanError:
    """E201: a rank would hold nothing."""
    even = " ".join(str(n) for n in range(1, limit + 1) if limit % n == 0)
    best = max(n for n in range(1, min(limit, size) + 1) if limit % n == 0)
    return PlanError(
        "E201",
        f"tp={size} exceeds the {limit} {what}. Valid tp: 1..{limit}, without uneven chunks: {even}. "
        f"Try: plan.tp={best}",
    )


@dataclass
class CutRegion:
    """Whether what runs now lies between a column and a row split, and what of its tensors this rank has.

    Attributes:
        heads: (first, ours, all) of the attention that is running; None elsewhere.
        channels: the same of the last dim; None outside of such a region.
        tokens: (dim, (first, ours, all)) of what runs on a part of the tokens (sequence parallelism); None elsewhere.
    """

    heads: tuple[int, int, int] | None = None
    channels: tuple[int, int, int] | None = None
    tokens: TokenRange | None = None

    def leave(self) -> None:
        """Heads and channels are whole again."""
        self.heads = self.channels = None

    @contextmanager
    def as_in(self, other: CutRegion) -> Iterator[None]:
        """What was cut at another moment is cut for a while, as where a layer runs again."""
        before = (self.heads, self.channels, self.tokens)
        self.heads, self.channels, self.tokens = other.heads, other.channels, other.tokens
        try:
            yield
        finally:
            self.heads, self.channels, self.tokens = before

    @property
    def cut_tokens(self) -> TokenRange | None:
        """`tokens`, where tensors have all channels: between the pairs."""
        return self.tokens if self.channels is None else None

    def cut_of(self, shape: Sequence[int]) -> tuple[int, tuple[int, int, int]] | None:
        """The dim of a tensor of `shape` that is cut, and (first, ours, all) of it; None for another shape."""
        if self.heads is not None and len(shape) == 4 and shape[1] == self.heads[1]:
            return 1, self.heads
        if self.channels is not None and len(shape) > 1 and shape[-1] == self.channels[1]:
            return len(shape) - 1, self.channels
        return None


@dataclass(frozen=True)
class TokenChain:
    """Where ranks have a part of the tokens (sequence parallelism).

    Attributes:
        blocks: names of all that runs on it.
        last: the module behind which tokens are whole again; None: the head makes them so.
    """

    blocks: tuple[str, ...]
    last: str | None


def token_range(shape: Sequence[int], size: int, index: int) -> TokenRange:
    """Which tokens of a hidden state (batch, sequence, ...) one of `size` ranks has; samples where `size` divides."""
    dim = 0 if shape[0] % size == 0 else 1
    sizes = even_sizes(shape[dim], size)
    return dim, (sum(sizes[:index]), sizes[index], sum(sizes))


@dataclass(frozen=True)
class TensorLayout:
    """One rank's part of a model.

    Attributes:
        size: ranks of the group.
        index: this rank's position in it.
        cuts: parameter name to its cut over `tp`; parameters that are not named are whole on every rank.
        outputs: module name to the chunks of its output's last dim, where that stays cut.
        parts: module name to the number of parts of its cut output, each cut in the same chunks, where it has several.
        repeated: module name to the key/value head of each head of its output, where these are repeated.
        inside: chunks that a dim of a tensor between a column and a row split may have.
        collectives: (module, collective) of one micro-step over the group, forward and backward.
        forwards: (module, collective) for each of these that a module's forward makes.
        partial: parameters of which each rank has the gradient of its tokens alone (sequence parallelism).
        chain: where ranks have a part of the tokens; None: nowhere.
        warnings: texts with W201 about uneven chunks, W203 about what is on every rank.
        region: changes while the model runs: what of its tensors is cut just now.
    """

    size: int
    index: int
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    repeated: Mapping[str, RepeatedHeads] = field(default_factory=dict)
    inside: tuple[tuple[int, ...], ...] = ()
    collectives: tuple[tuple[str, str], ...] = ()
    forwards: tuple[tuple[str, str], ...] = ()
    partial: frozenset[str] = frozenset()
    chain: TokenChain | None = None
    warnings: tuple[str, ...] = ()
    region: CutRegion = field(default_factory=CutRegion, compare=False)

    @property
    def calls(self) -> Counter[str]:
        """Collectives of one micro-step over the group, forward and backward."""
        return self.calls_of(lambda _module: True)

    def calls_of(self, runs: Callable[[str], bool]) -> Counter[str]:
        """The same of those modules that `runs` is true of."""
        return Counter(op for module, op in self.collectives if runs(module))

    def counts(self, name: str) -> bool:
        """Whether this rank is the one of its group that counts parameter `name` in sums over all of them."""
        return name in self.cuts or self.index == 0

    def calls_again(self, reruns: Iterable[str]) -> Counter[str]:
        """Collectives of a micro-step that forwards of the modules `reruns` make again in backward."""
        return Counter(
            op
            for module in reruns
            for name, op in self.forwards
            if name == module or name.startswith(f"{module}.")
        )

    def logical_shape(self, name: str, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole parameter of which this rank holds `local`."""
        shape = list(local)
        if name in self.cuts:
            shape[self.cuts[name].dim] = self.cuts[name].extent
        return tuple(shape)

    def even_numel(self, name: str, local: Sequence[int]) -> int:
        """Elements of a part where chunks are even: the same on every rank."""
        whole = math.prod(self.logical_shape(name, local))
        return -(-whole // self.size) if name in self.cuts else whole

    def layout(self, name: str, logical_shape: Sequence[int]) -> Layout:
        """The boxes of parameter `name`."""
        return Layout(tuple(logical_shape), (self.cuts[name],) if name in self.cuts else ())

    def chunks_of(
        self, module: str, whole: Sequence[int], local: Sequence[int], *, batch_dim: int | None = None
    ) -> tuple[int, tuple[int, ...]] | None:
        """(dim, chunks) of a module's output of shape `local`, `whole` on one device; None: it is whole.

        What stands between a column and a row split, as an activation function does, has chunks of layers near it, in
        any dim but that of samples.
        """
        if module in self.outputs:
            return len(whole) - 1, self.outputs[module] * self.parts.get(module, 1)
        if len(whole) != len(local):
            return None
        for dim in reversed(range(len(local))):
            for sizes in self.inside:
                if dim != batch_dim and sum(sizes) == whole[dim] != local[dim] == sizes[self.index]:
                    return dim, sizes
        return None

    def repeated_in(
        self, module: str, whole: Sequence[int], local: Sequence[int]
    ) -> tuple[int, int, tuple[int, ...], int] | None:
        """(dim, width of a head, heads, heads of the whole) of an output with repeated key/value heads, else None.

        That of the projection itself, or of a module beside it that has them in a dim of their own, as a norm of keys.
        """
        own = self.repeated.get(module)
        if own is not None:
            return len(whole) - 1, own.width, own.heads, own.num_heads
        parent = module.rpartition(".")[0]
        for name, other in self.repeated.items():
            if name.rpartition(".")[0] != parent or len(whole) != len(local) or len(whole) < 4:
                continue
            for dim in range(1, len(whole) - 1):
                if (
                    whole[dim] == other.num_heads
                    and local[dim] == len(other.heads)
                    and whole[-1] == other.width
                ):
                    return dim, 1, other.heads, other.num_heads
        return None

    def runs(self, name: str, local: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Flat elements [start, stop) of this rank's part as intervals of the whole: (first there, first, end)."""
        if name not in self.cuts:
            yield start, start, stop
            return
        cut = self.cuts[name]
        inner = math.prod(local[cut.dim + 1 :])
        # Rows of the dims before, times the parts of each, are held chunk by chunk.
        chunk, whole = cut.sizes[self.index] * inner, sum(cut.sizes) * inner
        offset = sum(cut.sizes[: self.index]) * inner
        while start < stop:
            number, place = divmod(start, chunk)
            end = min(stop, (number + 1) * chunk)
            yield number * whole + offset + place, start, end
            start = end

    def stripes(self, name: str, local: Sequence[int], start: int, stop: int) -> list[Stripe]:
        """The same in few values; `offset` counts from `start`."""
        runs = [
            (first, low - start, high - start) for first, low, high in self.runs(name, local, start, stop)
        ]
        return stripes_of(runs, period=self.cuts[name].parts if name in self.cuts else 1)


class LayoutMaker:
    """Collects a `TensorLayout` role by role."""

    def __init__(self, size: int, index: int) -> None:
        self.size = size
        self.index = index
        self.region = CutRegion()
        self._cuts: dict[str, Cut] = {}
        self._outputs: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, int] = {}
        self._inside: dict[tuple[int, ...], None] = {}
        self._repeated: dict[str, RepeatedHeads] = {}
        self._collectives: list[tuple[str, str]] = []
        self._forwards: list[tuple[str, str]] = []
        self._partial: frozenset[str] = frozenset()
        self._chain: TokenChain | None = None
        self._summed_in_use: set[str] = set()
        self._warnings: dict[str, None] = {}

    def cut(self, parameter: str, dim: int, sizes: tuple[int, ...], parts: int = 1) -> None:
        """A parameter is cut along `dim`, or each of equal parts of it."""
        cut = Cut("tp", dim, sizes, parts)
        assert self._cuts.setdefault(parameter, cut) == cut, f"{parameter} is cut in two ways"

    def keeps(self, module: str, sizes: tuple[int, ...], parts: int = 1) -> None:
        """A module's output stays cut along its last dim, or each of equal parts of it."""
        self._outputs[module] = sizes
        self._inside[sizes] = None
        if parts > 1:
            self._parts[module] = parts

    def runs_on(self, sizes: tuple[int, ...]) -> None:
        """Somewhere between a column and a row split a dim has these chunks."""
        self._inside[sizes] = None

    def repeats(self, module: str, heads: RepeatedHeads, num_tensors: int) -> None:
        """A module is whole on every rank, which uses a part; gradients of its tensors are summed over the group."""
        self._repeated[module] = heads
        for _ in range(num_tensors):
            self.call("all_reduce", module)

    def call(self, op: str, of: str, *, within: str = "") -> None:
        """One collective a micro-step, of module `of`; `within`: the module whose forward makes it."""
        self._collectives.append((of, op))
        if within:
            self._forwards.append((within, op))

    def sums_in_use(self, parameter: str) -> None:
        """The gradient of a whole parameter is summed over the group each time that it is used."""
        self._summed_in_use.add(parameter)
        self.call("all_reduce", parameter.rpartition(".")[0])

    def cuts_tokens(self, chain: TokenChain) -> None:
        """Ranks have a part of the tokens in `chain`."""
        self._chain = chain

    def is_partial(self, parameters: Iterable[str]) -> None:
        """Each rank has the gradient of its tokens alone; they are summed once a step."""
        self._partial |= frozenset(parameters)

    @property
    def reduced_apart(self) -> frozenset[str]:
        """Parameters that are cut, and parameters and modules whose gradients are summed where they are used."""
        return frozenset(self._cuts) | frozenset(self._repeated) | frozenset(self._summed_in_use)

    def sizes(self, total: int, what: str) -> tuple[int, ...]:
        """Even chunks of `total`; E201 where a rank would get none, W201 where they differ."""
        if total < self.size:
            raise too_many_ranks(self.size, total, what)
        sizes = even_sizes(total, self.size)
        self.note_uneven(sizes, f"{total} {what}")
        return sizes

    def note_uneven(self, sizes: tuple[int, ...], what: str) -> None:
        """W201 where a rank has more to do than the mean."""
        if max(sizes) == min(sizes):
            return
        slower = max(sizes) * len(sizes) / sum(sizes) - 1
        shown = " ".join(map(str, sizes))
        self._warnings[
            f"W201 tp={self.size} does not divide {what}: split {shown}, {slower:.0%} slower there than even"
        ] = None

    def warn(self, text: str) -> None:
        """A text with its code, said once."""
        self._warnings[text] = None

    def finish(self) -> TensorLayout:
        """What has been collected."""
        return TensorLayout(
            self.size,
            self.index,
            cuts=MappingProxyType(self._cuts),
            outputs=MappingProxyType(self._outputs),
            parts=MappingProxyType(self._parts),
            inside=tuple(sorted(self._inside)),
            repeated=MappingProxyType(self._repeated),
            collectives=tuple(sorted(self._collectives)),
            forwards=tuple(sorted(self._forwards)),
            partial=self._partial,
            chain=self._chain,
            warnings=tuple(self._warnings),
            region=self.region,
        )
