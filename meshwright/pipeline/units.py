"""The units of a model, between any two of which a pipeline can cut it, and what they cost here.

Each structurally different unit runs alone, forward and backward, by the code that runs a stage, on random tensors of
the shapes that reach it and with random weights of its own: a model of any size needs the memory of one unit. What it
keeps for backward is counted by the storages that autograd saves.

Must not know what the costs are for, nor ranks.
Simplifications: a tensor that is made anew by several units counts in each; two units are alike that call modules of
the same classes with parameters of the same shapes on tensors of the same shapes, with equally many FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError, PlanError
from meshwright.nested import map_tensors, tensors_in
from meshwright.partitioning.chain import Tie
from meshwright.partitioning.unit_costs import Passed, Unit, UnitCosts
from meshwright.pipeline.bench import Bench, Randomness, Sized, Timed, torchs
from meshwright.pipeline.cut import Cut, cut_points, make_stages
from meshwright.pipeline.record import Loss, Twin
from meshwright.pipeline.redistribute import num_samples_in, sample_dims, with_one_more
from meshwright.pipeline.tape import Slot, Tape


def finest_cut(tape: Tape) -> Cut:
    """The cut into as many stages as there can be, each with something to compute."""
    computes = [bool(call.module) and not free for call, free in zip(tape.calls, tape.is_free, strict=True)]
    points = [p for p in cut_points(tape) if any(computes[:p])]
    return Cut(tuple(tape.calls[p].anchor for p in points))


class Units:
    """A model with its loss, recorded at some sizes and cut as finely as can be.

    Args:
        twin: the model without memory.
        sized: what the loss does, by samples.
        cut: the finest.
        model: as it was given.

    Attributes:
        digest: equal for models whose units take equally long.
    """

    def __init__(self, twin: Twin, sized: Mapping[int, Sized], cut: Cut, model: nn.Module) -> None:
        self._twin, self._sized, self._cut, self._model = twin, sized, cut, model
        self._samples = sorted(sized)
        modules = dict(twin.model.named_modules())
        self._kinds = [
            tuple(_digest(sized[size], number, modules) for size in self._samples)
            for number in range(cut.num_stages)
        ]
        self.digest = repr((self._samples, cut.starts, self._kinds, _held(sized[self._samples[0]], model)))

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: Loss,
        batch: Callable[[int], Any],
        samples: Sequence[int],
        *,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
    ) -> Units:
        """Record a model.

        Args:
            model: whole and as the user built it, with parameters of the masters' type; it may be on the meta device.
            loss: (model, batch) -> (sum, count).
            batch: a micro-batch of so many samples.
            samples: sizes to measure; those at which the model does not run are left out.
            device: where ranks compute.
            compute_dtype: of forward and backward, where that is another than the parameters have.

        Raises:
            PlanError: E261 to E264 for a model that cannot be followed; E276 for one that runs at none of the sizes.
        """
        twin = Twin(model, device, compute_dtype)
        sized, cut = _recorded(twin, loss, batch, samples)
        return cls(twin, sized, cut, model)

    def measure(self, randomness: Randomness | None = None) -> UnitCosts:
        """What each unit takes: one of each kind is run.

        Args:
            randomness: what surrounds a forward (True) and a backward (False) of so many samples; None: nothing.
        """
        bench = Bench(self._twin, randomness or torchs)
        timed: dict[object, list[Timed]] = {}
        try:
            for number, kind in enumerate(self._kinds):
                if kind not in timed:
                    timed[kind] = [bench.time(self._sized[size], number) for size in self._samples]
        finally:
            bench.close()
        found = [timed[kind] for kind in self._kinds]
        trained, fixed, ties = _held(self._sized[self._samples[0]], self._model)
        units = tuple(
            Unit(
                name,
                tuple(x.forward for x in found[number]),
                tuple(x.backward for x in found[number]),
                tuple(x.kept_bytes for x in found[number]),
                trained[number],
                fixed[number],
            )
            for number, name in enumerate(("", *self._cut.starts))
        )
        passed = _passed([self._sized[size] for size in self._samples])
        return UnitCosts(type(self._model).__name__, tuple(self._samples), units, passed, ties)


def _recorded(
    twin: Twin, loss: Loss, batch: Callable[[int], Any], samples: Sequence[int]
) -> tuple[dict[int, Sized], Cut]:
    """What the loss does at each size at which it runs."""
    sized: dict[int, Sized] = {}
    cut: Cut | None = None
    first = (0, 0)
    failure: Exception | None = None
    for size in sorted(samples, reverse=True):  # what one sample does may be a special case
        given = map_tensors(batch(size), lambda x: x.to(twin.device))
        try:
            tape = twin.record(loss, given, training=True)
            taller = twin.record(loss, with_one_more(given), training=True)
        except MeshwrightError:
            raise
        # What a model cannot do with few samples, e.g. batch statistics of one, it says in as many ways.
        except Exception as error:
            failure = error
            continue
        shape = (len(tape.calls), len(tape.values))
        if cut is None:
            cut, first = finest_cut(tape), shape
        if shape != first:
            continue  # numbers of values would not be the same
        inputs = dict(zip(tape.inputs, tensors_in(given), strict=True))
        sized[size] = Sized(inputs, tape, taller, make_stages(tape, cut))
    if cut is None:
        assert failure is not None, "no size was given"
        raise PlanError(
            "E276",
            f"{type(twin.model).__name__} cannot be planned: it runs with none of {', '.join(map(str, samples))} "
            f"samples in a micro-batch ({type(failure).__name__}: {' '.join(str(failure).split())[:200]}). Mend that, "
            f'or lay the run out yourself with plan.mode="given".',
        ) from failure
    return sized, cut


def _digest(at: Sized, number: int, modules: Mapping[str, nn.Module]) -> object:
    """What units that take equally long have alike."""
    tape, stage = at.tape, at.units[number]
    calls = []
    for position in stage.calls:
        call = tape.calls[position]
        inside = modules[call.module].modules() if call.module else ()
        what = tuple(type(m).__qualname__ for m in inside) or (str(getattr(call.function, "__name__", "")),)
        weights = tuple(tuple(p.shape) for p in modules[call.module].parameters()) if call.module else ()
        numbers = (*call.inputs, *(n for n in call.outputs if n >= 0))
        calls.append((what, weights, call.cost, tuple(_kind(tape, n) for n in numbers)))
    ends = tuple(_kind(tape, n) for n in (*stage.receives, *stage.sends))
    return tuple(calls), ends, number == len(at.units) - 1


def _kind(tape: Tape, number: int) -> object:
    value = tape.values[number]
    return value.shape, value.dtype, value.needs_grad


def _held(at: Sized, model: nn.Module) -> tuple[list[float], list[float], tuple[Tie, ...]]:
    """Bytes of trained weights and of other tensors of each unit alone, and trained weights of several."""
    users: dict[str, list[int]] = {}
    for number, stage in enumerate(at.units):
        for name in dict.fromkeys(n for position in stage.calls for n in at.tape.calls[position].held):
            users.setdefault(name, []).append(number)
    trained, fixed, ties = [0.0] * len(at.units), [0.0] * len(at.units), []
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        size = float(x.numel() * x.element_size())
        readers = users.get(name, [0])
        if not x.requires_grad:
            for number in readers:
                fixed[number] += size
        elif len(readers) == 1:
            trained[readers[0]] += size
        else:
            ties.append(Tie(tuple(readers), size, name))
    return trained, fixed, tuple(ties)


def _passed(sizes: Sequence[Sized]) -> tuple[Passed, ...]:
    """What units hand to later ones, with bytes at each size."""
    first = sizes[-1]  # one sample may be a special case
    unit_of = {
        position: number
        for number, stage in enumerate(first.units)
        for position in stage.calls
        if not first.tape.is_free[position]
    }
    ends: dict[int, set[int]] = {}
    for position, number in unit_of.items():
        for n in first.tape.calls[position].inputs:
            ends.setdefault(n, set()).add(number)
    last = len(first.units) - 1
    counted = (first.tape.count.number,) if isinstance(first.tape.count, Slot) else ()
    for n in (first.tape.total, *counted):
        ends.setdefault(n, set()).add(last)
    found = []
    taller, samples = first.taller, num_samples_in(list(first.inputs.values()))
    for n, readers in sorted(ends.items()):
        producer = unit_of.get(first.tape.values[n].maker)
        later = tuple(sorted(x for x in readers if producer is not None and x > producer))
        if producer is not None and later:
            divisible = _is_divisible(first.tape, taller, n, samples)
            found.append(Passed(producer, later, tuple(_bytes(at.tape, n) for at in sizes), divisible))
    return tuple(found)


def _is_divisible(tape: Tape, taller: Tape, number: int, samples: int) -> bool:
    try:
        sample_dims(tape, taller, {number}, samples)
    except PlanError:
        return False
    return True


def _bytes(tape: Tape, number: int) -> float:
    value = tape.values[number]
    numel = 1
    for extent in value.shape:
        numel *= extent
    return float(numel * value.dtype.itemsize)
