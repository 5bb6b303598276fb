"""The operations: each is logged before it is issued and returns a handle.

A group of one rank communicates nothing and logs nothing: the same code runs on one process. Errors of the
network become `WorkerError` with the operation in the text, so that the launcher can tell a consequence (a
peer died) from a cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.log import CommLog
from meshwright.comm.transports.base import Transport, Work
from meshwright.errors import WorkerError


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other along some axes of the mesh.

    Attributes:
        axis: name used in the log, e.g. `dp`.
        ranks: global ranks, ascending.
        index: position of this rank in `ranks`.
        transport: None for a group of one rank.
        log: this rank's log.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    transport: Transport | None
    log: CommLog

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class PipelineGroups:
    """The ranks that hold the stages of one copy of the model, in their order along the pipeline.

    A group for each direction: NCCL has one order of messages a pair and communicator. Where places along the pipeline
    have unlike numbers of ranks, the groups are all ranks of the run.

    Attributes:
        all: for what they do together.
        up: messages to ranks behind.
        down: messages to ranks before.
        teams: for each place the ranks there, as places in `all`; empty: each rank is a place.
    """

    all: Group
    up: Group
    down: Group
    teams: tuple[tuple[int, ...], ...] = ()

    @property
    def index(self) -> int:
        """This rank among `all`."""
        return self.all.index

    @property
    def place(self) -> int:
        """This rank's place along the pipeline."""
        return self.place_of(self.index)

    def place_of(self, index: int) -> int:
        """The place of a rank of `all`."""
        if not self.teams:
            return index
        return next(place for place, team in enumerate(self.teams) if index in team)

    def team_at(self, place: int) -> tuple[int, ...]:
        """The ranks of `all` at a place."""
        return self.teams[place] if self.teams else (place,)

    def to(self, index: int) -> Group:
        """For a message to a rank of `all`."""
        return self.up if self.place_of(index) > self.place else self.down

    def coming_from(self, index: int) -> Group:
        """For a message from a rank of `all`."""
        return self.up if self.place_of(index) < self.place else self.down


