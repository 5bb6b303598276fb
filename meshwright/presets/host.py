"""This host as numbers that were measured on it: what a rank of one thread takes for parts of a training step.

Owns the values, their JSON form, and how one that was not measured is taken from its neighbours. Knows no torch.
All seconds are of a rank's processor while all cores work, so that other programs on the machine do not change them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

_FORMAT = 2


class OtherFormat(ValueError):
    """What another version of this package measured."""


@dataclass(frozen=True)
class BlockTime:
    """One transformer block of a rank.

    Attributes:
        key: of the block's shape, see `block_key`.
        micro_batch: sequences.
        forward, inputs, weights: seconds of forward, of gradients of inputs, of gradients of weights.
        core: of forward, attention alone.
        core_back: of backward, attention alone.
        processes: that worked at the time: as many as cores, or more, which then share caches.
    """

    key: str
    micro_batch: int
    forward: float
    inputs: float
    weights: float
    core: float
    core_back: float
    processes: int = 1


@dataclass(frozen=True)
class PartTime:
    """Something else that grows with the micro-batch: `head ...` (embedding, projection and loss), `attend ...`.

    Attributes:
        key: what it is.
        micro_batch: sequences.
        forward, backward: seconds.
        processes: as of a block.
    """

    key: str
    micro_batch: int
    forward: float
    backward: float
    processes: int = 1


@dataclass(frozen=True)
class CollectiveTime:
    """Attributes: the operation, ranks, bytes that the log counts for it, seconds of each rank."""

    op: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Learned:
    """Ratios measured / predicted that runs on this host taught (`planner/experience.py`).

    Attributes:
        compute, waiting, exchange, update: of parts of a step.
        memory: of the peak.
        runs: that it was learned from.
    """

    compute: float = 1.0
    waiting: float = 1.0
    exchange: float = 1.0
    update: float = 1.0
    memory: float = 1.0
    runs: int = 0


_NOTHING = Learned()


@dataclass(frozen=True)
class HostProfile:
    """What was measured.

    Attributes:
        name: of the machine.
        cores: that ranks share.
        memory_bytes: that all ranks together may use.
        process_bytes: resident bytes of a rank before it has a model.
        step_seconds: of a step without a model.
        microbatch_seconds: of a micro-batch without a model.
        layer_seconds: of a block and micro-batch beside its operations.
        gather_seconds: of a block and micro-batch under zero3, beside the bytes that move.
        accumulate_seconds: of a parameter whose gradient is added to that of an earlier micro-batch.
        update_seconds: of one parameter's update: norm, clip and AdamW.
        blocks, parts, collectives: see their types.
        learned: from runs, beside what was measured.
    """

    name: str
    cores: int
    memory_bytes: int
    process_bytes: int
    step_seconds: float
    microbatch_seconds: float
    layer_seconds: float
    gather_seconds: float
    accumulate_seconds: float
    update_seconds: float
    collectives: tuple[CollectiveTime, ...]
    blocks: tuple[BlockTime, ...] = ()
    parts: tuple[PartTime, ...] = ()
    learned: Learned = _NOTHING

    def block(self, key: str, micro_batch: int) -> BlockTime:
        """A block of `micro_batch` sequences."""
        rows = [row for row in self.blocks if row.key == key]
        assert rows, f"{key} was not measured"
        low, high, share = _around([row.micro_batch for row in rows], micro_batch)
        one, two = rows[low], rows[high]
        names = ("forward", "inputs", "weights", "core", "core_back")
        values: dict[str, Any] = {
            name: micro_batch
            * _between((one.micro_batch, getattr(one, name)), (two.micro_batch, getattr(two, name)), share)
            for name in names
        }
        return replace(one, micro_batch=micro_batch, **values)

    def part(self, key: str, micro_batch: int) -> PartTime:
        """As `block`, of a part."""
        rows = [row for row in self.parts if row.key == key]
        assert rows, f"{key} was not measured"
        low, high, share = _around([row.micro_batch for row in rows], micro_batch)
        one, two = rows[low], rows[high]
        forward, backward = (
            _between((one.micro_batch, getattr(one, name)), (two.micro_batch, getattr(two, name)), share)
            for name in ("forward", "backward")
        )
        return PartTime(key, micro_batch, forward * micro_batch, backward * micro_batch)

    def collective(self, op: str, ranks: int, num_bytes: float) -> float:
        """Seconds of each rank for one call; between measured sizes by a straight line, beyond by the last rate."""
        if ranks == 1:
            return 0.0
        of_op = [row for row in self.collectives if row.op == op]
        assert of_op, f"{op} was not measured"
        known = sorted({row.ranks for row in of_op}, key=lambda other: (abs(other - ranks), other))
        rows = sorted((row for row in of_op if row.ranks == known[0]), key=lambda row: row.bytes)
        if num_bytes <= rows[0].bytes:
            return rows[0].seconds
        at = next((i for i, row in enumerate(rows) if row.bytes >= num_bytes), len(rows) - 1)
        one, two = rows[at - 1], rows[at]
        rate = max(0.0, two.seconds - one.seconds) / (two.bytes - one.bytes)
        return one.seconds + rate * (num_bytes - one.bytes)

    def to_json(self) -> str:
        """The inverse of `profile_from`."""
        return json.dumps(self.to_value(), indent=1) + "\n"

    def to_value(self) -> dict[str, object]:
        """As a table of a JSON file."""
        return {"format": _FORMAT, **asdict(self)}

    def only(self, keys: Iterable[str], processes: int) -> HostProfile:
        """With the blocks and parts of one model only, as so many processes at once took for them."""
        kept = {(key, processes) for key in keys}
        return replace(
            self,
            blocks=tuple(row for row in self.blocks if (row.key, row.processes) in kept),
            parts=tuple(row for row in self.parts if (row.key, row.processes) in kept),
        )

    def known(self, processes: int) -> set[str]:
        """Keys of the blocks and parts that so many processes at once were measured on."""
        blocks = {row.key for row in self.blocks if row.processes == processes}
        return blocks | {row.key for row in self.parts if row.processes == processes}


def profile_from(text: str) -> HostProfile:
    """What `to_json` wrote.

    Raises:
        OtherFormat: another version wrote it.
        ValueError: it is of another form.
    """
    return profile_of(json.loads(text))


def profile_of(value: object) -> HostProfile:
    """As `profile_from`, of the value itself."""
    if not isinstance(value, dict) or not isinstance(value.get("format"), int):
        raise ValueError("no measured host")
    if value["format"] != _FORMAT:
        raise OtherFormat(f"no measured host of format {_FORMAT}")
    kinds = {"blocks": BlockTime, "parts": PartTime, "collectives": CollectiveTime}
    try:
        rows = {name: tuple(kind(**row) for row in value[name]) for name, kind in kinds.items()}
        rest = {name: part for name, part in value.items() if name != "format"}
        return HostProfile(**{**rest, **rows, "learned": Learned(**value["learned"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"no measured host: {error}") from error


def _around(sizes: list[int], wanted: int) -> tuple[int, int, float]:
    """Places of the measured sizes below and above, and where `wanted` is between them."""
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    below = [i for i in order if sizes[i] <= wanted]
    above = [i for i in order if sizes[i] >= wanted]
    low, high = (below or above)[-1 if below else 0], (above or below)[0 if above else -1]
    span = sizes[high] - sizes[low]
    return low, high, (wanted - sizes[low]) / span if span else 0.0


def _between(one: tuple[int, float], two: tuple[int, float], share: float) -> float:
    """Seconds of one sequence."""
    first, second = one[1] / one[0], two[1] / two[0]
    return first + share * (second - first)
