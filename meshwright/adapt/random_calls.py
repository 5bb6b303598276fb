"""Every function of torch that draws random numbers, and what stateless dropout does when it is called.

Owns the table of handlers and how masks are applied. Which bits a call gets is the scope's business. A test compares
the table with torch: a random function that is in no row is found there.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from meshwright.adapt.attention import attention_with_dropout, weights_shape
from meshwright.comm.rng import Draw, MicroStep
from meshwright.errors import PlanError

# (scope, the arguments of torch's function) -> its result
Handler = Callable[..., Any]
# Mean and scale of alpha dropout's fixed point (Klambauer et al. 2017).
_ALPHA = 1.7580993408473766


class DrawsBits(Protocol):
    """A scope of one micro-step.

    Attributes:
        place: the part of the batch that this rank has.
    """

    place: MicroStep

    def draw(self, shape: torch.Size, drop_probability: float, *, what: str) -> Draw:
        """The random bits of the next call, over a tensor of which this rank holds `shape`."""

    def draw_whole(self, shape: torch.Size, drop_probability: float, *, what: str) -> Draw:
        """The same of whole sequences, whatever part of them this rank has."""


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


def _drop(
    scope: DrawsBits, x: Tensor, p: float, *, inplace: bool, features: bool, alpha: bool, what: str
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
        scope: DrawsBits, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
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

    def handle(scope: DrawsBits, input: Tensor, p: float, train: bool) -> Tensor:
        x = native(input, p, False)
        if not train or p == 0 or not input.numel():
            return x
        what = f"{native.__name__}(p={p:g})"
        return _drop(scope, x, p, inplace=inplace, features=features, alpha=alpha, what=what)

    return handle


def _attention(  # noqa: PLR0913 - torch's own parameters
    scope: DrawsBits,
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


def _attention_draw(scope: DrawsBits, query: Tensor, shape: tuple[int, ...], drop_probability: float) -> Draw:
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


def unmapped(native: Any) -> Handler:
    """For random functions that are no dropout: they run as they are, but on several ranks only for one number.

    One number from the CPU's generator is the same on all ranks; a tensor of them is some samples' own.
    """

    def handle(scope: DrawsBits, *args: Any, **kwargs: Any) -> Any:
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
    of_no_place = unmapped(native)

    def handle(scope: DrawsBits, *args: Any) -> Any:
        # (input, state, weights, has_biases, layers, dropout, train, ...) or packed: one more in front.
        layers, dropout, train = args[4:7] if isinstance(args[3], bool) else args[5:8]
        draws = bool(train) and dropout > 0 and layers > 1
        return of_no_place(scope, *args) if draws else native(*args)

    return handle


def _randomised_relu(native: Any) -> Handler:
    """For randomised leaky ReLU, which draws in training only."""
    of_no_place = unmapped(native)

    def handle(scope: DrawsBits, *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training", args[3] if len(args) > 3 else False)
        return of_no_place(scope, *args, **kwargs) if training else native(*args, **kwargs)

    return handle


OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def is_random(operator: Any) -> bool:
    """An operator called through `torch.ops` draws random numbers, by torch's own tag."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return any(is_random(getattr(operator, name)) for name in operator.overloads())
    return torch.Tag.nondeterministic_seeded in operator.tags


def drops_nothing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
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
HANDLERS: Mapping[Any, Handler] = types.MappingProxyType(
    dict(_DROPOUTS)
    | {native: seen_inside(native) for native in OUTER_CALLS}
    | dict(_CONDITIONAL)
    | {native: unmapped(native) for native in _RANDOM}
)
