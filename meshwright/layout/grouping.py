"""Which parameters share a bucket, which buckets a unit, and with whole ownership which rank owns which parameter.

Owns the grouping; how a group lies in memory is `layout/bucket.py`'s business.

Whole ownership keeps every parameter on one rank. Parameters go to owners one by one, the largest first, each to the
rank that owns the least so far (a greedy balance, at most 4/3 of the best one: Graham, SIAM J. Appl. Math. 17, 1969);
among equals to the one that owns the least of the same bucket, so that the owners of one bucket send at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.bucket import Bucket, ParameterSpec, Unit, make_bucket
from meshwright.layout.policy import Ownership


@dataclass(frozen=True)
class Division:
    """How buckets are divided.

    Attributes:
        num_shards: ranks.
        alignment_numel: see `ShardingPolicy`.
        ownership: `flat` or `whole`.
        first_owner: ranks before it own nothing (workers of parameter servers); for whole ownership only.
    """

    num_shards: int
    alignment_numel: int
    ownership: Ownership = "flat"
    first_owner: int = 0


@dataclass(frozen=True)
class _Group:
    name: str
    parameters: tuple[ParameterSpec, ...]


def group_by_size(
    parameters: Sequence[ParameterSpec], division: Division, *, bucket_bytes: int
) -> tuple[Unit, ...]:
    """ddp, zero1, zero2: the root unit with buckets of about `bucket_bytes`, in reverse order of registration.

    Gradients become ready roughly in reverse order of registration, so bucket 0 is reduced first. Parameters
    that are not trained stay where they are.
    """
    groups: list[_Group] = []
    # By kind: a few float32 parameters among many of 16 bits close no bucket of these.
    open_groups: dict[object, list[ParameterSpec]] = {}

    def close(kind: object) -> None:
        groups.append(_Group(f"bucket {len(groups)}", tuple(open_groups.pop(kind))))

    for parameter in reversed([p for p in parameters if p.trainable]):
        kind = (parameter.kind, parameter.apart)
        members = open_groups.setdefault(kind, [])
        members.append(parameter)
        if sum(p.planned_numel * p.master_itemsize for p in members) >= bucket_bytes:
            close(kind)
    for left in list(open_groups):
        close(left)
    return (Unit("", tuple(_buckets(groups, division))),)


def group_by_module(
    parameters: Sequence[ParameterSpec], unit_of: dict[str, str], division: Division
) -> tuple[Unit, ...]:
    """zero3: one unit a module, the root first; `unit_of` maps parameter names to unit names (root: empty).

    A unit has one bucket for each kind of parameter.
    """
    names = list(dict.fromkeys(["", *(unit_of[p.name] for p in parameters)]))
    groups_of = {name: _by_kind(name, [p for p in parameters if unit_of[p.name] == name]) for name in names}
    made = iter(_buckets([group for groups in groups_of.values() for group in groups], division))
    units = [Unit(name, tuple(next(made) for _ in groups)) for name, groups in groups_of.items()]
    return tuple(unit for unit in units if unit.buckets)


def _by_kind(unit: str, members: Sequence[ParameterSpec]) -> list[_Group]:
    kinds: dict[tuple[tuple[str, str, bool, bool], str], list[ParameterSpec]] = {}
    for parameter in members:
        kinds.setdefault((parameter.kind, parameter.apart), []).append(parameter)
    several_devices = len({device for (device, *_), _ in kinds}) > 1
    groups = []
    for ((device, dtype, trainable, partial), apart), same in kinds.items():
        suffix = "" if len(kinds) == 1 else f" {dtype}" + ("" if trainable else " frozen")
        suffix += " partial" if partial else ""
        suffix += f" {apart}" if apart else ""
        groups.append(
            _Group((unit or "root") + suffix + (f" {device}" if several_devices else ""), tuple(same))
        )
    return groups


def _buckets(groups: Sequence[_Group], division: Division) -> list[Bucket]:
    first = division.first_owner
    owners: dict[str, int] = {}
    # Partial ones by themselves: ranks of a copy whose other parameters differ in size give them the same owners.
    for partial in (False, True):
        same = [group.parameters for group in groups if group.parameters[0].is_partial == partial]
        assigned = assign_owners(same, division.num_shards - first)
        owners |= {name: owner + first for name, owner in assigned.items()}
    return [
        make_bucket(
            group.name,
            group.parameters,
            num_shards=division.num_shards,
            alignment_numel=division.alignment_numel,
            owners=owners if division.ownership == "whole" else None,
        )
        for group in groups
    ]


def assign_owners(groups: Sequence[Sequence[ParameterSpec]], num_owners: int) -> dict[str, int]:
    """Parameter name to owner, balanced by bytes over all and among equals within each group; deterministic."""
    places = [(parameter, group) for group, members in enumerate(groups) for parameter in members]
    places.sort(key=lambda place: -place[0].planned_numel * place[0].itemsize)  # stable: equals stay in order
    total, inside = [0] * num_owners, [[0] * num_owners for _ in groups]
    owners = {}
    for parameter, group in places:
        owner = min(range(num_owners), key=lambda index: (total[index], inside[group][index], index))
        owners[parameter.name] = owner
        total[owner] += parameter.planned_numel * parameter.itemsize
        inside[group][owner] += parameter.planned_numel * parameter.itemsize
    return owners
