"""The reference's tensors on disk, and the measurement of a piece against them.

Owns the file: raw bytes end to end, mapped tensor by tensor when they are read, so that no rank ever holds more of the
reference than one tensor. Must not know what the tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.verification.tensors import Key, PieceStats, Recorded, Scale, Tolerance

# Elements of one pass: its temporaries in float64 stay at a few MiB.
_CHUNK_NUMEL = 1 << 18
# Elements below this part of the tensor's largest magnitude say nothing about a ratio.
_RATIO_FLOOR = 1e-3


class Recorder:
    """Writes tensors to a file and remembers what they are; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.recorded: list[Recorded] = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(
        self, key: Key, tensor: Tensor, *, order: int, batch_dim: int | None = None, rows_per_sample: int = 1
    ) -> None:
        """Write `tensor`, any shape, whole."""
        check, step, microbatch, name = key
        values = _real(tensor).cpu().contiguous()
        values = values.float() if values.dtype == torch.bfloat16 else values  # numpy has no bfloat16
        offset = self._file.tell()
        array = values.numpy()
        array.tofile(self._file)
        norm, largest = magnitudes(values)
        scale = Scale(norm, largest, norm, largest, norm)
        self.recorded.append(
            Recorded(
                check, step, microbatch, name, order, tuple(values.shape), array.dtype.str, offset, scale,
                batch_dim, rows_per_sample,
            )
        )  # fmt: skip

    def finish(self) -> tuple[Recorded, ...]:
        """All that was written, with the magnitudes of their modules and of all of their kind filled in."""
        self._file.flush()
        return with_scales(self.recorded)


def with_scales(recorded: Sequence[Recorded]) -> tuple[Recorded, ...]:
    """`recorded` with module and whole magnitudes; an activation's module is all activations of its micro-step."""
    squares: dict[tuple[object, ...], float] = {}
    largest: dict[tuple[object, ...], float] = {}
    for item in recorded:
        for group in (_module_of(item), _whole_of(item)):
            squares[group] = squares.get(group, 0.0) + item.scale.norm**2
            largest[group] = max(largest.get(group, 0.0), item.scale.largest)
    filled = []
    for item in recorded:
        module, whole = _module_of(item), _whole_of(item)
        own_only = item.check == "activations"  # a small activation is no sum of large ones of other modules
        scale = Scale(
            norm=item.scale.norm,
            largest=item.scale.largest,
            module_norm=item.scale.norm if own_only else squares[module] ** 0.5,
            module_largest=largest[module],
            whole_norm=squares[whole] ** 0.5,
            whole_largest=largest[whole],
        )
        filled.append(replace(item, scale=scale))
    return tuple(filled)


def _module_of(item: Recorded) -> tuple[object, ...]:
    if item.check == "activations":
        return _whole_of(item)
    # Of a parameter `blocks.0.query.weight` or its state `blocks.0.query.weight exp_avg`: the module, and which state.
    name, _, state = item.name.partition(" ")
    return (*_whole_of(item)[:2], name.rpartition(".")[0], _FIRST_MOMENTS.get(state, state))


def _whole_of(item: Recorded) -> tuple[object, ...]:
    if item.check == "activations":
        return (item.check, item.step, item.microbatch)
    return (item.check, item.step, item.name.partition(" ")[2], "all")


# Where Muon has a module's matrix and AdamW its bias, one name for what has the size of gradients.
_FIRST_MOMENTS = MappingProxyType({"momentum_buffer": "exp_avg"})


@dataclass(frozen=True)
class Chunk:
    """Which chunk of a dim a rank's piece has: number `index` of those of `sizes`."""

    sizes: tuple[int, ...]
    index: int
    dim: int = -1


@dataclass(frozen=True)
class Positions:
    """Which positions of a dim a rank's piece has, as of a sequence that is cut over ranks.

    Attributes:
        dim: the dim.
        places: positions of the whole, those behind `length` are padding.
        length: of the whole.
        index: number of the piece.
        num_parts: pieces that make up the whole.
    """

    dim: int
    places: tuple[int, ...]
    length: int
    index: int
    num_parts: int

    def of(self, whole: npt.NDArray[np.generic], piece: Tensor) -> tuple[npt.NDArray[np.generic], Tensor]:
        """What of `whole` corresponds to what of `piece` is no padding."""
        known = [place for place in self.places if place < self.length]
        ours = [number for number, place in enumerate(self.places) if place < self.length]
        # Typed, for a piece may be all padding.
        chosen = torch.tensor(ours, dtype=torch.int64)
        return np.take(whole, np.array(known, dtype=np.int64), self.dim), piece.index_select(self.dim, chosen)


@dataclass
class _Sums:
    """What accumulates over the chunks of one piece."""

    square_error: float = 0.0
    largest_error: float = 0.0
    num_wrong: int = 0
    wrong_rows: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


