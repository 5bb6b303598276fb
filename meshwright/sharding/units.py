"""How the parameters of an unmodified model are grouped: which modules are gathered and freed as one, and buckets.

A unit is a child of an outermost `nn.ModuleList` or `nn.Sequential`: the repeated blocks that nearly every model
is made of. Parameters outside of them, and those that several units share (tied weights, shared modules), belong
to the root, which stays gathered from the first forward to the end of the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from meshwright.layout.bucket import ParameterSpec, Unit
from meshwright.layout.grouping import Division, group_by_module, group_by_size
from meshwright.layout.policy import ShardingPolicy
from meshwright.layout.tensor_layout import TensorLayout

# Their kernels want parameters in the type of their running statistics, which stay float32.
_IN_MASTER_TYPE = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def parameters_in_master_type(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that stay in the type of their masters in a plan of 16 bits: of batch and instance normalisation."""
    modules = [module for module in model.modules() if isinstance(module, _IN_MASTER_TYPE)]
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def parameter_specs(
    model: nn.Module,
    compute_dtype: torch.dtype | None = None,
    places: Mapping[str, torch.device] | None = None,
    *,
    partial: Collection[str] = (),
    apart: Mapping[str, str] = MappingProxyType({}),
) -> list[ParameterSpec]:
    """Every distinct parameter as numbers, in order of registration; a tied one appears once.

    Args:
        model: its parameters have the type of their masters.
        compute_dtype: of forward and backward where that is another; None: the parameters' own.
        places: parameter name to device, for a model that spans several.
        partial: names of those whose gradients are summed over the ranks of a copy of the model, too.
        apart: parameter name to a word: only those of one word share buckets.
    """
    kept, hidden = parameters_in_master_type(model), hidden_matrices(model)
    specs = []
    for name, parameter in model.named_parameters():
        dtype = parameter.dtype if compute_dtype is None or parameter in kept else compute_dtype
        specs.append(
            ParameterSpec(
                name,
                tuple(parameter.shape),
                str(dtype).removeprefix("torch."),
                dtype.itemsize,
                parameter.requires_grad,
                str((places or {}).get(name, "")),
                is_hidden=name in hidden,
                has_master=parameter.requires_grad and dtype != parameter.dtype,
                is_partial=name in partial,
                apart=apart.get(name, ""),
            )
        )
    return specs


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices of repeated blocks: two dims, inside a unit, no embedding table.

    What maps one hidden state to another. Embeddings, heads, norms and biases are the rest, wherever they are tied.
    """
    assigned = assign_units(model, find_units(model))
    tables = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and assigned[name] and parameter not in tables
    }


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Unit name to module: children with parameters of the outermost ModuleLists and Sequentials."""
    units: dict[str, nn.Module] = {}
    claimed: set[nn.Module] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or module in claimed:
            continue
        for child_name, child in module.named_children():
            if child not in claimed and any(True for _ in child.parameters()):
                units[f"{name}.{child_name}" if name else child_name] = child
        claimed.update(module.modules())
    return units


def assign_units(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, str]:
    """Parameter name to unit name; the root (empty name) owns what is in no unit or in several."""
    owners: dict[nn.Parameter, set[str]] = {}
    inside: dict[nn.Parameter, int] = {}
    for unit_name, module in units.items():
        for _, parameter in module.named_parameters(remove_duplicate=False):
            owners.setdefault(parameter, set()).add(unit_name)
            inside[parameter] = inside.get(parameter, 0) + 1
    uses: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[parameter] = uses.get(parameter, 0) + 1
    assigned = {}
    for name, parameter in model.named_parameters():
        names = owners.get(parameter, set())
        only_inside = inside.get(parameter, 0) == uses[parameter]
        assigned[name] = next(iter(names)) if len(names) == 1 and only_inside else ""
    return assigned


def plan_units(  # noqa: PLR0913 - whatever decides how buckets are cut
    model: nn.Module,
    policy: ShardingPolicy,
    num_shards: int,
    compute_dtype: torch.dtype | None = None,
    places: Mapping[str, torch.device] | None = None,
    *,
    first_owner: int = 0,
    tensor_layout: TensorLayout | None = None,
    apart: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Unit, ...]:
    """Group the model's parameters into units and buckets as `policy` wants them; see `parameter_specs`, `Division`.

    What is partial is small, and lies in the root: one sum over the ranks of a copy a step is for all of it.
    """
    partial_names = () if tensor_layout is None else tensor_layout.partial
    specs = parameter_specs(model, compute_dtype, places, partial=partial_names, apart=apart)
    if tensor_layout is not None:
        specs = [replace(spec, even_numel=tensor_layout.even_numel(spec.name, spec.shape)) for spec in specs]
    division = Division(num_shards, policy.alignment_numel, policy.ownership, first_owner)
    if policy.shards_parameters:
        unit_of = assign_units(model, find_units(model)) | dict.fromkeys(partial_names, "")
        return group_by_module(specs, unit_of, division)
    return group_by_size(specs, division, bucket_bytes=policy.bucket_bytes)
