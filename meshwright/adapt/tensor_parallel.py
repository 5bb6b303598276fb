"""Tensor-parallel layers in an unmodified module: roles by patterns of names, local parameters, swapped calls.

Owns the tables of roles, and how a module of each role computes on its part. What is cut how is arithmetic of
`layout/tensor_layout.py`; the products are those of `tensor/`. Modules between a column and a row split must take
their widths from what comes in (`view(..., -1, head_dim)`), or from an attribute that counts heads under a usual name.

[Note: one sum for several projections] Query, key and value read one tensor. Each of them is a module of its own, so
the first that sees a tensor makes the copy whose gradient is summed over the group, and its siblings take the same one:
autograd adds up their gradients before the one all-reduce.

[Note: fewer key/value heads than ranks] Every rank holds all of them, computes those of its query heads, one for each,
and the gradient is summed over the group where the rows are taken. So no rank needs a group of its own for them.

Simplification: outputs of the head are gathered, whatever loss follows.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.comm import autograd
from meshwright.comm.ops import Group
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import (
    CutRegion,
    LayoutMaker,
    RepeatedHeads,
    Role,
    TensorLayout,
    split_heads,
)
from meshwright.sharding.memory import Initialiser
from meshwright.tensor import linear, vocabulary

# Patterns of module names to roles, tried in order: ours, and those of Llama, Mistral, Qwen2 in transformers.
TABLES: tuple[Mapping[str, Role], ...] = (
    MappingProxyType(
        {
            "token_embedding": "vocabulary",
            "*.attention.query": "query",
            "*.attention.key": "key",
            "*.attention.value": "value",
            "*.attention.output": "output",
            "*.feed_forward.gate": "column",
            "*.feed_forward.up": "column",
            "*.feed_forward.down": "row",
            "head": "gathered",
        }
    ),
    MappingProxyType(
        {
            "*embed_tokens": "vocabulary",
            "*.self_attn.q_proj": "query",
            "*.self_attn.k_proj": "key",
            "*.self_attn.v_proj": "value",
            "*.self_attn.o_proj": "output",
            "*.mlp.gate_proj": "column",
            "*.mlp.up_proj": "column",
            "*.mlp.down_proj": "row",
            "lm_head": "gathered",
        }
    ),
)


# Attributes of an attention that count its heads, of queries and of keys: they become this rank's own numbers.
_HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
_KV_HEAD_COUNTS = ("num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads")


def find_roles(model: nn.Module, own: Mapping[str, str] | None = None) -> dict[str, Role]:
    """Module name to role, by the user's patterns, else by the first table of which a pair of column and row matches.

    Args:
        model: whole.
        own: pattern of module names, or several with `|` between them, to role.

    Raises:
        PlanError: E226 for a model that no table fits, E227 for a pattern that matches no layer or another role's.
    """
    if own:
        roles = _own_roles(model, own)
        _check_pairs(roles)
        return roles
    for table in TABLES:
        roles = {name: role for pattern, role in table.items() for name in _matching(model, pattern)}
        if {"query", "output"} <= set(roles.values()) or {"column", "row"} <= set(roles.values()):
            _check_pairs(roles)
            return roles
    raise PlanError(
        "E226",
        f"plan.tp > 1, and no layout is known for {type(model).__name__}: its modules are named neither as in our GPT "
        f"and Llama (attention.query, feed_forward.up) nor as in Llama of transformers (self_attn.q_proj, "
        f"mlp.up_proj). Name the roles of its layers in plan.layout, or set plan.tp=1.",
    )


def _matching(model: nn.Module, patterns: str) -> list[str]:
    """Linear layers and embeddings with a name of a pattern."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split("|"))
    ]


