"""What each optimizer of torch needs to see of a parameter. No torch.

An elementwise update may run on any slice of a flat tensor. Others look at a whole matrix (its singular vectors, the
means of its rows) and run only where a rank holds whole parameters: on one rank, under ddp, or with whole ownership.
Optimizers that look at more than one parameter, or run the model themselves, cannot run here at all.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from meshwright.errors import PlanError

Kind = Literal["elementwise", "whole", "refused"]

# By class name in torch.optim.
OPTIMIZER_KINDS = MappingProxyType[str, Kind](
    {
        **dict.fromkeys(
            (
                "Adadelta",
                "Adagrad",
                "Adam",
                "AdamW",
                "Adamax",
                "ASGD",
                "NAdam",
                "RAdam",
                "RMSprop",
                "Rprop",
                "SGD",
            ),
            "elementwise",
        ),
        "Adafactor": "whole",
        "Muon": "whole",
        "LBFGS": "refused",
        "SparseAdam": "refused",
    }
)
_REASONS = MappingProxyType(
    {
        "LBFGS": "it runs the model several times a step and takes products over all parameters",
        "SparseAdam": "it takes sparse gradients, and gradients here are reduced in dense buckets",
    }
)


def optimizer_kind(name: str) -> Kind:
    """What the class called `name` needs; one that torch does not have counts as looking at whole parameters."""
    return OPTIMIZER_KINDS.get(name, "whole")


def check_optimizer(name: str, *, holds_whole: bool) -> None:
    """Refuse the optimizer class called `name` where it would compute something else.

    Args:
        name: of the class.
        holds_whole: whether every rank holds whole parameters (one rank, ddp or whole ownership).

    Raises:
        PlanError: E204.
    """
    kind = optimizer_kind(name)
    if kind == "refused":
        raise PlanError(
            "E204", f"torch.optim.{name} cannot run here: {_REASONS[name]}. Use AdamW, SGD or Muon."
        )
    if kind == "whole" and not holds_whole:
        raise PlanError(
            "E204",
            f"{name} looks at whole parameters, and flat shards cut them anywhere. Set "
            f'plan.ownership="whole", or plan.zero=0.',
        )
