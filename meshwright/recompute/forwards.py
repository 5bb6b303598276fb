"""Replaced forwards of module instances, and how they are put back; classes keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def replace_forwards(
    modules: Mapping[str, nn.Module], make: Callable[[str, Forward], Forward | None]
) -> Callable[[], None]:
    """Let `make(name, forward)` give each module another forward; None leaves it.

    Returns:
        A function that puts back what was there.
    """
    own = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        made = make(name, module.forward)
        if made is not None:
            vars(module)["forward"] = made

    def undo() -> None:
        for name, module in modules.items():
            vars(module).pop("forward", None)
            if own[name] is not None:
                vars(module)["forward"] = own[name]

    return undo
