"""Any torch optimizer over a sharded model: its groups by parameter names, and what surrounds its update.

Owns the choice of parameters, the test that a rule works on pieces, and the hooks by which `step()` agrees, clips,
updates, gathers and forgets. What a user gets is an instance of the class asked for, so schedulers and settings of
torch work on it. Must not know losses or data.

[Note: elementwise] A flat shard may start inside a parameter, so a rule must treat each element by itself. torch's own
classes are in a table (`optimizer_kinds.py`); any other is tried: a matrix and its two flat halves, updated alike, must
come out alike. A rule that looks at shapes or norms only beyond the tried sizes would pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import LoopError, PlanError
from meshwright.training.optimizer_kinds import check_optimizer
from meshwright.training.own_loop import ShardedModel
from meshwright.training.own_step import Part

# Chooses parameters by name: a pattern as of file names (`blocks.*.weight`), or a function.
Choice = str | Callable[[str], bool]
# Options of a parameter's group: of the first pattern that fits, or of a function of its name.
Groups = Sequence[tuple[str, Mapping[str, Any]]] | Callable[[str], Mapping[str, Any]]
# Which implementation runs changes speed, and rounding in the last digits.
_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")


def make_own_optimizer(
    model: ShardedModel,
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    *,
    only: Choice | None,
    groups: Groups | None,
) -> torch.optim.Optimizer:
    """An instance of `kind` over this rank's pieces, tied to `model`'s steps.

    Args:
        model: what it trains.
        kind: a class of optimizers, constructed as kind(groups, **options).
        options: of `kind`; `fused=True` is added where it exists and no implementation was chosen.
        only: which parameters; None: all trained ones.
        groups: options of their own for some of them; the others form one group.

    Raises:
        PlanError: E204 for a rule that cannot work on flat shards, or in a step without a closure; E228 for one that
            needs whole parameters under tp.
        LoopError: E706 for parameters that do not exist or have an optimizer already.
    """
    engine = model.state.engine
    names = _chosen(model, only)
    cuts = engine.policy.shards_optimizer and engine.policy.ownership == "flat" and engine.owners.size > 1
    check_rule(kind, options, holds_whole=not cuts)
    if engine.tensor_layout is not None and engine.tensor_layout.cuts:
        _check_parts(kind, options, engine.tensor_layout.size)
    shards = tuple(shard for shard in engine.shards if shard.name in names)
    flag = nn.Parameter(torch.empty(0, 0, device=engine.device))
    part = Part(frozenset(names), shards, len(names) == len(_trained(model)), flag)
    by_options = _groups(names, groups)
    members: list[dict[str, Any]] = [
        {"params": [s.parameter for s in shards if s.name in chosen], **own} for own, chosen in by_options
    ]
    members[0]["params"].append(flag)
    optimizer = kind(members, **options, **_implementation(kind, options))
    model.parts.append(part)
    model.optimizers.append(optimizer)
    model.state.optimizer.adopt(optimizer, shards)

    def before(_optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # the first is the optimizer
            raise LoopError(
                "E703",
                "step(closure): forwards and backwards belong before it, into model.step or accumulate()",
            )
        model.start_update(part)

    def after(_optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        model.finish_update(part)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def _trained(model: ShardedModel) -> list[str]:
    whole = model.state.engine.whole
    if whole is not None:  # of all stages
        return [name for name in whole.parameters if name in whole.trained]
    return [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]


def _chosen(model: ShardedModel, only: Choice | None) -> list[str]:
    """Names of the parameters to train, in order of registration; the same on every rank."""
    trained = _trained(model)
    fits = _fits(only) if only is not None else (lambda _: True)
    names = [name for name in trained if fits(name)]
    if not names:
        raise LoopError(
            "E706",
            f"only={only!r} fits none of the {len(trained)} trained parameters: {', '.join(trained[:6])}"
            + (", ..." if len(trained) > 6 else ""),
        )
    taken = {name for part in model.parts for name in part.names}
    twice = [name for name in names if name in taken]
    if twice:
        raise LoopError(
            "E706",
            f"{len(twice)} parameters have an optimizer already: {', '.join(twice[:4])}. Give each its own with only=.",
        )
    return names


def _fits(choice: Choice) -> Callable[[str], bool]:
    return (lambda name: fnmatchcase(name, choice)) if isinstance(choice, str) else choice


def _groups(names: Sequence[str], groups: Groups | None) -> list[tuple[dict[str, Any], set[str]]]:
    """Options and names of each group, in order of first use: the same groups on every rank, some empty there."""
    found: list[tuple[dict[str, Any], set[str]]] = []
    for name in names:
        options = dict(_options_of(name, groups))
        for known, members in found:
            if known == options:
                members.add(name)
                break
        else:
            found.append((options, {name}))
    return found


def _options_of(name: str, groups: Groups | None) -> Mapping[str, Any]:
    if groups is None:
        return {}
    if callable(groups):
        return groups(name)
    return next((options for pattern, options in groups if fnmatchcase(name, pattern)), {})


def _check_parts(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], size: int) -> None:
    """E228 for a rule that would see parts of matrices as matrices."""
    try:
        check_rule(kind, options, holds_whole=False)
    except PlanError as error:
        raise PlanError(
            "E228",
            f"{kind.__name__} looks at whole parameters, and plan.tp = {size} cuts them over ranks. Take a rule that "
            f"works element by element, e.g. torch.optim.AdamW, or set plan.tp=1.",
        ) from error


def _implementation(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    chosen = any(options.get(name) is not None for name in _IMPLEMENTATIONS)
    return {"fused": True} if "fused" in known and not chosen else {}


def check_rule(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], *, holds_whole: bool) -> None:
    """Raise E204 unless `kind` can update what ranks hold; see [Note: elementwise].

    Args:
        kind: a class of optimizers.
        options: of `kind`.
        holds_whole: whether ranks own whole parameters, not parts of them.
    """
    if kind is getattr(torch.optim, kind.__name__, None):
        check_optimizer(kind.__name__, holds_whole=holds_whole)
        return
    plain = {name: value for name, value in options.items() if name not in _IMPLEMENTATIONS}
    if plain.get("lr") is not None:
        plain["lr"] = 0.1  # a rate of 0 would show nothing
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 4, 6, dtype=torch.float64, generator=generator)
    try:
        (whole,) = _updated(kind, plain, [start], [[g] for g in gradients])
    except Exception as error:
        raise PlanError(
            "E204",
            f"{kind.__name__} cannot make a plain step() on a matrix with a dense gradient: {error}. Take an optimizer "
            f"whose step() needs no closure, e.g. torch.optim.AdamW.",
        ) from error
    if holds_whole:
        return
    halves = [list(g.flatten().split(12)) for g in gradients]
    try:
        pieces = _updated(kind, plain, list(start.flatten().split(12)), halves)
        same = torch.allclose(torch.cat(pieces), whole.flatten(), rtol=1e-12, atol=1e-12)
    except Exception:
        same = False
    if not same:
        raise PlanError(
            "E204",
            f"{kind.__name__} does not work element by element: flat shards cut parameters anywhere, and the result "
            f'would depend on where. Set plan.ownership="whole", or plan.zero=0.',
        )


def _updated(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """`values` after one update for each of `gradients`."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = kind([{"params": parameters}], **options)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
