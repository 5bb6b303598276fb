"""From `plan.recompute` to wrapped modules: which modules a pattern means, and which chain they form.

Owns the matching and E242. Modules in a module that a rule matched follow that rule: the outermost counts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.layout.recompute import Recomputation, RecomputePlan
from meshwright.layout.tensor_layout import CutRegion
from meshwright.partitioning.checkpointing import Span, constant, every, reruns_of
from meshwright.recompute import operations, selective
from meshwright.recompute.executor import Recomputer
from meshwright.recompute.holders import StayingWeights, Weights
from meshwright.recompute.offload import Offloader


@dataclass(frozen=True, eq=False)
class Chain:
    """Neighbouring modules that one rule matched.

    Attributes:
        modules: name to module, in order.
        kept: what the rule says.
    """

    modules: Mapping[str, nn.Module]
    kept: Recomputation


@dataclass(frozen=True, eq=False)
class Installed:
    """What has been wrapped.

    Attributes:
        undo: puts every forward back.
        recomputers: one a chain whose layers run again as wholes.
    """

    undo: Callable[[], None]
    recomputers: tuple[Recomputer, ...]


def install(
    model: nn.Module,
    plan: RecomputePlan,
    *,
    weights: Weights | None = None,
    schedules: Mapping[str, Span] | None = None,
    region: CutRegion | None = None,
) -> Installed:
    """Wrap the modules of `model` that `plan` names; instances change, classes do not.

    Args:
        model: whose replaced forwards (linear, batch normalisation) are in place already.
        plan: which modules keep what.
        weights: where they are; None: they stay.
        schedules: name of a chain's first module to its schedule, for budgets.
        region: what is cut over tp while the model runs; None: nothing ever is.

    Raises:
        PlanError: E242 where a rule matches nothing.
    """
    where = weights if weights is not None else StayingWeights(model)
    undos: list[Callable[[], None]] = [_without_caches(model)] if plan.is_active else []
    recomputers = []
    for chain in find_chains(model, plan):
        kind = chain.kept.kind
        if kind == "selective" and chain.kept.operations:
            undos.append(operations.install(chain.modules, chain.kept.operations, where))
        elif kind == "selective":
            undos.append(selective.install(dict(chain.modules), where))
        elif kind == "offload":
            device = next(p.device for p in model.parameters())
            if device.type == "cuda":  # elsewhere what is saved is in host memory already: W210
                undos.append(Offloader(dict(chain.modules), where, device).install())
        elif kind != "none":
            first = next(iter(chain.modules))
            schedule = (schedules or {}).get(first) or schedule_of(chain.kept, len(chain.modules))
            recomputers.append(Recomputer(chain.modules, schedule, where, region))
            undos.append(recomputers[-1].install())

    def undo() -> None:
        for step in reversed(undos):
            step()

    return Installed(undo, tuple(recomputers))


def _without_caches(model: nn.Module) -> Callable[[], None]:
    """Switch off the key and value caches of transformers' models: a layer that runs again would add to them twice.

    Training never reads them. The switch stands in the configuration, which modules share.
    """
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    switched = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in switched:
        config.use_cache = False

    def undo() -> None:
        for config in switched:
            config.use_cache = True

    return undo


def reruns_of_model(
    model: nn.Module, plan: RecomputePlan, schedules: Mapping[str, Span] | None = None
) -> dict[str, tuple[str, ...]]:
    """Name of a module to those that run again as wholes, in order, when its backward begins."""
    found = {}
    for chain in find_chains(model, plan):
        if chain.kept.kind in ("full", "every", "constant", "budget"):
            names = list(chain.modules)
            schedule = (schedules or {}).get(names[0]) or schedule_of(chain.kept, len(names))
            for layer, ran in reruns_of(schedule).items():
                found[names[layer]] = tuple(names[i] for i in ran)
    return found


def schedule_of(kept: Recomputation, num_layers: int) -> Span:
    """The schedule of a word that needs no costs."""
    if kept.kind == "constant":
        return constant(num_layers)
    if kept.kind == "budget":
        raise PlanError(
            "E243",
            f'plan.recompute = "{kept}": what fits depends on the samples, which a loop of your own brings later. '
            f"Choose full, selective, every:k or constant.",
        )
    return every(num_layers, kept.amount or 1)


def find_chains(model: nn.Module, plan: RecomputePlan) -> list[Chain]:
    """The modules that each rule matches, neighbours of one rule and one parent as a chain.

    Raises:
        PlanError: E242 where a rule matches nothing, or a model has no repeated blocks.
    """
    chains: list[Chain] = []
    matched: set[str] = set()
    claimed: set[nn.Module] = set()
    for name, module, is_block in _candidates(model):
        if module in claimed:
            continue
        rule = next(
            ((p, kept) for p, kept in plan.rules if (is_block if not p else fnmatch.fnmatchcase(name, p))),
            None,
        )
        if rule is None:
            continue
        claimed.update(module.modules())
        matched.add(rule[0])
        parent = name.rpartition(".")[0]
        last = next(iter(chains[-1].modules)).rpartition(".")[0] if chains else None
        if chains and last == parent and chains[-1].kept == rule[1]:
            chains[-1] = Chain({**chains[-1].modules, name: module}, rule[1])
        else:
            chains.append(Chain({name: module}, rule[1]))
    _check_matched(model, plan, matched)
    return chains


def _candidates(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """(name, module, whether it is a child of an outermost list or sequence), parents before children."""
    blocks: set[nn.Module] = set()
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module not in inside:
            blocks.update(module.children())
            inside.update(module.modules())
    return [(name, module, module in blocks) for name, module in model.named_modules() if name]


def _check_matched(model: nn.Module, plan: RecomputePlan, matched: set[str]) -> None:
    for pattern, kept in plan.rules:
        if pattern in matched or kept.kind == "none":
            continue
        names = [name for name, _ in model.named_modules() if name]
        if not pattern:
            raise PlanError(
                "E242",
                f"plan.recompute = {str(kept)!r} is for repeated blocks, and {type(model).__name__} has no "
                f'nn.ModuleList or nn.Sequential. Name modules: plan.recompute = {{"{names[0] if names else "*"}" = '
                f'"{kept}"}}.',
            )
        shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
        raise PlanError(
            "E242",
            f"plan.recompute: pattern {pattern!r} matches no module of {type(model).__name__}, or only such as stand "
            f"in a module of an earlier rule. Names are {shown}",
        )


def offload_warnings(plan: RecomputePlan, device: torch.device) -> list[str]:
    """W210 where there is nowhere to move saved tensors to."""
    if device.type == "cuda" or all(kept.kind != "offload" for _, kept in plan.rules):
        return []
    return [
        f"W210 plan.recompute = {str(plan)!r} moves what is saved to host memory, and on {device} it is there already: "
        f"nothing moves"
    ]
