"""The memory ledger of a pipeline: what each of its places holds, before any of them is made.

Weights, gradients and optimizer are those of the place's parameters, by the formulas of `ledger.py`. Of every stage
one micro-batch is run without values: what it keeps for its backward, and the most that each pass takes besides. The
program of the place then says how many wait for their backward at once, and where its peak is.

Simplifications: where a schedule splits backward, a micro-batch keeps all of its activations until its `W`. Models
whose sequences or matrices are cut over ranks are not followed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.nested import tensors_in
from meshwright.partitioning.checkpointing import Span
from meshwright.pipeline.build import keep_place
from meshwright.pipeline.executor import POSTED_AHEAD, SENDS_OPEN
from meshwright.pipeline.micro_batch import MicroBatch
from meshwright.pipeline.stage import Holder, StageRun
from meshwright.recompute.install import install as install_recompute
from meshwright.recompute.install import reruns_of_model
from meshwright.recompute.live_bytes import LiveBytes
from meshwright.schedule.action import Program
from meshwright.training.activations import Subject, reason_of, twin_of
from meshwright.training.ledger import Ledger, state_bytes
from meshwright.training.optimizer import OptimizerSpec
from meshwright.training.precision import MASTER_DTYPES
from meshwright.training.stages import Pipeline
from meshwright.training.tree import cast_batch


@dataclass(frozen=True)
class StageBytes:
    """What a micro-batch takes on a stage.

    Attributes:
        kept: from its forward to its backward, with what the stage has received.
        forward: the most while its forward runs.
        backward: the most while its backward runs, what it keeps included.
        received: of `kept`, the values from the stage before.
        gradients: of the values that it sends, as they come back.
    """

    kept: int
    forward: int
    backward: int
    received: int
    gradients: int


def predict_places(
    subject: Subject,
    spec: OptimizerSpec,
    pipeline: Pipeline,
    *,
    schedules: Mapping[str, Span] | None = None,
) -> list[Ledger]:
    """What the first rank of each place of a pipeline will hold."""
    holders, schedule = pipeline.plan.holders, pipeline.plan.schedule
    again = reruns_of_model(subject.model, subject.plan.recompute, schedules)
    at_once = 3 if any(len(ran) > 2 for ran in again.values()) else 2
    states = []
    for place in range(schedule.num_ranks):
        part = _without_memory(subject.model)
        apart = keep_place(part, holders, place)
        states.append(
            state_bytes(
                replace(subject, model=part),
                spec,
                index=0,
                used=None,
                gathered_at_once=at_once,
                apart=apart,
            )
        )
    try:
        if subject.plan.mesh.size("cp") > 1:
            raise NotImplementedError("stages of cut sequences")
        stages = stage_bytes(subject, pipeline, schedules=schedules)
    except MeshwrightError:
        raise
    except Exception as error:  # whatever a model does that shapes alone cannot follow
        return [Ledger(state, {}, unknown=reason_of(error)) for state in states]
    batch_bytes = sum(x.nbytes for x in tensors_in(subject.batch))
    found = []
    for state, program in zip(states, schedule.programs, strict=True):
        peak, where = peak_of(program, stages, batch_bytes=batch_bytes)
        found.append(Ledger({**state, "activations": peak, "logits": 0}, {}, peak_at=where))
    return found


def stage_bytes(
    subject: Subject, pipeline: Pipeline, *, schedules: Mapping[str, Span] | None = None
) -> list[StageBytes]:
    """One micro-batch of each stage, run without values.

    Raises:
        Whatever the model raises where its control flow depends on values.
    """
    batch = cast_batch(subject.batch, MASTER_DTYPES[subject.plan.precision])
    read = pipeline.reader.prepared(batch, None, training=True)
    with twin_of(subject) as (twin, empty, known):
        install_recompute(twin, subject.plan.recompute, schedules=schedules)
        inputs = dict(zip(read.tape.inputs, tensors_in(empty), strict=True))
        return [_measured(twin, read, number, inputs, known) for number in range(len(read.stages))]


def _measured(
    twin: nn.Module, read: MicroBatch, number: int, inputs: Mapping[int, Tensor], known: Sequence[Tensor]
) -> StageBytes:
    tape, stage = read.tape, read.stages[number]
    is_last = number == len(read.stages) - 1

    def made(numbers: Sequence[int]) -> dict[int, Tensor]:
        return {n: torch.empty(tape.values[n].shape, dtype=tape.values[n].dtype) for n in numbers}

    with LiveBytes(known) as meter:
        received = made(stage.receives)
        for n, x in received.items():
            x.requires_grad_(tape.values[n].needs_grad)
        taken = meter.total
        run = StageRun(tape, stage, inputs, received)
        run.forward(Holder(twin))
        kept, forward = meter.total, meter.peak
        gradients = {} if is_last else made(run.wanted)
        back = meter.total - kept
        meter.restart_peak()
        run.backward(gradients, divisor=1.0 if is_last else None)
        return StageBytes(kept, forward, meter.peak, taken, back)


def peak_of(program: Program, stages: Sequence[StageBytes], *, batch_bytes: int) -> tuple[int, str]:
    """The most bytes of activations at once, batches that have been read included, and where that is.

    Args:
        program: of a place.
        stages: by number.
        batch_bytes: of one micro-batch's tensors.
    """
    now, peak, where = 0, 0, ""
    read: set[int] = set()
    splits = any(action.op == "W" for action in program)
    sent = deque[int](maxlen=SENDS_OPEN)  # gradients that are not waited for
    for position, action in enumerate(program):
        if action.op == "send_gradient":
            sent.append(stages[action.stage].gradients)
        if action.op not in ("F", "B", "I", "W"):
            continue
        stage = stages[action.stage]
        if action.microbatch not in read:
            read.add(action.microbatch)
            now += batch_bytes
        coming = [a for a in program[position + 1 :] if a.op.startswith("receive")][:POSTED_AHEAD]
        moving = sum(sent) + sum(
            stages[a.stage].received if a.op == "receive_activation" else stages[a.stage].gradients
            for a in coming
        )
        most = {
            "F": stage.forward,
            "B": stage.backward - stage.kept,
            "I": stage.backward - stage.kept,
            "W": 0,
        }
        if now + moving + most[action.op] > peak:
            peak = now + moving + most[action.op]
            word = "forward" if action.op == "F" else "backward"
            where = f"{word} of stage {action.stage}, micro-batch {action.microbatch}"
        if action.op == "F":
            now += stage.kept
        elif action.op == "W" or not splits:
            now -= stage.kept
    return peak, where


def _without_memory(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(model, memo)
