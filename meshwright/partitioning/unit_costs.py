"""What the units of a model cost, as measured: the parts between which an executor can cut, in order.

Owns the plain data and its way to chains of blocks at any samples. Must not know how units were found or measured, nor
torch. Between two sizes that were measured all numbers lie on a line; below the first and above the last too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from meshwright.partitioning.chain import Block, Carried, Chain, Tie


@dataclass(frozen=True)
class Unit:
    """One part; each tuple has an entry a measured size.

    Attributes:
        name: the call of a module with which it begins.
        forward: seconds.
        backward: seconds.
        kept_bytes: from forward to backward, without weights.
        weight_bytes: of trained weights that no other unit reads.
        fixed_bytes: of other tensors that it holds.
    """

    name: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    weight_bytes: float
    fixed_bytes: float = 0.0


@dataclass(frozen=True)
class Passed:
    """A tensor from one unit to later ones.

    Attributes:
        producer: unit that makes it.
        consumers: units that read it, ascending.
        bytes: at each measured size.
        is_divisible: one of its dims is that of the samples, so that ranks can have some of them each.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: tuple[float, ...]
    is_divisible: bool = True


@dataclass(frozen=True)
class UnitCosts:
    """A model as its units.

    Attributes:
        model: its name.
        samples: sizes of a micro-batch that were measured, ascending.
        units: in order.
        passed: tensors between units.
        ties: weights that several units read.
        bytes_per_second: of a message between two ranks; 0 where that was not measured.
        message_seconds: that a message takes however small it is.
        gradient_bytes_per_second: that pass each rank in a sum over all ranks; 0 where that was not measured.
        update_seconds_per_byte: of the optimizer, for a byte of trained weights.
        has_batch_statistics: what is computed depends on the number of micro-batches.
    """

    model: str
    samples: tuple[int, ...]
    units: tuple[Unit, ...]
    passed: tuple[Passed, ...]
    ties: tuple[Tie, ...] = ()
    bytes_per_second: float = 0.0
    message_seconds: float = 0.0
    gradient_bytes_per_second: float = 0.0
    update_seconds_per_byte: float = 0.0
    has_batch_statistics: bool = False

    def chain(self, samples: int, *, states: float = 1.0) -> Chain:
        """Every unit a block, at so many samples; a byte of trained weights stands for `states` bytes of memory."""

        def at(values: Sequence[float]) -> float:
            return on_line(self.samples, values, samples)

        blocks = tuple(
            Block(
                at(unit.forward),
                at(unit.backward),
                unit.weight_bytes + unit.fixed_bytes / states,
                at(unit.kept_bytes),
                name=unit.name,
            )
            for unit in self.units
        )
        carried = tuple(Carried(item.producer, item.consumers, at(item.bytes)) for item in self.passed)
        return Chain(blocks, carried, self.ties)

    @property
    def indivisible(self) -> frozenset[int]:
        """Cuts over which something goes that has no dim of the samples."""
        whole = [item for item in self.passed if not item.is_divisible]
        return frozenset(cut for item in whole for cut in range(item.producer + 1, item.consumers[-1] + 1))

    def starts(self, firsts: Sequence[int]) -> tuple[str, ...]:
        """Names of the units with which stages begin."""
        return tuple(self.units[first].name for first in firsts)

    def to_json(self) -> str:
        """Stable JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> UnitCosts:
        """The inverse of `to_json`."""
        raw = json.loads(text)
        units = tuple(
            Unit(
                item["name"],
                tuple(item["forward"]),
                tuple(item["backward"]),
                tuple(item["kept_bytes"]),
                item["weight_bytes"],
                item["fixed_bytes"],
            )
            for item in raw["units"]
        )
        passed = tuple(
            Passed(item["producer"], tuple(item["consumers"]), tuple(item["bytes"]), item["is_divisible"])
            for item in raw["passed"]
        )
        ties = tuple(Tie(tuple(item["users"]), item["bytes"], item["name"]) for item in raw["ties"])
        rest = {"samples": tuple(raw["samples"]), "units": units, "passed": passed, "ties": ties}
        return cls(**{**raw, **rest})


def on_line(samples: Sequence[int], values: Sequence[float], count: int) -> float:
    """The value at `count` samples, on the line through the nearest two; proportional where one size was measured.

    Never below half of the least, which a line through noise could fall to.
    """
    if len(samples) == 1:
        return values[0] * count / samples[0]
    at = next((i for i in range(1, len(samples)) if count <= samples[i]), len(samples) - 1)
    slope = max(0.0, (values[at] - values[at - 1]) / (samples[at] - samples[at - 1]))
    return max(values[at] + slope * (count - samples[at]), min(values) / 2)