class Comparer:
    """Measures pieces of one rank against a file of reference tensors, and keeps what it finds.

    Args:
        path: the file.
        recorded: what lies in it.
        tolerances: by check; without one nothing counts as wrong (noise is measured so).
        rank: who measures.
    """

    def __init__(
        self, path: Path, recorded: Sequence[Recorded], *, tolerances: dict[str, Tolerance], rank: int
    ) -> None:
        self._path = path
        self._recorded = {item.key: item for item in recorded}
        self._tolerances = tolerances
        self._rank = rank
        self.stats: list[PieceStats] = []

    def knows(self, key: Key) -> Recorded | None:
        """The recorded tensor of `key`, or None where the reference has none."""
        return self._recorded.get(key)

    def compare(
        self,
        key: Key,
        actual: Tensor,
        *,
        start: int = 0,
        divisor: float = 1.0,
        chunk: Chunk | None = None,
        positions: Positions | None = None,
    ) -> None:
        """Measure a piece.

        Args:
            key: of the tensor; without a counterpart in the reference that is a finding.
            actual: the piece: the logical tensor's rows along its batch dim, or flat elements.
            start: first row, or first flat element.
            divisor: what the piece is divided by first.
            chunk: where the piece has a chunk of a dim, in any of its rows.
            positions: where the piece has some positions of a dim, in any of its rows.
        """
        item = self._recorded.get(key)
        if item is None:
            self.report(key, "the reference has no such tensor")
            return
        actual = _real(actual).cpu()
        expected = self._open(item)
        sizes, part = ((1,), 0) if chunk is None else (chunk.sizes, chunk.index)
        if chunk is not None:
            first = sum(sizes[:part])
            expected = np.moveaxis(expected, chunk.dim, 0)[first : first + sizes[part]]
            expected = np.moveaxis(expected, 0, chunk.dim)
        num_parts = len(sizes)
        if positions is not None:
            expected, actual = positions.of(expected, actual)
            part, num_parts = positions.index * num_parts + part, positions.num_parts * num_parts
        if item.batch_dim is None:
            expected, actual = expected.reshape(-1), actual.reshape(-1)
        else:
            expected, actual = np.moveaxis(expected, item.batch_dim, 0), actual.movedim(item.batch_dim, 0)
        stop = start + actual.shape[0]
        if stop > expected.shape[0] or tuple(actual.shape[1:]) != expected.shape[1:]:
            text = f"shape {tuple(actual.shape)} at row {start} does not fit into {tuple(expected.shape)}"
            self.report(key, text)
            return
        sums = self._sum(item, expected, actual, start=start, divisor=divisor)
        self.stats.append(
            PieceStats(
                key,
                self._rank,
                start,
                # Without rows of samples a chunk, or some positions, are all that there is of their part.
                stop if item.batch_dim is not None or (chunk is None and positions is None) else item.extent,
                numel=actual.numel(),
                square_error=sums.square_error,
                largest_error=sums.largest_error,
                num_wrong=sums.num_wrong,
                first_wrong=min(sums.wrong_rows, default=-1),
                last_wrong=max(sums.wrong_rows, default=-1),
                ratio_low=min(sums.ratios, default=math.inf),
                ratio_high=max(sums.ratios, default=-math.inf),
                part=part,
                num_parts=num_parts,
            )
        )

    def elements(self, key: Key, places: Iterable[int]) -> dict[int, float]:
        """These flat elements of the reference's tensor."""
        flat = self._open(self._recorded[key]).reshape(-1)
        return {place: float(flat[place]) for place in places}

    def report(self, key: Key, problem: str) -> None:
        """A finding that is not a number."""
        self.stats.append(PieceStats(key, self._rank, 0, 0, problem=problem))

    def _open(self, item: Recorded) -> npt.NDArray[np.generic]:
        dtype = np.dtype(item.dtype)
        if not item.numel:
            return np.empty(item.shape, dtype)
        return np.memmap(self._path, dtype, "r", offset=item.offset, shape=item.shape or (1,)).reshape(
            item.shape
        )

    def _sum(
        self,
        item: Recorded,
        expected: npt.NDArray[np.generic],
        actual: Tensor,
        *,
        start: int,
        divisor: float,
    ) -> _Sums:
        limit = self._tolerances.get(item.check)
        allowed = limit.largest_error(item) if limit else math.inf
        sums = _Sums()
        for first, last in _chunks(actual):
            theirs = torch.from_numpy(np.array(expected[start + first : start + last])).double()
            ours = actual[first:last].detach().double()
            if divisor != 1.0:
                ours = ours / divisor
            _add_chunk(sums, ours, theirs, row=start + first, allowed=allowed, largest=item.scale.largest)
        return sums


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    rows = tensor.shape[0]
    size = max(1, _CHUNK_NUMEL // max(1, tensor.numel() // max(1, rows)))
    for first in range(0, rows, size):
        yield first, min(first + size, rows)


def _add_chunk(
    sums: _Sums, ours: Tensor, theirs: Tensor, *, row: int, allowed: float, largest: float
) -> None:
    error = (ours - theirs).abs()
    if not error.numel():
        return
    sums.square_error += float(error.square().sum())
    worst = float(error.max())
    # A comparison with NaN is false, and NaN must stay.
    sums.largest_error = worst if not worst <= sums.largest_error else sums.largest_error
    wrong = ~(error <= allowed)
    if not bool(wrong.any()):
        return
    sums.num_wrong += int(wrong.sum())
    rows = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
    places = rows.nonzero().flatten()
    sums.wrong_rows += [row + int(places[0]), row + int(places[-1])]
    floor = _RATIO_FLOOR * largest
    telling = wrong & (theirs.abs() > floor)
    if bool(
        (wrong & (theirs == 0) & (ours.abs() > floor)).any()
    ):  # something where nothing should be: no factor
        sums.ratios += [-math.inf, math.inf]
    elif bool(telling.any()):
        ratios = ours[telling] / theirs[telling]
        sums.ratios += [float(ratios.min()), float(ratios.max())]


def magnitudes(values: Tensor) -> tuple[float, float]:
    """Norm and largest magnitude of a real tensor, in float64."""
    square, largest = 0.0, 0.0
    flat = values.reshape(-1)
    for first, last in _chunks(flat):
        chunk = flat[first:last].double()
        square += float(chunk.square().sum())
        largest = max(largest, float(chunk.abs().max()))
    return square**0.5, largest


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