def _own_roles(model: nn.Module, own: Mapping[str, str]) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    by: dict[str, str] = {}
    for pattern, role in own.items():
        found = _matching(model, pattern)
        if not found:
            layers = [
                name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.Embedding)
            ]
            near = difflib.get_close_matches(pattern, layers, 3, 0.0)
            raise PlanError(
                "E227",
                f"plan.layout: {pattern!r} matches no nn.Linear and no nn.Embedding of {type(model).__name__}. Some of "
                f"its {len(layers)} layers: {', '.join(near)}.",
            )
        for name in found:
            if by.setdefault(name, pattern) != pattern:
                raise PlanError(
                    "E227",
                    f"plan.layout: {by[name]!r} and {pattern!r} both match {name!r}. Give each layer one role.",
                )
            is_table = isinstance(model.get_submodule(name), nn.Embedding)
            if is_table != (role == "vocabulary"):
                kind = "nn.Embedding" if is_table else "nn.Linear"
                raise PlanError(
                    "E227",
                    f"plan.layout: {pattern!r} = {role!r} matches {name!r}, an {kind}. An embedding has the role "
                    f"vocabulary, and nothing else has it.",
                )
            roles[name] = cast(Role, role)
    return roles


def _check_pairs(roles: Mapping[str, Role]) -> None:
    """E226 where what is cut would never be summed."""
    by_parent: dict[str, set[Role]] = {}
    for name, role in roles.items():
        if role not in ("vocabulary", "gathered"):
            by_parent.setdefault(name.rpartition(".")[0], set()).add(role)
    for parent, found in by_parent.items():
        if not (found == {"query", "key", "value", "output"} or found == {"column", "row"}):
            raise PlanError(
                "E226",
                f"plan.tp > 1: {parent!r} has {', '.join(sorted(found))} of a layout and not its other parts "
                f"(query, key, value and output, or column and row). Name them in plan.layout, or set plan.tp=1.",
            )


@dataclass(frozen=True)
class _Cut:
    """What a region between a column and a row split has of its heads and channels; see `CutRegion`."""

    region: CutRegion
    heads: tuple[int, int, int] | None
    channels: tuple[int, int, int]

    def enter(self) -> None:
        """A column split runs."""
        self.region.heads, self.region.channels = self.heads, self.channels


def _place(sizes: Sequence[int], index: int) -> tuple[int, int, int]:
    """(first, ours, all) of chunks."""
    return sum(sizes[:index]), sizes[index], sum(sizes)


@dataclass
class _Shared:
    """The input of sibling projections and its copy; see [Note: one sum for several projections]."""

    num_users: int
    cut: _Cut
    source: Tensor | None = None
    copied: Tensor | None = None
    left: int = 0

    def of(self, x: Tensor, group: Group, cause: str) -> Tensor:
        """The one copy of x for all siblings; what follows is a part, up to the row split."""
        self.cut.enter()
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if x is not self.source or self.copied is None:
            self.source, self.copied, self.left = x, autograd.copy(x, group, cause=cause), self.num_users
        copied = self.copied
        self.left -= 1
        if not self.left:
            self.source = self.copied = None
        return copied


@dataclass
class _Plan:
    """What is decided about a model before it changes."""

    maker: LayoutMaker
    group: Group
    forwards: dict[str, Callable[..., Any]] = field(default_factory=dict)
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)


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
    plan = _Plan(LayoutMaker(group.size, group.index), group)
    modules = dict(model.named_modules())
    parents: dict[str, list[str]] = {}
    for name in roles:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, children in parents.items():
        named = {roles[child]: child for child in children}
        if "query" in named:
            _plan_attention(plan, modules, parent, named)
        elif "row" in named:
            _plan_feed_forward(plan, modules, [c for c in children if roles[c] == "column"], named["row"])
        for child in children:
            if roles[child] == "vocabulary":
                _plan_embedding(plan, model, child)
            elif roles[child] == "gathered":
                _plan_gathered(plan, model, child)
    layout = plan.maker.finish()
    _keep_parts(model, layout)
    for name, forward in plan.forwards.items():
        # An attribute of the instance; the class keeps its method.
        modules[name].__dict__["forward"] = forward
    for module, attribute, value in plan.attributes:
        setattr(module, attribute, value)
    return layout, None if initialiser is None else _local(initialiser, model, layout)


