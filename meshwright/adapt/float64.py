"""Float64 throughout: within it, code that asks for float32 gets float64.

Owns how such requests are found: casts (a norm or a softmax that is made in float32 whatever comes in), results with an
element type of their own, and new tensors without one. Written for models that train in 16 bits, they narrow where
everything else is float64, and rounding to 2^-24 is a step function: two sums in another order, equal to 1e-16, may
fall on two sides of it. Must not know what is compared.

Simplifications: constants that were float32 before stay as they are, since they are the same on every rank; casts to
16 bits and reinterpretation of memory (`x.view(dtype)`) are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Not public, and the only way to see operators below autograd; torch's own FlopCounterMode is made of it (guarded by a
# test).
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Forward and backward inside make no float32; the default element type is float64 meanwhile."""
    with _default_float64(), _Widening():
        yield


def asks_for_float32(call: Callable[[], Any]) -> bool:
    """Whether `call`, run once with float64 throughout, asked for anything that would have been float32 else."""
    with _default_float64(), _Widening() as mode:
        call()
    return mode.was_asked


@contextmanager
def _default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Widening(TorchDispatchMode):
    """Every operator that is told to make float32 makes float64.

    Attributes:
        was_asked: whether there was one, or a new floating tensor without an element type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's switch: True would load its compiler (1.6 s), to keep it out of code that nobody compiles here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            self.was_asked = True
            return func(*args, **{**kwargs, "dtype": torch.float64})
        result = func(*args, **kwargs)
        is_float64 = isinstance(result, Tensor) and result.dtype is torch.float64
        self.was_asked |= is_float64 and "dtype" not in kwargs and not _holds_tensor(args)
        return result


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))
