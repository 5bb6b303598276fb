"""An unmodified module becomes one tensor-parallel rank's part of it: local parameters, swapped calls.

Owns the change itself, of parameters that stay the same objects and of forwards on instances. What is decided about
each layer is in `tensor_roles.py` and `tensor_plan.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.adapt.tensor_plan import (
    SplitPlan,
    plan_attention,
    plan_embedding,
    plan_feed_forward,
    plan_gathered,
)
from meshwright.adapt.tensor_roles import find_roles
from meshwright.comm.ops import Group
from meshwright.layout.tensor_layout import LayoutMaker, TensorLayout
from meshwright.sharding.memory import Initialiser


def split_model(
    model: nn.Module,
    group: Group,
    initialiser: Initialiser | None,
    own_roles: Mapping[str, str] | None = None,
) -> tuple[TensorLayout, Initialiser | None]:
    """Leave this rank its part of `model`, whose parameters change their shapes in place, and swap the calls.

    Args:
        model: whole, the same on every rank, on any device or without memory.
        group: the tensor-parallel ranks.
        initialiser: values of whole parameters on the meta device.
        own_roles: see `find_roles`.

    Returns:
        The layout, and the initialiser of what is left.

    Raises:
        PlanError: E201 for more ranks than a rank's part allows, E226 for a model without a known layout, E227 for
            patterns that do not fit.
    """
    roles = find_roles(model, own_roles)
    plan = SplitPlan(LayoutMaker(group.size, group.index), group)
    modules = dict(model.named_modules())
    parents: dict[str, list[str]] = {}
    for name in roles:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, children in parents.items():
        named = {roles[child]: child for child in children}
        if "query" in named:
            plan_attention(plan, modules, parent, named)
        elif "row" in named:
            plan_feed_forward(plan, modules, [c for c in children if roles[c] == "column"], named["row"])
        for child in children:
            if roles[child] == "vocabulary":
                plan_embedding(plan, model, child)
            elif roles[child] == "gathered":
                plan_gathered(plan, model, child)
    layout = plan.maker.finish()
    _keep_parts(model, layout)
    for name, forward in plan.forwards.items():
        # An attribute of the instance; the class keeps its method.
        modules[name].__dict__["forward"] = forward
    for module, attribute, value in plan.attributes:
        setattr(module, attribute, value)
    return layout, None if initialiser is None else _local(initialiser, model, layout)


# Parameters.


def _keep_parts(model: nn.Module, layout: TensorLayout) -> None:
    """Every cut parameter becomes this rank's part of itself; it stays the same object, so ties stay."""
    for name, parameter in model.named_parameters():
        if name in layout.cuts:
            cut = layout.cuts[name]
            first = sum(cut.sizes[: layout.index])
            parameter.data = parameter.data.narrow(cut.dim, first, cut.sizes[layout.index]).clone()


def _local(initialiser: Initialiser, model: nn.Module, layout: TensorLayout) -> Initialiser:
    """First values of this rank's part of a parameter: its elements of the whole."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def local(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        runs = layout.runs(name, shapes[name], start, stop)
        parts = [initialiser(name, first, first + end - low, dtype).reshape(-1) for first, low, end in runs]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

    return local