def _plan_attention(plan: _Plan, modules: dict[str, Any], parent: str, named: dict[Role, str]) -> None:
    head_dim = _head_dim(modules[parent], parent, modules[named["query"]].out_features)
    num_heads = modules[named["query"]].out_features // head_dim
    num_kv = modules[named["key"]].out_features // head_dim
    maker = plan.maker
    heads = split_heads(num_heads, num_kv, plan.group.size, where=parent)
    maker.note_uneven(heads.query, f"{num_heads} heads of {parent.rpartition('.')[2]}")
    widths = tuple(n * head_dim for n in heads.query)
    cut = _Cut(plan.maker.region, _place(heads.query, plan.group.index), _place(widths, plan.group.index))
    shared = _Shared(3, cut)
    _plan_column(plan, modules, named["query"], widths, shared)
    repeated = RepeatedHeads(head_dim, heads.kv_heads_of(plan.group.index), num_kv)
    halves: tuple[Role, ...] = ("key", "value")
    for role in halves:
        if heads.kv is not None:
            _plan_column(plan, modules, named[role], tuple(n * head_dim for n in heads.kv), shared)
        else:
            _plan_repeated(plan, modules, named[role], repeated, shared)
    _plan_row(plan, modules, named["output"], widths)
    maker.call("all_reduce")  # backward, of the one copy
    ours = heads.query[plan.group.index]
    ours_kv = ours if heads.kv is None else heads.kv[plan.group.index]
    for names, whole, part in ((_HEAD_COUNTS, num_heads, ours), (_KV_HEAD_COUNTS, num_kv, ours_kv)):
        for name in names:
            if vars(modules[parent]).get(name) == whole:
                plan.attributes.append((modules[parent], name, part))
    if heads.kv is None:
        maker.warn(
            f"W203 tp={plan.group.size} exceeds {num_kv} key/value heads of {parent.rpartition('.')[2]}: every rank "
            f"holds all of them, and computes one for each of its query heads"
        )
        # One a query head: classes of transformers repeat by this attribute.
        if isinstance(getattr(modules[parent], "num_key_value_groups", None), int):
            plan.attributes.append((modules[parent], "num_key_value_groups", 1))


def _head_dim(attention: nn.Module, name: str, width: int) -> int:
    """Width of a head, as the attention says it or its number of heads."""
    head_dim = getattr(attention, "head_dim", None)
    if isinstance(head_dim, int):
        return head_dim
    for count in _HEAD_COUNTS:
        value = getattr(attention, count, None)
        if isinstance(value, int) and value and width % value == 0:
            return width // value
    raise PlanError(
        "E226",
        f"plan.tp > 1: {name!r} has no attribute head_dim, the width of a head, and none of "
        f"{', '.join(_HEAD_COUNTS)}. Set plan.tp=1.",
    )


def _plan_feed_forward(plan: _Plan, modules: dict[str, Any], columns: Sequence[str], row: str) -> None:
    width = modules[row].in_features
    sizes = plan.maker.sizes(width, f"channels of {row.rpartition('.')[0].rpartition('.')[2]}")
    shared = _Shared(len(columns), _Cut(plan.maker.region, None, _place(sizes, plan.group.index)))
    for column in columns:
        _plan_column(plan, modules, column, sizes, shared)
    _plan_row(plan, modules, row, sizes)
    plan.maker.call("all_reduce")


def _plan_column(
    plan: _Plan, modules: dict[str, Any], name: str, sizes: tuple[int, ...], shared: _Shared
) -> None:
    for part in _parts(modules[name]):
        plan.maker.cut(f"{name}.{part}", 0, sizes)
    plan.maker.keeps(name, sizes)
    plan.forwards[name] = partial(_column, modules[name], shared, plan.group, f"column {name}")


