"""What each layer of a model becomes on one tensor-parallel rank: its cut, its call, its collectives.

Owns how the roles of `tensor_roles.py` are carried out. What is cut how is arithmetic of `layout/tensor_layout.py`; the
calls are those of `tensor_calls.py`. Modules between a column and a row split must take their widths from what comes in
(`view(..., -1, head_dim)`), or from an attribute that counts heads under a usual name.

[Note: fewer key/value heads than ranks] Every rank holds all of them, computes those of its query heads, one for each,
and the gradient is summed over the group where the rows are taken. So no rank needs a group of its own for them.

The head's outputs stay cut for a cross-entropy and are gathered for anything else (`cut_logits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from meshwright.adapt import tensor_calls
from meshwright.adapt.sequence_parallel import TokenPlan, plan_tokens
from meshwright.adapt.tensor_calls import CutEntry, SharedInput, Tokens
from meshwright.comm.ops import Group
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import LayoutMaker, RepeatedHeads, Role, TokenChain, split_heads

# Attributes of an attention that count its heads, of queries and of keys: they become this rank's own numbers.
_HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
_KV_HEAD_COUNTS = ("num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads")


def place_of(sizes: Sequence[int], index: int) -> tuple[int, int, int]:
    """(first, ours, all) of chunks."""
    return sum(sizes[:index]), sizes[index], sum(sizes)


@dataclass
class SplitPlan:
    """What is decided about a model before it changes."""

    maker: LayoutMaker
    group: Group
    tokens: TokenPlan | None = None
    forwards: dict[str, Callable[..., Any]] = field(default_factory=dict)
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    def tokens_of(self, parent: str) -> Tokens:
        """How a pair in module `parent` gets its tokens."""
        if self.tokens is None:
            return None
        return "whole" if parent in self.tokens.whole_inside else self.tokens.cut

    def call_pair(self, column: str, row: str) -> None:
        """Collectives of a pair, forward and backward."""
        self.call_row(row)
        self.call_columns(column)

    def call_row(self, row: str) -> None:
        """Collectives of the sum behind a row split."""
        self.maker.call("all_reduce" if self.tokens is None else "reduce_scatter", row, within=row)
        if self.tokens is not None:
            self.maker.call("all_gather", row)

    def call_columns(self, column: str) -> None:
        """Collectives of the input of column splits, whose gradient is summed."""
        if self.tokens is None:
            self.maker.call("all_reduce", column)
            return
        parent = column.rpartition(".")[0]
        # A hook before the module in which the pair stands alone is no part of its forward.
        before = parent.rpartition(".")[0] if self.tokens_of(parent) == "whole" else column
        self.maker.call("all_gather", column, within=before)
        self.maker.call("reduce_scatter", column)

    def cut_tokens(self, model: nn.Module, roles: Mapping[str, Role], *, head_ends: bool) -> None:
        """Between the pairs of `roles` ranks have a part of the tokens; see `plan_tokens`."""
        self.tokens = plan_tokens(model, self.group, self.maker.region, roles, head_ends=head_ends)
        self.maker.cuts_tokens(TokenChain(self.tokens.blocks, self.tokens.last))
        self.maker.call("all_gather", self.tokens.first)  # into the chain backward
        if self.tokens.last is not None:
            self.maker.call("all_gather", self.tokens.last)  # out of it forward


def plan_attention(plan: SplitPlan, modules: dict[str, Any], parent: str, named: dict[Role, str]) -> None:
    """Query, key and value by columns, output by rows, in whole heads."""
    head_dim = _head_dim(modules[parent], parent, modules[named["query"]].out_features)
    num_heads = modules[named["query"]].out_features // head_dim
    num_kv = modules[named["key"]].out_features // head_dim
    maker = plan.maker
    heads = split_heads(num_heads, num_kv, plan.group.size, where=parent)
    maker.note_uneven(heads.query, f"{num_heads} heads of {parent.rpartition('.')[2]}")
    for sizes in (heads.query, *([] if heads.kv is None else [heads.kv])):
        maker.runs_on(sizes)
    if heads.kv is not None:
        maker.runs_on(heads.kv)
    widths = tuple(n * head_dim for n in heads.query)
    cut = CutEntry(
        plan.maker.region, place_of(heads.query, plan.group.index), place_of(widths, plan.group.index)
    )
    shared = SharedInput(3, cut, plan.tokens_of(parent))
    _plan_column(plan, modules, named["query"], widths, shared)
    repeated = RepeatedHeads(head_dim, heads.kv_heads_of(plan.group.index), num_kv)
    halves: tuple[Role, ...] = ("key", "value")
    for role in halves:
        if heads.kv is not None:
            _plan_column(plan, modules, named[role], tuple(n * head_dim for n in heads.kv), shared)
        else:
            _plan_repeated(plan, modules, named[role], repeated, shared)
    _plan_row(plan, modules, named["output"], widths)
    plan.call_pair(named["query"], named["output"])
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


def plan_feed_forward(plan: SplitPlan, modules: dict[str, Any], columns: Sequence[str], row: str) -> None:
    """One or more layers of one input by columns, the one that follows by rows."""
    width = modules[row].in_features
    sizes = plan.maker.sizes(width, f"channels of {row.rpartition('.')[0].rpartition('.')[2]}")
    cut = CutEntry(plan.maker.region, None, place_of(sizes, plan.group.index))
    shared = SharedInput(len(columns), cut, plan.tokens_of(row.rpartition(".")[0]))
    for column in columns:
        _plan_column(plan, modules, column, sizes, shared)
    _plan_row(plan, modules, row, sizes)
    plan.call_pair(columns[0], row)


def _plan_column(
    plan: SplitPlan, modules: dict[str, Any], name: str, sizes: tuple[int, ...], shared: SharedInput
) -> None:
    for part in _parts(modules[name]):
        plan.maker.cut(f"{name}.{part}", 0, sizes)
    plan.maker.keeps(name, sizes)
    plan.forwards[name] = partial(tensor_calls.column, modules[name], shared, plan.group, f"column {name}")


def _plan_repeated(
    plan: SplitPlan, modules: dict[str, Any], name: str, heads: RepeatedHeads, shared: SharedInput
) -> None:
    plan.maker.repeats(name, heads, len(_parts(modules[name])))
    rows = torch.tensor(heads.rows)
    plan.forwards[name] = partial(
        tensor_calls.repeated, modules[name], shared, plan.group, rows, f"rows {name}"
    )


def _plan_row(plan: SplitPlan, modules: dict[str, Any], name: str, sizes: tuple[int, ...]) -> None:
    plan.maker.cut(f"{name}.weight", 1, sizes)
    tokens = None if plan.tokens is None else plan.tokens.cut
    plan.forwards[name] = partial(
        tensor_calls.row, modules[name], plan.maker.region, plan.group, tokens, f"row {name}"
    )


def plan_embedding(plan: SplitPlan, model: nn.Module, name: str) -> None:
    """A table by rows."""
    module = cast(nn.Embedding, model.get_submodule(name))
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise PlanError(
            "E226",
            f"plan.tp > 1: the embedding {name!r} has max_norm, scale_grad_by_freq or sparse set, which look at whole "
            f"rows of all tokens. Set plan.tp=1.",
        )
    sizes = plan.maker.sizes(module.num_embeddings, f"rows of {name.rpartition('.')[2]}")
    plan.maker.cut(first_name(model, f"{name}.weight"), 0, sizes)
    plan.maker.call("all_reduce", name, within=name)
    first = sum(sizes[: plan.group.index])
    plan.forwards[name] = partial(tensor_calls.embedding, module, plan.group, first, f"embedding {name}")


def plan_gathered(plan: SplitPlan, model: nn.Module, name: str) -> None:
    """A layer by columns whose outputs are gathered where they are used as a whole."""
    module = cast(nn.Linear, model.get_submodule(name))
    sizes = plan.maker.sizes(module.out_features, f"outputs of {name.rpartition('.')[2]}")
    for part in _parts(module):
        plan.maker.cut(first_name(model, f"{name}.{part}"), 0, sizes)
    ends = plan.tokens is not None and plan.tokens.last is None
    plan.maker.call("all_gather", name, within=name.rpartition(".")[0])  # of its outputs, where they are used
    if ends:
        plan.maker.call("all_gather", name, within=name)
    plan.maker.call("reduce_scatter" if ends else "all_reduce", name)
    tokens = plan.tokens.cut if plan.tokens is not None and ends else None
    plan.forwards[name] = partial(tensor_calls.gathered, module, plan.group, sizes, tokens, f"head {name}")


def plan_summed(plan: SplitPlan, model: nn.Module, name: str) -> None:
    """A layer by rows on its own: whole inputs, outputs summed."""
    module = cast(nn.Linear, model.get_submodule(name))
    sizes = plan.maker.sizes(module.in_features, f"inputs of {name.rpartition('.')[2]}")
    plan.maker.cut(first_name(model, f"{name}.weight"), 1, sizes)
    plan.maker.call("all_reduce", name, within=name)
    plan.maker.call("all_gather", name)
    plan.forwards[name] = partial(tensor_calls.summed, module, plan.group, sizes, f"row {name}")


def plan_between(plan: SplitPlan, module: nn.Module, name: str, own: Sequence[str]) -> None:
    """A module that computes on a part with whole parameters, `own` of its own."""
    trained = tuple(key for key in own if module.get_parameter(key).requires_grad)
    for key in trained:
        plan.maker.sums_in_use(f"{name}.{key}")
    what = tensor_calls.Between(module, trained, module.forward)
    plan.forwards[name] = partial(tensor_calls.between, what, plan.group, f"summed {name}")


def _parts(module: nn.Linear) -> list[str]:
    return ["weight"] if module.bias is None else ["weight", "bias"]


def first_name(model: nn.Module, name: str) -> str:
    """The name under which a parameter is registered first: a tied one is cut once."""
    parameter = model.get_parameter(name)
    return next(first for first, candidate in model.named_parameters() if candidate is parameter)
