"""A module whose parameters are bf16 or fp16, called with and answering in float32.

Floating inputs of the root's forward are cast to the element type of the parameters, floating outputs back to float32:
targets keep their digits and the user's loss is computed in float32. Inside, the module is a plain low-precision one.

[Note: what is not cast] Floating buffers stay float32: rotary tables and running statistics lose too much with 8 bits.
Parameters of batch and instance normalisation stay float32 too (`sharding/units.py`). A module whose buffer meets
activations without a cast says so loudly: torch multiplies no bf16 matrix by a float32 one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LOW = (torch.bfloat16, torch.float16)


def install(model: nn.Module, dtype: torch.dtype | None) -> Callable[[], None]:
    """Cast inputs and outputs of `model` when its parameters are of the low precision `dtype`.

    Returns:
        A function that undoes it.
    """
    if dtype not in LOW:
        return lambda: None

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cast_floating(args, torch.float32, dtype), cast_floating(kwargs, torch.float32, dtype)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return cast_floating(output, dtype, torch.float32)

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def cast_floating(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """`value` with tensors of type `source` cast, in nested containers and dataclasses of any class.

    Containers without such a tensor come back as they are.
    """
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype == source else value
    if isinstance(value, dict):
        changed = {key: cast_floating(item, source, target) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        result = copy.copy(value)  # of its own class, e.g. a model output with attributes
        for key, item in changed.items():
            result[key] = item
        return result
    if isinstance(value, list | tuple):
        items = [cast_floating(item, source, target) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        is_named = isinstance(value, tuple) and type(value) is not tuple
        return type(value)(*items) if is_named else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        new = {name: cast_floating(item, source, target) for name, item in old.items()}
        return value if all(new[name] is old[name] for name in old) else dataclasses.replace(value, **new)
    return value
