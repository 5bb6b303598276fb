"""A lowered schedule run on one rank: computations, and the messages between them.

Receives are posted ahead of their place in the program, in its order; a send is waited for when two more have been
issued to the same rank. The program is one that does not stop even if every message blocks (`schedule/lower.py`), so
waiting for older ones cannot stop it either. Where a schedule splits backward, products of weight gradients wait for
their `W` (`adapt/linear.py`); under zero2 and zero3, which reduce each micro-batch's gradients as they come, the whole
backward runs in `I`.

Owns the order of what is done. Weights and their gradients are the engine's business.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.adapt.linear import Deferral
from meshwright.comm import ops
from meshwright.comm.ops import Handle, PipelineGroups
from meshwright.pipeline.evaluation import Evaluation
from meshwright.pipeline.micro_batch import MicroBatch, Reader
from meshwright.pipeline.passes import Pass
from meshwright.pipeline.redistribute import Parts
from meshwright.pipeline.stage import Holder, StageRun
from meshwright.pipeline.ties import SharedParameters
from meshwright.schedule.action import COMPUTE, Action, Schedule
from meshwright.sharding.engine import ShardingEngine

# Receives that are posted before their place in the program.
POSTED_AHEAD = 2
# Sends to one rank that are not waited for.
SENDS_OPEN = 2
# (step, micro-batch, random calls of the stages before) -> around a forward (True) or a part of its backward (False)
Randomness = Callable[[int, int, int], Callable[[bool], AbstractContextManager[None]]]
# (micro-batch, calls of modules that stages before have made) -> around the forward
Watch = Callable[[int, Mapping[str, int]], AbstractContextManager[None]]
# (computation, seconds of the clock when it had what it needs and when it was done, CPU seconds of this thread)
Clock = Callable[[Action, float, float, float], None]


@dataclass
class _Step:
    """One step while it runs.

    Attributes:
        batches: micro-batch to what this rank read, with its tape and stages.
        coming: receives that are posted, by their action.
        sends: to each rank, oldest first.
        handed: values and gradients between stages of this rank.
        random: around the passes of a stage and micro-batch.
        since: clock and CPU seconds when the computation that runs had what it needs.
    """

    number: int
    divisor: float
    micro_batch: Callable[[int], Any]
    batches: dict[int, MicroBatch] = field(default_factory=dict)
    runs: dict[tuple[int, int], StageRun] = field(default_factory=dict)
    coming: dict[Action, list[tuple[int, Tensor, Handle]]] = field(default_factory=dict)
    sends: dict[int, deque[list[Handle]]] = field(default_factory=dict)
    handed: dict[tuple[str, int, int], dict[int, Tensor]] = field(default_factory=dict)
    random: dict[tuple[int, int], Callable[[bool], AbstractContextManager[None]]] = field(
        default_factory=dict
    )
    weights: dict[tuple[int, int], list[Callable[[], object]]] = field(default_factory=dict)
    position: int = 0
    next_receive: int = 0
    since: tuple[float, float] = (0.0, 0.0)


class PipelineExecutor:
    """This rank's stages.

    Args:
        reader: makes micro-batches of batches.
        groups: the ranks of the pipeline.
        schedule: lowered.
        engine: has this rank's part of the model.
        deferral: of weight gradients; used where the schedule splits backward.

    Attributes:
        randomness: dropout of a part of the model; None: left to torch.
        scopes: what is entered around every pass besides, outside of dropout's.
        inner_scopes: the same, inside.
        watch: what is entered around every forward of training.
        clock: is told of every computation of training, for timelines; None: nothing is timed.
        cut_batch: this rank's part of the sequences of a batch.
        deferral: as given.
        shared: sums of gradients over ranks that hold the same parameters.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        groups: PipelineGroups,
        schedule: Schedule,
        engine: ShardingEngine,
        shared: SharedParameters,
        deferral: Deferral,
    ) -> None:
        self.reader, self._groups, self.schedule = reader, groups, schedule
        self._program = schedule.programs[groups.index]
        self._receives = [a for a in self._program if a.op in ("receive_activation", "receive_gradient")]
        is_receive = [a.op in ("receive_activation", "receive_gradient") for a in self._program]
        self._passed = [0, *itertools.accumulate(map(int, is_receive))]
        backward = [a for a in self._program if a.op in ("B", "I", "W")]
        self._last_backward = backward[-1]
        self._holder = Holder(engine.model)
        self.deferral = deferral
        self._waits = schedule.splits_backward and not engine.policy.shards_gradients
        self._shared = shared
        self.randomness: Randomness | None = None
        self.scopes: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
        self.inner_scopes: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
        self._declared: Counter[tuple[str, str]] = Counter()
        self._passes: tuple[Pass, ...] = ()
        self.watch: Watch | None = None
        self.clock: Clock | None = None
        replicas, placement = engine.groups.all, schedule.placement[0]
        self._evaluation = Evaluation(reader, self._holder, groups, replicas, placement)

    @property
    def opened(self) -> frozenset[str]:
        """Modules that are not called: what is between their parts is divided over stages."""
        return frozenset(self.reader.twin.opened)

    @property
    def num_backwards(self) -> int:
        """Backwards of a step on this rank, one for each of its stages and micro-batches there."""
        return sum(a.op in ("B", "I") for a in self._program)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients wait for their own pass."""
        return self._waits

    @property
    def passes(self) -> tuple[Pass, ...]:
        """What ran in the newest step."""
        return self._passes

    @property
    def num_messages(self) -> dict[tuple[str, str], int]:
        """Messages of the newest step, by (operation, axis), as the program declares them."""
        return dict(self._declared)

    # A step of training.

    def run(
        self, engine: ShardingEngine, micro_batch: Callable[[int], Any], *, divisor: float, step: int
    ) -> Tensor:
        """See `Stages`."""
        tally = torch.zeros(2, dtype=torch.float64)
        now = _Step(step, divisor, micro_batch)
        log = engine.group.log
        for position, action in enumerate(self._program):
            now.position = position
            now.since = _seconds()
            if action.op == "F":
                self._post(now)
                log.progress(f"forward of stage {action.stage}, micro-batch {action.microbatch}")
                self._forward(now, engine, action, tally)
            elif action.op in ("B", "I"):
                self._post(now)
                log.progress(f"backward of stage {action.stage}, micro-batch {action.microbatch}")
                self._backward(now, engine, action)
            elif action.op == "W":
                self._weight_gradients(now, engine, action)
            elif action.op == "send_activation":
                self._send(now, action, ("send F", action.stage - 1, action.microbatch))
            elif action.op == "send_gradient":
                self._send(now, action, ("send G", action.stage + 1, action.microbatch))
            elif action.op in ("receive_activation", "receive_gradient"):
                self._post(now, through=action)
            if self.clock is not None and action.op in COMPUTE:
                (start, cpu), (end, cpu_end) = now.since, _seconds()
                self.clock(action, start, end, cpu_end - cpu)
        for waiting in now.sends.values():
            for handles in waiting:
                _wait(handles)
        self._shared.sum()
        self._declared = self._declare(now)
        self._passes = tuple(self._pass_of(now, a) for a in self._program if a.op in ("F", "B", "I"))
        return tally

    def _pass_of(self, now: _Step, action: Action) -> Pass:
        batch = self._batch(now, action.microbatch)
        calls = [batch.tape.calls[position].module for position in batch.stages[action.stage].calls]
        modules = tuple(module for module in calls if module)
        return Pass(action.stage, action.microbatch, action.op == "F", modules)

    def _declare(self, now: _Step) -> Counter[tuple[str, str]]:
        found = Counter(self._shared.num_messages)
        for action in self._program:
            if action.op.startswith(("send", "receive")):
                sends = action.op.startswith("send")
                group = self._groups.to(action.peer) if sends else self._groups.coming_from(action.peer)
                numbers = _carried(self._batch(now, action.microbatch), action)
                found["send" if sends else "receive", group.axis] += len(numbers)
        return found

    def _forward(self, now: _Step, engine: ShardingEngine, action: Action, tally: Tensor) -> None:
        stage, m = action.stage, action.microbatch
        batch = self._batch(now, m)
        tape, stages = batch.tape, batch.stages
        received = self._taken(now, "F", action)
        for number, x in received.items():
            x.requires_grad_(tape.values[number].needs_grad)
        run = StageRun(tape, stages[stage], batch.inputs, received)
        if self.randomness is not None:
            now.random[stage, m] = self.randomness(now.number, m, stages[stage].draws_before)
        engine.start_forward((stage, m))
        with ExitStack() as stack:
            self._enter(stack, now, (stage, m), is_forward=True)
            stack.enter_context(batch.part.forward())
            if self.watch is not None:
                calls = {tape.calls[i].module: tape.calls[i].number for i in reversed(stages[stage].calls)}
                stack.enter_context(self.watch(m, calls))
            self.reader.start_stage(batch, stages[stage])
            run.forward(self._holder)
        now.runs[stage, m] = run
        if stage == self.schedule.num_stages - 1:
            total, count = run.loss()
            batch.part.check_count(count)
            tally += torch.tensor([float(total.detach()), count], dtype=torch.float64)
        else:
            self._hand(now, "F", action, stage + 1, {n: run.output(n) for n in run.stage.sends})

    def _backward(self, now: _Step, engine: ShardingEngine, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        run = now.runs.pop((stage, m))
        is_last_stage = stage == self.schedule.num_stages - 1
        gradients = {} if is_last_stage else self._taken(now, "G", action)
        splits = action.op == "I" and self._waits
        last = not splits and self._is_last_work(now)
        with self._pass(engine, (stage, m), last=last), ExitStack() as stack:
            self._enter(stack, now, (stage, m), is_forward=False)
            stack.enter_context(self._batch(now, m).part.backward())
            if splits:
                stack.enter_context(self._deferred(now, (stage, m)))
            divisor = now.divisor if is_last_stage else None
            owed = run.backward(gradients, divisor=divisor, watch=self.deferral.watch)
        if stage:
            self._hand(now, "G", action, stage - 1, owed)
        if not splits:
            now.random.pop((stage, m), None)

    def _is_last_work(self, now: _Step) -> bool:
        """Whether the rest of the program has weight gradients alone, which have been made already."""
        last_op = {"B", "I", "W"} if self._waits else {"B", "I"}
        return not any(a.op in last_op for a in self._program[now.position + 1 :])

    def _weight_gradients(self, now: _Step, engine: ShardingEngine, action: Action) -> None:
        if not self._waits:
            return
        key = (action.stage, action.microbatch)
        with self._pass(engine, key, last=action is self._last_backward), torch.no_grad():
            for make in now.weights.pop(key):
                make()
        now.random.pop(key, None)

    @contextmanager
    def _pass(self, engine: ShardingEngine, turn: tuple[int, int], *, last: bool) -> Iterator[None]:
        """Around a part of a backward."""
        engine.expect_gradients(last=last)
        engine.start_backward(turn)
        yield
        engine.finish_microbatch()

    @contextmanager
    def _deferred(self, now: _Step, key: tuple[int, int]) -> Iterator[None]:
        self.deferral.is_on = True
        try:
            yield
        finally:
            self.deferral.is_on = False
            now.weights[key] = self.deferral.take()

    def _enter(self, stack: ExitStack, now: _Step, key: tuple[int, int], *, is_forward: bool) -> None:
        for scope in self.scopes:
            stack.enter_context(scope())
        if key in now.random:
            stack.enter_context(now.random[key](is_forward))
        for scope in self.inner_scopes:  # sees calls before dropout does
            stack.enter_context(scope())

    # Batches and tapes.

    def _batch(self, now: _Step, m: int) -> MicroBatch:
        if m not in now.batches:
            replicas = self.schedule.replicas
            parts = None if replicas is None else Parts.of(self._groups, replicas.samples)
            now.batches[m] = self.reader.prepared(now.micro_batch(m), parts, training=True)
        return now.batches[m]

    # Messages.

    def _hand(self, now: _Step, kind: str, action: Action, to: int, values: dict[int, Tensor]) -> None:
        here = self.schedule.placement[action.slot][to] == self._groups.place
        now.handed[
            "take " + kind if here else "send " + kind, to if here else action.stage, action.microbatch
        ] = values

    def _taken(self, now: _Step, kind: str, action: Action) -> dict[int, Tensor]:
        """What another stage made for this action."""
        stage, m = action.stage, action.microbatch
        if kind == "F" and stage == 0:
            return {}
        here = now.handed.pop(("take " + kind, stage, m), None)
        if here is not None:
            return here
        op = "receive_activation" if kind == "F" else "receive_gradient"
        found: dict[int, list[Tensor]] = {}
        for message in [a for a in now.coming if (a.op, a.stage, a.microbatch) == (op, stage, m)]:
            for number, buffer, handle in now.coming.pop(message):
                handle.wait()
                found.setdefault(number, []).append(buffer)
        joined = {number: now.batches[m].joined(number, pieces) for number, pieces in found.items()}
        now.since = _seconds()
        return joined

    def _post(self, now: _Step, through: Action | None = None) -> None:
        """Post receives: all up to one, or some ahead of where the program is."""
        until = self._passed[now.position] + (1 if through is not None else POSTED_AHEAD)
        while now.next_receive < min(until, len(self._receives)):
            self._post_one(now, self._receives[now.next_receive])
            now.next_receive += 1

    def _post_one(self, now: _Step, action: Action) -> None:
        batch = self._batch(now, action.microbatch)
        group = self._groups.coming_from(action.peer)
        posted = []
        for place, number in enumerate(_carried(batch, action)):
            buffer = batch.empty(number, action.peer, self.reader.twin.device)
            handle = ops.receive(
                buffer, group, index=action.peer, tag=self._tag(action, place), cause=_cause(action)
            )
            posted.append((number, buffer, handle))
        now.coming[action] = posted

    def _send(self, now: _Step, action: Action, key: tuple[str, int, int]) -> None:
        values, group = now.handed[key], self._groups.to(action.peer)
        behind = self._program[now.position + 1 : now.position + 2]
        if not any((a.op, a.stage, a.microbatch) == (action.op, *_place(action)) for a in behind):
            del now.handed[key]  # the last of the ranks that get a part
        batch = self._batch(now, action.microbatch)
        handles = [
            ops.send(
                batch.for_peer(number, x, action.peer),
                group,
                index=action.peer,
                tag=self._tag(action, place),
                cause=_cause(action),
            )
            for place, (number, x) in enumerate(values.items())
        ]
        waiting = now.sends.setdefault(action.peer, deque())
        waiting.append(handles)
        if len(waiting) > SENDS_OPEN:
            _wait(waiting.popleft())

    def _tag(self, action: Action, place: int) -> int:
        """The same for both ends of a message, and of no other between them."""
        kind = "activation" in action.op
        return ((action.microbatch * self.schedule.num_stages + action.stage) * 2 + kind) * 64 + place % 64

    # Forwards alone.

    def evaluate(self, batch: Any) -> tuple[Tensor, float]:
        """Loss sum and count of a batch on the ranks of the last stage, zeros elsewhere; in evaluation mode."""
        return self._evaluation.run(batch, (*self.scopes, *self.inner_scopes))


def _seconds() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _wait(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()


def _carried(batch: MicroBatch, action: Action) -> tuple[int, ...]:
    """Numbers of the values that a message carries; its stage is the one that needs it."""
    if "activation" in action.op:
        return batch.stages[action.stage].receives
    return tuple(n for n in batch.stages[action.stage].sends if batch.tape.values[n].needs_grad)


def _place(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def _cause(action: Action) -> str:
    what = "activation for" if "activation" in action.op else "gradient for"
    return f"{what} stage {action.stage}, micro-batch {action.microbatch}"