@dataclass(frozen=True)
class DataGroups:
    """The data-parallel ranks, and how they divide a copy of the model.

    Attributes:
        all: every data-parallel rank: samples are cut over it, and what a step agrees on is summed over it.
        shard: ranks that together hold one copy.
        replicate: ranks that hold the same part of different copies.
        computing: the workers where some ranks are parameter servers, on a server this rank alone; None: all.
        num_servers: ranks at the end of `all` that hold the parameters and have no samples.
        model: ranks that hold other parts of this rank's copy and see its samples (pp x tp); None: it is alone.
        tensor: those of them that share the matrices of the same modules (tp); None: it has them whole.
        pipeline: those of them that hold other modules, at the same place in `tensor` (pp); None: it has all.
        world: every rank of the run, where `all` is not that.
        context: ranks that read the same samples and hold other parts of their sequences (cp), neighbours in `all`;
            None: this rank has them whole.
    """

    all: Group
    shard: Group
    replicate: Group
    computing: Group | None = None
    num_servers: int = 0
    model: Group | None = None
    tensor: Group | None = None
    pipeline: PipelineGroups | None = None
    world: Group | None = None
    context: Group | None = None

    @property
    def num_readers(self) -> int:
        """Parts into which samples are cut: the workers, those that share sequences counted once."""
        return self.num_workers // (1 if self.context is None else self.context.size)

    @property
    def reader_index(self) -> int:
        """Which of these parts is this rank's."""
        return self.workers.index // (1 if self.context is None else self.context.size)

    @property
    def has_teams(self) -> bool:
        """Whether places along the pipeline have unlike numbers of ranks; `model` then is every rank of the run."""
        return self.pipeline is not None and bool(self.pipeline.teams)

    @property
    def speaks(self) -> bool:
        """Whether what all data-parallel ranks know enters sums over `model` from this one: it does once."""
        return not self.has_teams or self.all.index == 0

    @property
    def num_alike(self) -> int:
        """Ranks of `model` that have the last stage and see the same samples."""
        assert self.model is not None, "a whole model has no parts"
        if self.has_teams:
            return 1
        return self.model.size if self.pipeline is None else self.model.size // self.pipeline.all.size

    @property
    def everyone(self) -> Group:
        """Every rank of the run."""
        return self.all if self.world is None else self.world

    @property
    def workers(self) -> Group:
        """Ranks that run the model: over them samples are cut and batch statistics summed."""
        return self.all if self.computing is None else self.computing

    @property
    def num_workers(self) -> int:
        """How many they are, on a server too."""
        return self.all.size - self.num_servers

    @property
    def is_server(self) -> bool:
        """Whether this rank holds parameters and has no samples."""
        return self.all.index >= self.num_workers

    @classmethod
    def of(cls, group: Group) -> DataGroups:
        """One copy over all of `group`."""
        return cls(group, group, alone("dp_replicate", group))

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros (1-D) that travel: in memory of `device`, where collectives of these groups are fastest."""
        if device.type == "cpu":
            for group in (self.shard, self.replicate, self.all):
                memory = None if group.transport is None else group.transport.allocate(numel, dtype)
                if memory is not None:
                    return memory
        return torch.zeros(numel, dtype=dtype, device=device)

    def allocate_common(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Zeros (1-D) that are the same memory on all ranks of a copy, where there is such memory; all must call."""
        if device.type != "cpu" or self.shard.transport is None:
            return None
        return self.shard.transport.allocate_common(numel, dtype)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the distinct axes, for the log."""
        return tuple(dict.fromkeys((self.all.axis, self.shard.axis, self.replicate.axis)))


def alone(axis: str, group: Group) -> Group:
    """This rank of `group` by itself."""
    return Group(axis, (group.ranks[group.index],), 0, None, group.log)


class Handle:
    """An operation in flight; `wait` before using its result. A second `wait` does nothing."""

    def __init__(self, log: CommLog | None = None, sequence: int = -1, work: Work | None = None) -> None:
        self._log = log
        self._sequence = sequence
        self._work = work

    def wait(self) -> None:
        """Return when the result may be used; on CUDA the current stream waits, not the host."""
        work, self._work = self._work, None
        if work is None or self._log is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise _network_error(self._log, self._sequence, error) from error
        self._log.finish(self._sequence)


DONE = Handle()


def _network_error(log: CommLog, sequence: int, error: RuntimeError) -> WorkerError:
    event = next((event for event in log.events() if event.sequence == sequence), None)
    what = event.describe() if event else f"operation #{sequence}"
    first_line = str(error).strip().splitlines()[0]
    return WorkerError("E401", f"rank {log.rank} lost its peers in {what}: {first_line}")


def _issue(
    group: Group,
    op: str,
    tensor: Tensor,
    cause: str,
    call: Callable[[Transport], Work],
    *,
    agreed_numel: int | None = None,
) -> Handle:
    if group.size == 1 or group.transport is None:
        return DONE
    sequence = group.log.start(
        op,
        group.axis,
        peers=_peer_text(group.ranks),
        dtype=str(tensor.dtype).removeprefix("torch."),
        numel=agreed_numel or tensor.numel(),
        nbytes=tensor.numel() * tensor.element_size(),
        cause=cause,
    )
    try:
        return Handle(group.log, sequence, call(group.transport))
    except RuntimeError as error:
        raise _network_error(group.log, sequence, error) from error


def _peer_text(ranks: tuple[int, ...]) -> str:
    """`0,1,2` for few ranks, `0..62/2` (first, last, stride) for many."""
    text = ",".join(map(str, ranks))
    return text if len(text) <= 36 else f"{ranks[0]}..{ranks[-1]}/{ranks[1] - ranks[0]}"


def all_reduce(tensor: Tensor, group: Group, *, cause: str, agreed_numel: int | None = None) -> Handle:
    """Start summing the contiguous `tensor` over the group, in place.

    `agreed_numel` is a number that ranks of all groups of this axis share where their tensors differ in size.
    """
    return _issue(
        group,
        "all_reduce",
        tensor,
        cause,
        lambda transport: transport.all_reduce(tensor),
        agreed_numel=agreed_numel,
    )


def reduce(tensor: Tensor, group: Group, *, index: int, cause: str) -> Handle:
    """Start summing `tensor` over the group into that of the group's rank number `index`, in place.

    On the other ranks `tensor` may be overwritten.
    """
    return _issue(
        group, "reduce", tensor, f"{cause} to {index}", lambda transport: transport.reduce(tensor, index)
    )


def reduce_scatter(output: Tensor, source: Tensor, group: Group, *, cause: str) -> Handle:
    """Start summing `source` (P·n elements) over the group; rank i gets part i in `output` (n elements).

    `output` may be this rank's own slice of `source`.
    """
    _check_parts(output, source, group, "reduce_scatter")
    if group.size == 1:
        _copy_unless_same(output, source)
    return _issue(
        group, "reduce_scatter", source, cause, lambda transport: transport.reduce_scatter(output, source)
    )


def all_gather(output: Tensor, source: Tensor, group: Group, *, cause: str) -> Handle:
    """Start concatenating every rank's `source` (n elements) into `output` (P·n elements).

    `source` may be this rank's own slice of `output`.
    """
    _check_parts(source, output, group, "all_gather")
    if group.size == 1:
        _copy_unless_same(output, source)
    return _issue(group, "all_gather", output, cause, lambda transport: transport.all_gather(output, source))


def broadcast(tensor: Tensor, group: Group, *, index: int, cause: str) -> Handle:
    """Start copying `tensor` of the group's rank number `index` to all."""
    cause = f"{cause} from {index}"
    return _issue(group, "broadcast", tensor, cause, lambda transport: transport.broadcast(tensor, index))


def all_to_all(output: Tensor, source: Tensor, group: Group, *, cause: str) -> Handle:
    """Start exchanging equal blocks of the first dim: block j of `source` goes to rank j."""
    if group.size == 1:
        _copy_unless_same(output, source)
    return _issue(group, "all_to_all", source, cause, lambda transport: transport.all_to_all(output, source))


def send(tensor: Tensor, group: Group, *, index: int, tag: int = 0, cause: str) -> Handle:
    """Start sending `tensor` to the group's rank number `index`."""
    return _issue(group, "send", tensor, cause, lambda transport: transport.send(tensor, index, tag))


def receive(tensor: Tensor, group: Group, *, index: int, tag: int = 0, cause: str) -> Handle:
    """Start receiving into `tensor` from the group's rank number `index`."""
    return _issue(group, "receive", tensor, cause, lambda transport: transport.receive(tensor, index, tag))


def barrier(group: Group, *, cause: str) -> None:
    """Return once every rank of the group has come here."""
    _issue(group, "barrier", torch.empty(0), cause, lambda transport: transport.barrier()).wait()


def _check_parts(part: Tensor, whole: Tensor, group: Group, op: str) -> None:
    assert part.numel() * group.size == whole.numel(), (
        f"{op} over {group.size} ranks: {part.numel()} x {group.size} is not {whole.numel()} elements"
    )


def _copy_unless_same(output: Tensor, source: Tensor) -> None:
    if output.data_ptr() != source.data_ptr():
        output.copy_(source)
