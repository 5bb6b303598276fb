"""What this rank puts into each gradient, seen before any reduction: a few elements of it.

Owns hooks on parameters. They see a gradient as autograd hands it over, so a fault in memories or communication comes
later and one in the loss came before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.verification.sources import sampled_elements


class Contributions:
    """Sums samples of the gradients of all backwards since `clear`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._sums: dict[str, Tensor] = {}
        self._places = {
            name: torch.tensor(sampled_elements(parameter.numel()))
            for name, parameter in parameters.items()
            if parameter.requires_grad and not parameter.is_complex()
        }
        for name in self._places:
            parameters[name].register_hook(lambda gradient, name=name: self._add(name, gradient))

    def clear(self) -> None:
        """Begin a step."""
        self._sums.clear()

    def elements(self, name: str, factor: float) -> dict[int, float]:
        """Flat element to what this rank put in, times `factor`; empty where it put in nothing."""
        if name not in self._sums:
            return {}
        values = (self._sums[name] * factor).tolist()
        return dict(zip(self._places[name].tolist(), values, strict=True))

    def _add(self, name: str, gradient: Tensor) -> None:
        values = gradient.detach().reshape(-1)[self._places[name]].double()
        self._sums[name] = self._sums[name] + values if name in self._sums else values
