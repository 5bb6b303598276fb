"""What this rank puts into each gradient, seen before any reduction: a few elements of it.

Owns hooks on parameters. They see a gradient as autograd hands it over, so a fault in memories or communication comes
later and one in the loss came before. In pipelines it is told of products that go past autograd.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.adapt.linear import Deferral
from meshwright.verification.sources import sampled_elements


class Contributions:
    """Sums samples of the gradients of all backwards since `clear`.

    Args:
        parameters: by name.
        deferral: through which linear layers add gradients past autograd; None: none do.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], deferral: Deferral | None) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        if deferral is not None:
            deferral.informed = self._add_product
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

    def _add(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None:  # it went past autograd, which comes here with nothing
            return
        self._add_values(name, gradient.detach().reshape(-1)[self._places[name]].double())

    def _add_product(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        name = self._names[weight]
        rows, columns = self._places[name] // right.shape[1], self._places[name] % right.shape[1]
        self._add_values(name, (left[rows] * right[:, columns].t()).double().sum(1))

    def _add_values(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums[name] + values if name in self._sums else values
