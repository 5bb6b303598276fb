"""Dropout under the law: masks are functions of (seed, step, call, global element index).

Owns how a training forward's dropout calls are found and given their masks. Must not know models, data order or plans.

[Note: how calls are found] A `TorchFunctionMode` is entered around forward and backward of every micro-step, for
every model. To look first whether a model has dropout would be cheaper, but a probability may be raised later and a
function may be called by any name, and a call missed would be silent. The price is 1.5 µs for each torch call of the
forward: 105 calls, 0.2 % of the step of a small GPT (4 layers, 128 wide, 1024 tokens) on one core. Every overridable
function that draws random numbers is in one of the tables at the end; a test compares them with torch.

[Note: the call's number] The n-th call of a micro-step takes its key from the n-th word of torch's CPU generator,
which is seeded by (seed, step) alike on all ranks and for all micro-steps; these differ in their samples' indices.
Recomputation in backward draws the same words again, because whatever recomputes (torch's checkpoints, reentrant or
not, nested, or other libraries') puts that generator back.

Simplifications: a call's tensor holds the rank's samples in order along its first dim (times any factor, e.g. heads).
Sequence-first layers of torch are refused; other tensors whose first dim only happens to be a multiple are not noticed.
Calls inside torch.compile are left to the compiler's own random numbers.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from meshwright.adapt.attention import attention_with_dropout, weights_shape
from meshwright.comm.rng import CutDraw, Draw, MicroStep, SlicedDraw, fold, scratch_words
from meshwright.errors import NumericsError, PlanError
from meshwright.layout.sequence import SequenceRegion
from meshwright.layout.tensor_layout import CutRegion, TokenRange

DropoutKind = Literal["stateless", "native"]
# Mean and scale of alpha dropout's fixed point (Klambauer et al. 2017).
_ALPHA = 1.7580993408473766


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


def attention_draw(query: Tensor, shape: tuple[int, ...], drop_probability: float) -> Draw:
    """The random bits of a call over the attention weights `shape` of whole sequences; only where dropout is stateless.

    Raises:
        PlanError: E208 elsewhere.
    """
    if has_torch_function((query,)):
        return handle_torch_function(attention_draw, (query,), query, shape, drop_probability)
    raise PlanError(
        "E208",
        f'dropout in attention (p={drop_probability:g}) over cut sequences needs train.dropout = "stateless": no rank '
        f"alone knows torch's own masks.",
    )


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
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, *args, **(kwargs or {}))
        if isinstance(func, _OPERATORS) and _is_random(func) and not _drops_nothing(func, args, kwargs or {}):
            return _unmapped(func)(self, *args, **(kwargs or {}))
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


class _Dropped(torch.autograd.Function):
    """x · mask · scale; the mask is kept as bool and may have dims of size 1 that x has not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.saved_tensors[0] * ctx.scale, None, None


def module_path() -> str:
    """Classes of the modules whose forward is running, outermost first; for error texts only."""
    names: list[str] = []
    frame, seen = inspect.currentframe(), set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) not in seen:
            seen.add(id(owner))
            names.insert(0, type(owner).__name__)
        frame = frame.f_back
    return " > ".join(names) or "the loss"


# Handlers: `(scope, the arguments of torch's function) -> its result`.

Handler = Callable[..., Any]


def _drop(
    scope: _Scope, x: Tensor, p: float, *, inplace: bool, features: bool, alpha: bool, what: str
) -> Tensor:
    """Zero elements, or with `features` whole channels (second dim); `alpha` keeps mean and variance of SELU."""
    shape = x.shape[:2] + (1,) * (x.dim() - 2) if features else x.shape
    draw = scope.draw(shape, p, what=what)
    mask = draw.keep(0, math.prod(shape), x.device).view(shape)
    if alpha and p < 1:
        a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        kept = mask.to(x.dtype)
        shift = (kept - 1 + p) * (_ALPHA * a)
        return x.mul_(kept * a).add_(shift) if inplace else x * (kept * a) + shift
    if inplace:
        return x.mul_(mask).mul_(draw.scale)
    return _Dropped.apply(x, mask, draw.scale)