def _plan_repeated(
    plan: _Plan, modules: dict[str, Any], name: str, heads: RepeatedHeads, shared: _Shared
) -> None:
    plan.maker.repeats(name, heads, len(_parts(modules[name])))
    rows = torch.tensor(heads.rows)
    plan.forwards[name] = partial(_repeated, modules[name], shared, plan.group, rows, f"rows {name}")


def _plan_row(plan: _Plan, modules: dict[str, Any], name: str, sizes: tuple[int, ...]) -> None:
    plan.maker.cut(f"{name}.weight", 1, sizes)
    plan.maker.call("all_reduce")
    plan.forwards[name] = partial(_row, modules[name], plan.maker.region, plan.group, f"row {name}")


def _plan_embedding(plan: _Plan, model: nn.Module, name: str) -> None:
    module = cast(nn.Embedding, model.get_submodule(name))
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise PlanError(
            "E226",
            f"plan.tp > 1: the embedding {name!r} has max_norm, scale_grad_by_freq or sparse set, which look at whole "
            f"rows of all tokens. Set plan.tp=1.",
        )
    sizes = plan.maker.sizes(module.num_embeddings, f"rows of {name.rpartition('.')[2]}")
    plan.maker.cut(_first_name(model, f"{name}.weight"), 0, sizes)
    plan.maker.call("all_reduce")
    first = sum(sizes[: plan.group.index])
    plan.forwards[name] = partial(_embedding, module, plan.group, first, f"embedding {name}")


def _plan_gathered(plan: _Plan, model: nn.Module, name: str) -> None:
    module = cast(nn.Linear, model.get_submodule(name))
    sizes = plan.maker.sizes(module.out_features, f"outputs of {name.rpartition('.')[2]}")
    for part in _parts(module):
        plan.maker.cut(_first_name(model, f"{name}.{part}"), 0, sizes)
    plan.maker.call("all_gather")
    plan.maker.call("all_reduce")
    plan.forwards[name] = partial(_gathered, module, plan.group, sizes, f"head {name}")


def _parts(module: nn.Linear) -> list[str]:
    return ["weight"] if module.bias is None else ["weight", "bias"]


def _first_name(model: nn.Module, name: str) -> str:
    """The name under which a parameter is registered first: a tied one is cut once."""
    parameter = model.get_parameter(name)
    return next(first for first, candidate in model.named_parameters() if candidate is parameter)


# What runs instead of a module's forward.


def _column(module: nn.Linear, shared: _Shared, group: Group, cause: str, x: Tensor) -> Tensor:
    return F.linear(shared.of(x, group, cause), module.weight, module.bias)


def _repeated(
    module: nn.Linear, shared: _Shared, group: Group, rows: Tensor, cause: str, x: Tensor
) -> Tensor:
    rows = rows.to(x.device)
    weight = autograd.copy(module.weight, group, cause=cause)[rows]
    bias = None if module.bias is None else autograd.copy(module.bias, group, cause=cause)[rows]
    return F.linear(shared.of(x, group, cause), weight, bias)


def _row(module: nn.Linear, region: CutRegion, group: Group, cause: str, x: Tensor) -> Tensor:
    region.leave()
    return linear.row(x, module.weight, module.bias, group, cause=cause)


def _embedding(module: nn.Embedding, group: Group, first: int, cause: str, tokens: Tensor) -> Tensor:
    padding = module.padding_idx
    weight = module.weight
    if padding is not None and first <= padding < first + weight.shape[0]:
        # The padding's row gets no gradient, as in one table.
        weight = torch.where(
            (torch.arange(weight.shape[0], device=weight.device) == padding - first)[:, None],
            weight.detach(),
            weight,
        )
    return vocabulary.embedding(tokens, weight, group, first=first, cause=cause)


def _gathered(module: nn.Linear, group: Group, sizes: Sequence[int], cause: str, x: Tensor) -> Tensor:
    return linear.naive_column(x, module.weight, module.bias, group, sizes=sizes, cause=cause)


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
