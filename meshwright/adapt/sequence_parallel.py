"""Sequence parallelism in an unmodified module: between tensor-parallel pairs a rank has a part of the tokens.

Owns where tokens are cut and made whole. They are cut before the first repeated block, whole inside of each attention
and feed-forward, and whole again for the head: a pair's all-reduce becomes an all-gather before it and a reduce-scatter
behind it, of the same bytes together, and norms, dropout and residual sums work on 1/tp of the tokens.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.

[Note: which dim] Tokens are independent between pairs, so whole samples may be cut as well as the sequence: the batch
where tp divides it, whose parts are contiguous, else the sequence, in chunks that may differ by one.

[Note: partial gradients] A weight that is used between pairs gets the gradient of its rank's tokens. The engine sums
these over tp once a step, in a bucket of their own (`sharding/engine.py`).

Simplification: the model has one chain of repeated blocks, each with its hidden state as first argument and as (first)
output; parallel branches and encoder-decoders are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.comm.ops import Group
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import CutRegion, Role, even_sizes, token_range
from meshwright.sharding.units import find_units
from meshwright.tensor import uneven


@dataclass
class TokenCut:
    """This rank's tokens; every rank of the group cuts the same batch."""

    group: Group
    region: CutRegion

    def enter(self, x: Tensor) -> Tensor:
        """This rank's part of whole tokens, `(batch, sequence, dim)`; its gradient is gathered."""
        dim, place = token_range(x.shape, self.group.size, self.group.index)
        sizes = even_sizes(x.shape[dim], self.group.size)
        if not sizes[-1]:
            raise PlanError(
                "E229",
                f"plan.sequence_parallel: {x.shape[0]} samples of {x.shape[1]} tokens are too few for "
                f"{self.group.size} ranks. Set plan.sequence_parallel=false, or a smaller plan.tp.",
            )
        self.region.tokens = (dim, place)
        return uneven.split(x, self.group, dim=dim, sizes=sizes, cause="cut tokens")

    def leave(self, x: Tensor) -> Tensor:
        """Whole tokens for what every rank computes alike; the gradient is this rank's part."""
        dim, sizes = self._taken(x)
        self.region.tokens = None
        return uneven.gather(x, self.group, dim=dim, sizes=sizes, cause="whole tokens")

    def gather(self, x: Tensor, cause: str, *, last: bool = False) -> Tensor:
        """Whole tokens for a column split; their gradients are summed over the ranks and cut.

        `last`: tokens stay whole behind it, as of the head.
        """
        dim, sizes = self._taken(x)
        if last:
            self.region.tokens = None
        return uneven.gather_sum(x, self.group, dim=dim, sizes=sizes, cause=cause)

    def scatter(self, x: Tensor, cause: str) -> Tensor:
        """This rank's part of the sum of a row split's outputs; its gradient is gathered."""
        dim, (_, _, total) = self._place(x)
        sizes = even_sizes(total, self.group.size)
        return uneven.scatter_sum(x, self.group, dim=dim, sizes=sizes, cause=cause)

    def _taken(self, x: Tensor) -> tuple[int, tuple[int, ...]]:
        dim, (_, ours, total) = self._place(x)
        if x.dim() < 3 or x.shape[dim] != ours:
            raise PlanError(
                "E229",
                f"plan.sequence_parallel: a layer got a tensor of shape {tuple(x.shape)}, where the tokens of a rank "
                f"have {ours} of {total} along dim {dim}: it reads something else than the hidden state of its block. "
                f"Set plan.sequence_parallel=false.",
            )
        return dim, even_sizes(total, self.group.size)

    def _place(self, x: Tensor) -> tuple[int, tuple[int, int, int]]:
        if self.region.tokens is None:
            raise PlanError(
                "E229",
                f"plan.sequence_parallel: a layer ran on a tensor of shape {tuple(x.shape)} before the first or behind "
                f"the last of the repeated blocks. Set plan.sequence_parallel=false.",
            )
        return self.region.tokens


@dataclass(frozen=True)
class TokenPlan:
    """Where a model's tokens are cut.

    Attributes:
        cut: what does it.
        first: the block before which it begins.
        last: the module behind which it ends; None: the head ends it.
        blocks: names of all that runs on cut tokens.
        whole_inside: modules that get whole tokens: they hold nothing but a pair.
    """

    cut: TokenCut
    first: str
    last: str | None
    blocks: tuple[str, ...]
    whole_inside: frozenset[str]

    def partial(self, model: nn.Module, apart: Collection[str]) -> list[str]:
        """Parameters of which a rank gets the gradient of its tokens: all of the blocks but those in `apart`.

        `apart` names parameters that are cut, and modules whose gradients are summed where they are used.
        """
        inside: set[nn.Parameter] = set()
        for block in self.blocks:
            for name, parameter in model.get_submodule(block).named_parameters(block):
                if name.rpartition(".")[0] not in apart:
                    inside.add(parameter)
        return [
            name for name, parameter in model.named_parameters() if parameter in inside and name not in apart
        ]


