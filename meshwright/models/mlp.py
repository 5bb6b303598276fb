"""A multi-layer perceptron, the smallest model that shows every policy.

Knows no mesh. Shape suffixes: B batch, I input features, H hidden width, C classes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.models.initial import Initial


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Sizes of an `MLP`: `num_layers` hidden layers of width `dim`."""

    num_layers: int
    dim: int
    input_dim: int
    num_classes: int


class MLP(nn.Module):
    """Hidden layers with ReLU, then a linear classifier."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.input_dim, *[config.dim] * config.num_layers]
        self.blocks = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(widths))
        self.head = nn.Linear(config.dim, config.num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs `(batch, input_dim)` to logits `(batch, num_classes)`."""
        x_BH = inputs
        for block in self.blocks:
            x_BH = F.relu(block(x_BH))
        return self.head(x_BH)

    def initial_values(self) -> dict[str, Initial]:
        """Weights uniform with variance 2 / fan-in (He et al. 2015, equation 10), biases zero."""
        values = {}
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                values[name] = Initial("zeros")
            else:
                values[name] = Initial("uniform", math.sqrt(6 / parameter.shape[1]))
        return values