def _functional(native: Any, *, features: bool = False, alpha: bool = False, batched_dim: int = 0) -> Handler:
    """For a function of torch.nn.functional; with fewer than `batched_dim` dims the input has no batch dim."""

    def handle(
        scope: _Scope, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        x = native(input, p, False, inplace)  # torch's own checks of p and of the number of dims
        if not training or p == 0 or not input.numel():
            return x
        x = x.unsqueeze(0) if x.dim() < batched_dim else x
        what = f"{native.__name__}(p={p:g})"
        dropped = _drop(scope, x, p, inplace=inplace, features=features, alpha=alpha, what=what)
        return input if inplace else dropped.view(input.shape)

    return handle


def _builtin(native: Any, *, features: bool = False, alpha: bool = False) -> Handler:
    """For a function of torch itself; a trailing underscore works in place."""
    inplace = native.__name__.endswith("_")

    def handle(scope: _Scope, input: Tensor, p: float, train: bool) -> Tensor:
        x = native(input, p, False)
        if not train or p == 0 or not input.numel():
            return x
        what = f"{native.__name__}(p={p:g})"
        return _drop(scope, x, p, inplace=inplace, features=features, alpha=alpha, what=what)

    return handle


def _attention(  # noqa: PLR0913 - torch's own parameters
    scope: _Scope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not 0 < dropout_p <= 1:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    shape = weights_shape(query, key, value, enable_gqa=enable_gqa)
    draw = scope.draw(shape, dropout_p, what=f"scaled_dot_product_attention(dropout_p={dropout_p:g})")
    return attention_with_dropout(
        (query, key, value, attn_mask), draw, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attention_draw(scope: _Scope, query: Tensor, shape: tuple[int, ...], drop_probability: float) -> Draw:
    what = f"scaled_dot_product_attention(dropout_p={drop_probability:g})"
    return scope.draw_whole(torch.Size(shape), drop_probability, what=what)


def seen_inside(native: Any) -> Handler:
    """For a function of Python that calls others: run its code with the mode on.

    torch switches the mode off for what a function calls, and with the mode on it would hand the function here
    again. So it runs as a copy that does not ask whether it is overridden (guarded by a test).
    """
    never = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    copy = types.FunctionType(
        native.__code__,
        {**native.__globals__, **never},
        native.__name__,
        native.__defaults__,
        native.__closure__,
    )
    copy.__kwdefaults__ = native.__kwdefaults__

    def handle(scope: TorchFunctionMode, *args: Any, **kwargs: Any) -> Any:
        with scope:
            return copy(*args, **kwargs)

    return handle


def _unmapped(native: Any) -> Handler:
    """For random functions that are no dropout: they run as they are, but on several ranks only for one number.

    One number from the CPU's generator is the same on all ranks; a tensor of them is some samples' own.
    """

    def handle(scope: _Scope, *args: Any, **kwargs: Any) -> Any:
        result = native(*args, **kwargs)
        single = isinstance(result, Tensor) and result.numel() <= 1
        if scope.place.is_whole or single or kwargs.get("generator") is not None:
            return result
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
        raise PlanError(
            "E208",
            f"{_name(native)} in {module_path()} draws random numbers{shape}, and which of them belong to which "
            f"samples of the global batch is unknown. Use dropout functions, pass a generator of your own, or choose "
            f'train.dropout = "native" (results then depend on the number of ranks).',
        )

    return handle


def _name(native: Any) -> str:
    return str(getattr(native, "__name__", native))


def _recurrent(native: Any) -> Handler:
    """For LSTM, GRU and RNN, whose dropout between layers happens inside one kernel."""
    unmapped = _unmapped(native)

    def handle(scope: _Scope, *args: Any) -> Any:
        # (input, state, weights, has_biases, layers, dropout, train, ...) or packed: one more in front.
        layers, dropout, train = args[4:7] if isinstance(args[3], bool) else args[5:8]
        draws = bool(train) and dropout > 0 and layers > 1
        return unmapped(scope, *args) if draws else native(*args)

    return handle


def _randomised_relu(native: Any) -> Handler:
    """For randomised leaky ReLU, which draws in training only."""
    unmapped = _unmapped(native)

    def handle(scope: _Scope, *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training", args[3] if len(args) > 3 else False)
        return unmapped(scope, *args, **kwargs) if training else native(*args, **kwargs)

    return handle


_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _is_random(operator: Any) -> bool:
    """An operator called through `torch.ops` draws random numbers, by torch's own tag."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return any(_is_random(getattr(operator, name)) for name in operator.overloads())
    return torch.Tag.nondeterministic_seeded in operator.tags


def _drops_nothing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it would draw for its dropout only, and that is 0, as in a kernel of attention."""
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    given = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    return float(given) == 0.0


_DROPOUTS: tuple[tuple[Any, Handler], ...] = (
    (F.dropout, _functional(F.dropout)),
    (F.dropout1d, _functional(F.dropout1d, features=True, batched_dim=3)),
    (F.dropout2d, _functional(F.dropout2d, features=True)),
    (F.dropout3d, _functional(F.dropout3d, features=True, batched_dim=5)),
    (F.alpha_dropout, _functional(F.alpha_dropout, alpha=True)),
    (F.feature_alpha_dropout, _functional(F.feature_alpha_dropout, features=True, alpha=True)),
    (torch.dropout, _builtin(torch.dropout)),
    (torch.dropout_, _builtin(torch.dropout_)),
    (torch.feature_dropout, _builtin(torch.feature_dropout, features=True)),
    (torch.feature_dropout_, _builtin(torch.feature_dropout_, features=True)),
    (torch.alpha_dropout, _builtin(torch.alpha_dropout, alpha=True)),
    (torch.alpha_dropout_, _builtin(torch.alpha_dropout_, alpha=True)),
    (torch.feature_alpha_dropout, _builtin(torch.feature_alpha_dropout, features=True, alpha=True)),
    (torch.feature_alpha_dropout_, _builtin(torch.feature_alpha_dropout_, features=True, alpha=True)),
    (F.scaled_dot_product_attention, _attention),
    (attention_draw, _attention_draw),
)
OUTER_CALLS = (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_CONDITIONAL = (
    *((native, _recurrent(native)) for native in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)),
    *((native, _randomised_relu(native)) for native in (F.rrelu, torch.rrelu, torch.rrelu_)),
)
_RANDOM = (
    *(torch.bernoulli, torch.binomial, torch.multinomial, torch.normal, torch.poisson, torch.native_dropout),
    *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like),
    *(torch.randperm, Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.cauchy_),
    *(Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_, Tensor.normal_, Tensor.random_),
    *(Tensor.uniform_, F.gumbel_softmax),
    *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
)
_HANDLERS: Mapping[Any, Handler] = types.MappingProxyType(
    dict(_DROPOUTS)
    | {native: seen_inside(native) for native in OUTER_CALLS}
    | dict(_CONDITIONAL)
    | {native: _unmapped(native) for native in _RANDOM}
)


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
