"""Runs the programs of `exchange/` over another transport's sends and receives.

Owns the executor: one thread of this rank works off collectives in the order in which they were issued, the same on
every rank, so they move while the program computes. What no program carries out goes to the inner transport as it is.
A rank makes its own program only. Tensors of CPUs; on CUDA the device's own streams would do what the thread does.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from meshwright.comm.transports.base import Transport, Work
from meshwright.comm.transports.scratch import ScratchBuffers
from meshwright.exchange.catalogue import Generated, generate
from meshwright.exchange.program import Collective, Program, Span, chunk_bounds

# The inner transport's tags of messages: collectives take turns, so that ranks that leave the common order wait for
# each other instead of reading another collective's bytes.
_TAGS = 1 << 12


@dataclass(frozen=True)
class Choice:
    """Which algorithm carries out what.

    Attributes:
        algorithms: collective to a name of the catalogue; the others are the inner transport's.
        ranks_per_node: neighbouring ranks on one host, for hierarchical.
        num_servers: ranks at the end that bring no values, for parameter_server.
    """

    algorithms: Mapping[str, str]
    ranks_per_node: int = 1
    num_servers: int = 0


class ExchangeTransport:
    """A transport whose collectives are programs.

    Args:
        inner: carries the messages.
        index: this rank's position in the group.
        size: number of ranks.
        choice: algorithms.
    """

    def __init__(self, inner: Transport, index: int, size: int, choice: Choice) -> None:
        self.name = f"{inner.name}, {'/'.join(sorted(set(choice.algorithms.values())))}"
        self._inner = inner
        self._index = index
        self._size = size
        self._choice = choice
        self._sequence = 0
        self._sums = ScratchBuffers()  # taken and given by whoever issues and waits
        self._arriving = ScratchBuffers()  # the worker's own
        self._worker = _Worker()
        self._generated = lru_cache(maxsize=None)(self._generate)

    @property
    def inner(self) -> Transport:
        """What carries the messages."""
        return self._inner

    @property
    def scratch_bytes(self) -> int:
        """See `Transport`."""
        return self._inner.scratch_bytes + self._sums.nbytes + self._arriving.nbytes

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """See `Transport`."""
        return self._inner.allocate(numel, dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> None:
        """See `Transport`: none, for a program passes on what it finds in its own memory."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """See `Transport`."""
        if "all_reduce" not in self._choice.algorithms:
            return self._inner.all_reduce(tensor)
        flat = tensor.view(-1)
        return self._start("all_reduce", flat, flat)

    def reduce(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        if "reduce" not in self._choice.algorithms:
            return self._inner.reduce(tensor, index)
        flat = tensor.view(-1)
        return self._start("reduce", flat, flat, root=index)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`. Sums on the way are kept in `source` if `output` is a slice of it, else in scratch."""
        if "reduce_scatter" not in self._choice.algorithms:
            return self._inner.reduce_scatter(output, source)
        whole, mine = source.view(-1), output.view(-1)
        if whole.view(self._size, -1)[self._index].data_ptr() == mine.data_ptr():
            return self._start("reduce_scatter", whole, whole)
        scratch = self._sums.take(whole.numel(), whole.dtype)

        def before() -> None:
            scratch.copy_(whole)

        def after() -> None:
            mine.copy_(scratch.view(self._size, -1)[self._index])
            self._sums.give(scratch)

        return self._start("reduce_scatter", scratch, scratch, before=before, after=after)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        if "all_gather" not in self._choice.algorithms:
            return self._inner.all_gather(output, source)
        whole = output.view(-1)
        mine = whole.view(self._size, -1)[self._index]
        if mine.data_ptr() != source.data_ptr():
            mine.copy_(source.view(-1))
        return self._start("all_gather", whole, whole)

    def broadcast(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        if "broadcast" not in self._choice.algorithms:
            return self._inner.broadcast(tensor, index)
        flat = tensor.view(-1)
        return self._start("broadcast", flat, flat, root=index)

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        if "all_to_all" not in self._choice.algorithms:
            return self._inner.all_to_all(output, source)
        target, origin = output.view(-1), source.view(-1)
        target.view(self._size, -1)[self._index].copy_(origin.view(self._size, -1)[self._index])
        return self._start("all_to_all", target, origin)

    def send(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return self._inner.send(tensor, index, _TAGS + tag)

    def receive(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return self._inner.receive(tensor, index, _TAGS + tag)

    def barrier(self) -> Work:
        """See `Transport`."""
        return self._inner.barrier()

    def lowered(self, op: str, nbytes: int, index: int = 0) -> Counter[str]:
        """See `Transport`: messages of this rank's program; empty ones of a tiny buffer are not sent."""
        if op not in self._choice.algorithms:
            return self._inner.lowered(op, nbytes, index)
        program = self._generated(op, index).program(self._index)
        return Counter(
            send=sum(len(step.sends) for step in program), receive=sum(len(step.receives) for step in program)
        )

    def _generate(self, collective: str, root: int) -> Generated:
        name, num_workers = self._choice.algorithms[collective], self._size - self._choice.num_servers
        return generate(
            name,
            cast(Collective, collective),
            num_workers,
            ranks_per_node=self._choice.ranks_per_node,
            num_servers=self._choice.num_servers,
            root=root - num_workers if self._choice.num_servers else root,
        )

    def _start(
        self,
        collective: str,
        output: Tensor,
        source: Tensor,
        *,
        root: int = 0,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> Work:
        made = self._generated(collective, root)
        program, bounds = made.program(self._index), chunk_bounds(output.numel(), made.num_chunks)
        tag, self._sequence = self._sequence, (self._sequence + 1) % _TAGS

        def run() -> None:
            if before is not None:
                before()
            self._run(program, bounds, output, source, tag)

        return Work([self._worker.submit(run)], after, keep=(output, source))

    def _run(self, program: Program, bounds: list[int], output: Tensor, source: Tensor, tag: int) -> None:
        def part(tensor: Tensor, span: Span) -> Tensor:
            return tensor[bounds[span.first] : bounds[span.stop]]

        for step in program:
            waits: list[Work] = []
            sums: list[tuple[Tensor, Tensor]] = []
            for receive in step.receives:
                target = part(output, receive.span)
                if not target.numel():
                    continue
                if receive.adds:
                    arriving = self._arriving.take(target.numel(), target.dtype)
                    sums.append((target, arriving))
                    target = arriving
                waits.append(self._inner.receive(target, receive.peer, tag))
            for send in step.sends:
                values = part(source, send.span)
                if values.numel():
                    waits.append(self._inner.send(values, send.peer, tag))
            for work in waits:
                work.wait()
            for target, arrived in sums:
                target.add_(arrived)
                self._arriving.give(arrived)


class _Task:
    """One collective of the worker's queue."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._done = threading.Event()
        self._error: RuntimeError | None = None

    def work_off(self) -> None:
        """Run it; an error of the network is kept for whoever waits."""
        try:
            with torch.no_grad():  # a thread begins with gradients on
                self._run()
        except RuntimeError as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Return when it has run, or raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class _Worker:
    """A thread that works off tasks in order; started by the first one."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], None]) -> _Task:
        """Queue `run`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
            self._thread.start()
        task = _Task(run)
        self._tasks.put(task)
        return task

    def _serve(self) -> None:
        while True:
            self._tasks.get().work_off()
