"""A derived layout carried out: each region of a model's graph becomes cuts, calls and sizes of one rank.

Owns which layers can be cut at all, and how a region of any layers runs: fused projections, weights that are stored
(inputs, outputs), parameters that are cut with them. What is cut is found in `partitioning/derive_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from meshwright.adapt import tensor_calls
from meshwright.adapt.shape_calls import LocalCall, forwards_with_sizes, local_calls
from meshwright.adapt.tensor_calls import CutEntry, SharedInput
from meshwright.adapt.tensor_plan import (
    SplitPlan,
    first_name,
    place_of,
    plan_attention,
    plan_between,
    plan_embedding,
    plan_gathered,
)
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import Role, even_sizes, too_many_ranks
from meshwright.partitioning.tensor_regions import DerivedLayout, LayerKind, Part, Region, ShapeKind

_MOST_REASONS = 6


def kinds_of(model: nn.Module) -> dict[str, LayerKind]:
    """The layers of a model that can be cut, by name."""
    found: dict[str, LayerKind] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind is nn.Linear:
            found[name] = "linear"
        elif kind is nn.Embedding:
            table = cast(nn.Embedding, module)
            if table.max_norm is None and not table.scale_grad_by_freq and not table.sparse:
                found[name] = "table"
        elif (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
            found[name] = "transposed"
    return found


def plan_derived(
    plan: SplitPlan, model: nn.Module, derived: DerivedLayout, *, cuts_tokens: bool = False
) -> None:
    """Decide about all layers of a model.

    Raises:
        PlanError: E201 for more ranks than heads, E229 for tokens that cannot be cut, E291 where nothing can be cut.
    """
    if not derived.regions:
        reasons = [f"{name} ({reason})" for name, reason in derived.whole.items()]
        raise PlanError(
            "E291",
            f"plan.tp = {plan.group.size}: no layers of {type(model).__name__} can be split over ranks. Whole: "
            f"{', '.join(reasons[:_MOST_REASONS])}. Name roles in plan.layout, or set plan.tp=1.",
        )
    if cuts_tokens:
        roles: dict[str, Role] = {c.module: "column" for region in derived.regions for c in region.columns}
        roles |= {row.module: "row" for region in derived.regions for row in region.rows}
        roles |= {name.rpartition(".")[0]: "between" for region in derived.regions for name in region.summed}
        plan.cut_tokens(model, {**roles, **dict.fromkeys(derived.heads, "gathered")}, head_ends=False)
    modules = dict(model.named_modules())
    known: dict[str, dict[ShapeKind, list[LocalCall]]] = {}
    for table in derived.tables:
        plan_embedding(plan, model, table)
    for region in derived.regions:
        named = _shared_heads(region, modules, plan.group.size)
        if named is not None:
            plan_attention(plan, modules, region.rows[0].module.rpartition(".")[0], named)
            _plan_summed(plan, model, region)
            continue
        units = _plan_region(plan, model, region)
        naming = {call.module for call in region.shapes if call.names}
        shapes = [call for call in region.shapes if call.module in naming]
        for module, calls in local_calls(shapes, region.units, units).items():
            for kind, own in calls.items():
                known.setdefault(module, {}).setdefault(kind, []).extend(own)
    for head in derived.heads:
        plan_gathered(plan, model, head)
    plan.forwards.update(forwards_with_sizes(modules, known, plan.forwards))
    for text in derived.describe_whole():
        plan.maker.warn(f"W211 {text}")


def _shared_heads(region: Region, modules: Mapping[str, nn.Module], num_ranks: int) -> dict[Role, str] | None:
    """Query, key, value and output of an attention with fewer key/value heads than ranks, if its code repeats them."""
    if num_ranks <= region.units or region.heads <= 1:
        return None
    layers = [column.module for column in region.columns] + [row.module for row in region.rows]
    parents = {name.rpartition(".")[0] for name in layers}
    alone = len(region.columns) == 3 and len(region.rows) == 1 and len(parents) == 1 and not region.others
    # Classes of transformers repeat key/value heads by this attribute, which can be 1.
    if not alone or not isinstance(getattr(modules[parents.pop()], "num_key_value_groups", None), int):
        return None
    columns = sorted(region.columns, key=lambda column: -column.part.width)
    names: tuple[Role, ...] = ("query", "key", "value")
    return {
        **{role: column.module for role, column in zip(names, columns, strict=True)},
        "output": region.rows[0].module,
    }


def _plan_region(plan: SplitPlan, model: nn.Module, region: Region) -> int:
    """Decide about one region; returns how many units this rank has."""
    where = next(
        (name for name in reversed(region.rows[0].module.split(".")[:-1]) if not name.isdigit()), "the model"
    )
    what = f"{'heads' if region.heads else 'channels'} of {where}"
    if region.units < plan.group.size:
        raise too_many_ranks(plan.group.size, region.units, what)
    units = even_sizes(region.units, plan.group.size)
    shown = _sizes(units, Part(1, max(1, region.heads)))
    plan.maker.note_uneven(shown, f"{sum(shown)} {what}")
    channels = _sizes(units, Part(1, region.rows[0].part.width))
    heads = _sizes(units, Part(1, region.heads))
    entry = CutEntry(
        plan.maker.region,
        place_of(heads, plan.group.index) if region.heads else None,
        place_of(channels, plan.group.index),
    )
    # Key/value heads are one a unit.
    for sizes in (channels, *([heads, units] if region.heads else [])):
        plan.maker.runs_on(sizes)
    _plan_layers(plan, model, region, units, entry)
    _plan_summed(plan, model, region)
    for other in region.others:
        name = first_name(model, other.parameter)
        plan.maker.cut(name, other.dim, _sizes(units, other.part), other.part.count)
    num_forward, num_backward = region.num_sums
    for number in range(num_forward):
        plan.call_row(region.rows[min(number, len(region.rows) - 1)].module)
    for number in range(num_backward):
        plan.call_columns(region.columns[min(number, len(region.columns) - 1)].module)
    return units[plan.group.index]


def _plan_summed(plan: SplitPlan, model: nn.Module, region: Region) -> None:
    own: dict[str, list[str]] = {}
    for parameter in region.summed:
        owner, _, key = parameter.rpartition(".")
        own.setdefault(owner, []).append(key)
    for name, keys in own.items():
        plan_between(plan, model.get_submodule(name), name, keys)


def _sizes(units: tuple[int, ...], part: Part) -> tuple[int, ...]:
    return tuple(count * part.width for count in units)


@dataclass(frozen=True)
class _Layer:
    """A layer, the dim of its weight that counts outputs, and its two calls."""

    module: Any
    outputs: int
    column: Callable[..., Tensor]
    row: Callable[..., Tensor]


def _layer(module: nn.Module) -> _Layer:
    if type(module) is nn.Linear:
        return _Layer(module, 0, tensor_calls.column, tensor_calls.row)
    return _Layer(module, 1, tensor_calls.transposed_column, tensor_calls.transposed_row)


def _plan_layers(
    plan: SplitPlan, model: nn.Module, region: Region, units: tuple[int, ...], entry: CutEntry
) -> None:
    """Columns, each with the input that it shares, and rows."""
    sources = [column.source for column in region.columns]
    parent_of = {column.source: column.module.rpartition(".")[0] for column in region.columns}
    shared = {
        source: SharedInput(sources.count(source), entry, plan.tokens_of(parent))
        for source, parent in parent_of.items()
    }
    for column in region.columns:
        name, sizes = column.module, _sizes(units, column.part)
        layer = _layer(model.get_submodule(name))
        plan.maker.cut(first_name(model, f"{name}.weight"), layer.outputs, sizes, column.part.count)
        if layer.module.bias is not None:
            plan.maker.cut(first_name(model, f"{name}.bias"), 0, sizes, column.part.count)
        plan.maker.keeps(name, sizes, column.part.count)
        plan.forwards[name] = partial(
            layer.column, layer.module, shared[column.source], plan.group, f"column {name}"
        )
    tokens = None if plan.tokens is None else plan.tokens.cut
    for row in region.rows:
        layer = _layer(model.get_submodule(row.module))
        name = first_name(model, f"{row.module}.weight")
        plan.maker.cut(name, 1 - layer.outputs, _sizes(units, row.part), row.part.count)
        plan.forwards[row.module] = partial(
            layer.row, layer.module, plan.maker.region, plan.group, tokens, f"row {row.module}"
        )
