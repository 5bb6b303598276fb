"""Models and machines as numbers, with aliases. No torch.

Owns what is known beforehand about a model's shape and a device's speed. Knows no layout and no plan.
"""

from meshwright.presets.counts import matmul_flops_per_token, matmul_parameters, num_parameters
from meshwright.presets.machines import MACHINES, Link, Machine, find_machine, machine_of_device
from meshwright.presets.models import FAMILIES, MODELS, Family, ModelPreset, find_model

__all__ = [
    "FAMILIES",
    "MACHINES",
    "MODELS",
    "Family",
    "Link",
    "Machine",
    "ModelPreset",
    "find_machine",
    "find_model",
    "machine_of_device",
    "matmul_flops_per_token",
    "matmul_parameters",
    "num_parameters",
]