def plan_tokens(
    model: nn.Module, group: Group, region: CutRegion, roles: Mapping[str, Role], *, head_ends: bool
) -> TokenPlan:
    """Find the chain of blocks around the pairs, and what belongs to it.

    Args:
        model: whole.
        group: the tensor-parallel ranks.
        region: told what is cut while the model runs.
        roles: of its layers.
        head_ends: whether nothing stands between the norm behind the blocks and a head with outputs that are cut.

    Raises:
        PlanError: E229 for a model without one chain of blocks.
    """
    paired = {name.rpartition(".")[0] for name, role in roles.items() if role in _PAIRED}
    units = find_units(model)
    chains: dict[str, list[str]] = {}
    for unit in units:
        if any(parent == unit or parent.startswith(f"{unit}.") for parent in paired):
            chains.setdefault(unit.rpartition(".")[0], []).append(unit)
    outside = [p for p in sorted(paired) if not any(p == unit or p.startswith(f"{unit}.") for unit in units)]
    naive = [n for n, role in roles.items() if role in ("gathered", "summed") and _inside(n, units)]
    if len(chains) != 1 or outside or naive:
        found = ", ".join([*sorted(chains), *outside, *naive][:4]) or "none"
        raise PlanError(
            "E229",
            f"plan.sequence_parallel cuts the tokens of one chain of repeated blocks (an nn.ModuleList or "
            f"nn.Sequential) whose attention and feed-forward are split as pairs; {type(model).__name__} has: {found}. "
            f"Set plan.sequence_parallel=false.",
        )
    ((chain, blocks),) = chains.items()
    # Where rows stand alone their inputs are channels of whole tokens already.
    begun = {name.rpartition(".")[0] for name, role in roles.items() if role in _PAIRED and role not in _ROWS}
    norm = _norm_behind(model, chain)
    last = norm or blocks[-1]
    ends_at_head = head_ends and norm is not None and "gathered" in roles.values()
    return TokenPlan(
        TokenCut(group, region),
        first=blocks[0],
        last=None if ends_at_head else last,
        blocks=(*blocks, *([norm] if norm else [])),
        whole_inside=frozenset(parent for parent in begun if _is_pair_alone(model, parent, roles)),
    )


_ROWS: tuple[Role, ...] = ("output", "row")
_PAIRED: tuple[Role, ...] = ("query", "key", "value", "column", *_ROWS)


def _inside(name: str, units: Iterable[str]) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def _norm_behind(model: nn.Module, chain: str) -> str | None:
    """The normalisation that is registered right behind the chain of blocks."""
    parent, _, own = chain.rpartition(".")
    siblings = dict(model.get_submodule(parent).named_children()) if parent else dict(model.named_children())
    behind = list(siblings)[list(siblings).index(own) + 1 :]
    if behind and "norm" in type(siblings[behind[0]]).__name__.lower():
        return f"{parent}.{behind[0]}" if parent else behind[0]
    return None


def _is_pair_alone(model: nn.Module, parent: str, roles: Mapping[str, Role]) -> bool:
    """Whether every parameter of a module belongs to the layers of its pair."""
    module = model.get_submodule(parent) if parent else model
    return all(f"{parent}.{name}".rpartition(".")[0] in roles for name, _ in module.named_parameters())


def install_tokens(model: nn.Module, plan: TokenPlan) -> None:
    """Cut and gather tokens where `plan` says so, by hooks."""
    cut = plan.cut

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_first(args, kwargs, cut.enter)

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return cut.leave(output)
        return (cut.leave(output[0]), *output[1:])

    model.get_submodule(plan.first).register_forward_pre_hook(enter, with_kwargs=True)
    for name in plan.whole_inside:

        def gather(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
        ) -> Any:
            return _with_first(args, kwargs, lambda x: cut.gather(x, f"tokens {name}"))

        model.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
    if plan.last is not None:
        model.get_submodule(plan.last).register_forward_hook(leave)


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[Any, dict[str, Any]]:
    """Arguments with the first tensor, the hidden state, changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: change(kwargs[name])}
