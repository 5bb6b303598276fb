"""Dropout under the law: masks are functions of (seed, step, call, global element index).

Owns how a training forward's dropout calls are found and given their masks. Must not know models, data order or plans.

[Note: how calls are found] A `TorchFunctionMode` is entered around forward and backward of every micro-step, for
every model. To look first whether a model has dropout would be cheaper, but a probability may be raised later and a
function may be called by any name, and a call missed would be silent. The price is 1.5 µs for each torch call of the
forward: 105 calls, 0.2 % of the step of a small GPT (4 layers, 128 wide, 1024 tokens) on one core. Every overridable
function that draws random numbers is in a table (`random_calls.py`); a test compares it with torch.

[Note: the call's number] The n-th call of a micro-step takes its key from the n-th word of torch's CPU generator,
which is seeded by (seed, step) alike on all ranks and for all micro-steps; these differ in their samples' indices.
Recomputation in backward draws the same words again, because whatever recomputes (torch's checkpoints, reentrant or
not, nested, or other libraries') puts that generator back.

Simplifications: a call's tensor holds the rank's samples in order along its first dim (times any factor, e.g. heads).
Sequence-first layers of torch are refused; other tensors whose first dim only happens to be a multiple are not noticed.
Calls inside torch.compile are left to the compiler's own random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.adapt.random_calls import (
    HANDLERS,
    OPERATORS,
    drops_nothing,
    is_random,
    module_path,
    unmapped,
)
from meshwright.comm.rng import CutDraw, Draw, MicroStep, SlicedDraw, fold, scratch_words
from meshwright.errors import NumericsError, PlanError
from meshwright.layout.sequence import SequenceRegion
from meshwright.layout.tensor_layout import CutRegion, TokenRange

DropoutKind = Literal["stateless", "native"]


class SeesCalls(Protocol):
    """A mode that is on, and hands the calls that it does not keep to `hands_to`."""

    hands_to: TorchFunctionMode | None


class StatelessDropout:
    """The dropout of one micro-step, entered for its forwards and again for its backward.

    Args:
        region: tells what is cut over tp where a call is made; None: nothing ever is.
        sequence: tells what of the sequences this rank has; None: all of them.
        must_agree: is told each call of the forwards in a line that all ranks must have alike.
        calls_before: calls of the micro-step that others make before the first one here.
    """

    def __init__(
        self,
        *,
        calls_before: int = 0,
        must_agree: Callable[[str], None] | None = None,
        region: CutRegion | None = None,
        sequence: SequenceRegion | None = None,
    ) -> None:
        self._must_agree = must_agree
        self._region = region
        self._sequence = sequence
        self._calls_before = calls_before
        self._scope: _Scope | None = None
        self._words: Tensor | None = None

    @contextmanager
    def entered(self, place: MicroStep | None = None, *, carrier: SeesCalls | None = None) -> Iterator[None]:
        """Within it, dropout follows `place`; torch's CPU generator is put back.

        Args:
            place: this rank's part of the batch that a forward gets; None for a backward.
            carrier: a mode that is on already and hands calls on, so that each is seen once; None: a mode of its own.

        Raises, where a call is made:
            PlanError: E208 for a call that cannot be cut over several ranks.
            NumericsError: E209 for a recomputation with another mask than its forward.
        """
        generator = torch.default_generator
        before = generator.get_state()
        self._prepare(place, generator)
        try:
            if carrier is None:
                with self._scope or nullcontext():
                    yield
            else:
                carrier.hands_to = self._scope
                yield
        finally:
            if carrier is not None:
                carrier.hands_to = None
            self._words = generator.get_state()
            generator.set_state(before)

    def _prepare(self, place: MicroStep | None, generator: torch.Generator) -> None:
        if self._words is not None:
            generator.set_state(self._words)
        elif place is not None:
            generator.manual_seed(place.key)
            for _ in range(self._calls_before):
                _next_word()
        if self._scope is None and place is not None:
            self._scope = _Scope(place, self._must_agree, self._region, self._sequence)
        elif self._scope is not None and place is not None:
            self._scope.place = place


@contextmanager
def by_shape() -> Iterator[None]:
    """Dropout that drops nothing and holds what stateless dropout holds, for runs without memory."""
    with _ShapeScope():
        yield


def stateless(
    place: MicroStep,
    *,
    must_agree: Callable[[str], None] | None = None,
    region: CutRegion | None = None,
    sequence: SequenceRegion | None = None,
) -> AbstractContextManager[None]:
    """A micro-step of one forward and backward, entered once around both; see `StatelessDropout`."""
    return StatelessDropout(must_agree=must_agree, region=region, sequence=sequence).entered(place)


def check_modules(model: nn.Module, *, num_ranks: int) -> None:
    """Raise E208 for layers whose dropout sees the sequence as its first dim, on several ranks."""
    for name, module in model.named_modules():
        sequence_first = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and not (
            module.self_attn.batch_first
        )
        if num_ranks > 1 and sequence_first and cast(nn.Dropout, module.dropout).p > 0:
            raise PlanError(
                "E208",
                f"{type(module).__name__} {name!r} has batch_first=False and dropout: its tensors have the sequence as "
                f"first dim, and {num_ranks} ranks cut the batch. Build it with batch_first=True.",
            )


def native_warnings(model: nn.Module, kind: DropoutKind, *, num_ranks: int) -> list[str]:
    """W206 where the choice makes results depend on the number of ranks."""
    if kind == "stateless" or num_ranks == 1:
        return []
    return [
        f'W206 train.dropout = "native" on {num_ranks} ranks: every rank draws the same masks for other samples, so '
        f'what {type(model).__name__} learns depends on the number of ranks; "stateless" does not'
    ]


class _Scope(TorchFunctionMode):
    """One micro-step: hands every random call to its handler; `place` is that of the newest forward."""

    def __init__(
        self,
        place: MicroStep,
        must_agree: Callable[[str], None] | None,
        region: CutRegion | None = None,
        sequence: SequenceRegion | None = None,
    ) -> None:
        super().__init__()
        self.place = place
        self._region = region
        self._sequence = sequence
        self._must_agree = must_agree
        # What was cut when a mask was first drawn: a layer that runs again in backward stands elsewhere.
        self._places: dict[int, tuple[MicroStep, CutRegion | None]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, *args, **(kwargs or {}))
        if isinstance(func, OPERATORS) and is_random(func) and not drops_nothing(func, args, kwargs or {}):
            return unmapped(func)(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def draw(self, shape: torch.Size, drop_probability: float, *, what: str) -> Draw:
        """The random bits of the next call, over a tensor of which this rank holds `shape`."""
        if self._sequence is None or self._sequence.cut is None:
            return self.draw_whole(shape, drop_probability, what=what)
        cut = self._sequence.cut
        if len(shape) < 2 or shape[1] != cut.local_length:
            raise PlanError(
                "E208",
                f"{what} in {module_path()}: its tensor of shape {tuple(shape)} has not this rank's "
                f"{cut.local_length} positions of the sequence (plan.cp) as its second dim, so which elements it has "
                f"is unknown. Put batch and sequence first, or set plan.cp=1.",
            )
        whole = self.draw_whole(torch.Size((shape[0], cut.length, *shape[2:])), drop_probability, what=what)
        positions = [place for start, stop in cut.runs(self._sequence.index) for place in range(start, stop)]
        return SlicedDraw(
            whole.key, 0, drop_probability, whole, torch.tensor(positions), cut.length, math.prod(shape[2:])
        )

    def draw_whole(self, shape: torch.Size, drop_probability: float, *, what: str) -> Draw:
        """The same of whole sequences, whatever part of them this rank has."""
        key = _next_word()
        # Private, as torch.utils.checkpoint has it: nothing public tells backward from forward (guarded by a test).
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward:
            self._places[key] = self.place, None if self._region is None else replace(self._region)
        elif key not in self._places:
            raise NumericsError(
                "E209",
                f"{what} in {module_path()}: recomputed in backward, it draws another mask than in forward. "
                f"Checkpoint with preserve_rng_state=True.",
            )
        place, region = self._places[key]
        tokens = None if region is None else region.cut_tokens
        if tokens is not None and len(shape) > tokens[0] and shape[tokens[0]] == tokens[1][1]:
            shape = torch.Size((*shape[: tokens[0]], tokens[1][2], *shape[tokens[0] + 1 :]))  # of all tokens
        else:
            tokens = None
        rows, partial = divmod(shape[0], place.num_rows) if shape else (0, 1)
        if partial and not place.is_whole:
            raise PlanError(
                "E208",
                f"{what} in {module_path()}: its tensor of shape {tuple(shape)} has a first dim that is no multiple "
                f"of this rank's {place.num_rows} of {place.total_rows} samples. Put the batch first, or choose "
                f'train.dropout = "native" (masks then depend on the number of ranks).',
            )
        if in_forward and self._must_agree is not None:
            self._must_agree(f"{what} {rows} {tuple(shape[1:])} {key} {place.total_rows}")
        if region is not None and region.channels is not None:
            return self._cut_draw(region, shape, Draw(key, place.first_row * rows, drop_probability), what)
        if tokens is not None:
            return _draw_of_tokens(tokens, shape, Draw(key, place.first_row * rows, drop_probability))
        if partial:
            return Draw(fold(key, place.first_row), 0, drop_probability)
        return Draw(key, place.first_row * rows * math.prod(shape[1:]), drop_probability)

    def _cut_draw(self, region: CutRegion, shape: torch.Size, of_rows: Draw, what: str) -> CutDraw:
        """Bits of a call between a column and a row split; `of_rows` counts rows of the first dim."""
        found = region.cut_of(shape)
        if found is None:
            raise PlanError(
                "E208",
                f"{what} in {module_path()}: its tensor of shape {tuple(shape)} is computed from a part of the "
                f"heads or channels (plan.tp), and which of its dims that cuts is unknown. Set plan.tp=1, or choose "
                f'train.dropout = "native" (masks then depend on the number of ranks).',
            )
        dim, (first, ours, total) = found
        inner, row = math.prod(shape[dim + 1 :]), math.prod(shape[1:]) // ours * total
        return CutDraw(
            of_rows.key,
            of_rows.first * row,
            of_rows.drop_probability,
            held=ours * inner,
            total=total * inner,
            offset=first * inner,
        )


def _draw_of_tokens(tokens: TokenRange, shape: torch.Size, of_rows: Draw) -> Draw:
    """Bits of a call on a part of the tokens, of which all have `shape`; `of_rows` counts rows of the first dim."""
    dim, (first, ours, total) = tokens
    inner, row = math.prod(shape[dim + 1 :]), math.prod(shape[1:])
    start = of_rows.first * row
    if dim == 0:
        return Draw(of_rows.key, start + first * inner, of_rows.drop_probability)
    return CutDraw(
        of_rows.key,
        start,
        of_rows.drop_probability,
        held=ours * inner,
        total=total * inner,
        offset=first * inner,
    )


def _next_word() -> int:
    """The key of the next call."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@dataclass(frozen=True)
class _ShapeDraw(Draw):
    """Keeps everything, with a mask all the same."""

    def keep(self, start: int, stop: int, device: torch.device) -> Tensor:
        """See `Draw`; takes as much memory meanwhile."""
        kept = torch.ones(stop - start, dtype=torch.bool, device=device)
        numel, count = scratch_words(stop - start, device)
        _ = [torch.empty(numel, dtype=torch.int32, device=device) for _ in range(count)]
        return kept


class _ShapeScope(_Scope):
    """A scope without a place."""

    def __init__(self) -> None:
        super().__init__(MicroStep(0, 0, 0, 1, 1), None)

    def draw(self, shape: torch.Size, drop_probability: float, *, what: str) -> Draw:
        """See `_Scope`."""
        return _ShapeDraw(0, 0, drop_probability)


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Dropout that drops nothing, and a function that tells how many random calls there have been within."""
    scope = _CountingScope()
    with scope:
        yield lambda: scope.count


class _CountingScope(_ShapeScope):
    """A scope that counts; other random functions draw from torch's generator and count by what they take of it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def draw(self, shape: torch.Size, drop_probability: float, *, what: str) -> Draw:
        """See `_Scope`."""
        self.count += 1
        return super().draw(shape, drop_probability, what=what)
