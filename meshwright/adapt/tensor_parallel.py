"""An unmodified module becomes one tensor-parallel rank's part of it: local parameters, swapped calls.

Owns the change itself, of parameters that stay the same objects and of forwards on instances. What is decided about
each layer is in `tensor_roles.py` and `tensor_plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshwright.adapt.sequence_parallel import install_tokens
from meshwright.adapt.tensor_derived import kinds_of, plan_derived
from meshwright.adapt.tensor_plan import (
    SplitPlan,
    plan_attention,
    plan_between,
    plan_embedding,
    plan_feed_forward,
    plan_gathered,
    plan_summed,
)
from meshwright.adapt.tensor_roles import find_roles, unknown_model
from meshwright.comm.ops import Group
from meshwright.layout.tensor_layout import LayoutMaker, Role, TensorLayout
from meshwright.partitioning.tensor_regions import DerivedLayout, LayerKind
from meshwright.sharding.memory import Initialiser

# From the layers that can be cut and the number of ranks to what is cut, by the model's graph.
Derive = Callable[[Mapping[str, LayerKind], int], DerivedLayout]


def split_model(
    model: nn.Module,
    group: Group,
    initialiser: Initialiser | None,
    own_roles: Mapping[str, str] | None = None,
    derive: Derive | None = None,
    *,
    sequence_parallel: bool = False,
) -> tuple[TensorLayout, Initialiser | None]:
    """Leave this rank its part of `model`, whose parameters change their shapes in place, and swap the calls.

    Args:
        model: whole, the same on every rank, on any device or without memory.
        group: the tensor-parallel ranks.
        initialiser: values of whole parameters on the meta device.
        own_roles: see `find_roles`.
        derive: for a model of which no roles are known.
        sequence_parallel: whether ranks have a part of the tokens between the pairs.

    Returns:
        The layout, and the initialiser of what is left.

    Raises:
        PlanError: E201 for more ranks than a rank's part allows, E226 for a model without a known layout, E227 for
            patterns that do not fit, E229 for a model whose tokens cannot be cut, E291 where the graph says that
            nothing can be cut.
    """
    roles = find_roles(model, own_roles)
    if roles is not None:
        plan = _planned(model, group, roles, own_roles, sequence_parallel)
    elif derive is None:
        raise unknown_model(model, "there is no loss with a batch to read its graph with")
    else:
        plan = SplitPlan(LayoutMaker(group.size, group.index), group)
        plan_derived(plan, model, derive(kinds_of(model), group.size), cuts_tokens=sequence_parallel)
    if plan.tokens is not None:
        plan.maker.is_partial(plan.tokens.partial(model, plan.maker.reduced_apart))
        install_tokens(model, plan.tokens)
    layout = plan.maker.finish()
    _keep_parts(model, layout)
    for name, forward in plan.forwards.items():
        # An attribute of the instance; the class keeps its method.
        vars(model.get_submodule(name))["forward"] = forward
    for module, attribute, value in plan.attributes:
        setattr(module, attribute, value)
    return layout, None if initialiser is None else _local(initialiser, model, layout)


def _planned(
    model: nn.Module,
    group: Group,
    roles: Mapping[str, Role],
    own: Mapping[str, str] | None,
    cuts_tokens: bool,
) -> SplitPlan:
    """By parents: an attention, a feed-forward, and layers by themselves."""
    plan = SplitPlan(LayoutMaker(group.size, group.index), group)
    if cuts_tokens:
        plan.cut_tokens(model, roles, head_ends=not own)
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
            if roles[child] in _ALONE:
                _ALONE[roles[child]](plan, model, child)
            elif roles[child] == "between":
                keys = [key for key, _ in modules[child].named_parameters(recurse=False)]
                plan_between(plan, modules[child], child, keys)
    return plan


# Layers without a partner.
_ALONE: Mapping[Role, Callable[[SplitPlan, nn.Module, str], None]] = MappingProxyType(
    {"vocabulary": plan_embedding, "gathered": plan_gathered, "summed": plan_summed}
)


# Parameters.


def _keep_parts(model: nn.Module, layout: TensorLayout) -> None:
    """Every cut parameter becomes this rank's part of itself; it stays the same object, so ties stay."""
    for name, parameter in model.named_parameters():
        if name in layout.cuts:
            cut = layout.cuts[name]
            pieces = [parameter.data.narrow(cut.dim, a, b - a) for a, b in cut.chunks(layout.index)]
            parameter.data = torch.cat(pieces, cut.dim)


def _local(initialiser: Initialiser, model: nn.Module, layout: TensorLayout) -> Initialiser:
    """First values of this rank's part of a parameter: its elements of the whole."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def local(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        runs = layout.runs(name, shapes[name], start, stop)
        parts = [initialiser(name, first, first + end - low, dtype).reshape(-1) for first, low, end in runs]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

    return local
