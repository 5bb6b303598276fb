"""Tensors inside nested containers: batches, arguments and results of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with `function` applied to every tensor in nested dicts, lists, tuples and named tuples."""
    return map_values(value, Tensor, function)


def map_values(value: Any, kind: type[T], function: Callable[[T], Any]) -> Any:
    """As `map_tensors`, for whatever is of `kind`."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: map_values(item, kind, function) for key, item in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:  # a named tuple
        return type(value)(*(map_values(item, kind, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_values(item, kind, function) for item in value)
    return value


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors inside nested tuples, lists, dicts and dataclass-like outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, also where they have none (fake and meta tensors)."""
    # Private: storages without memory have no address (guarded by a test).
    return tensor.untyped_storage()._cdata
