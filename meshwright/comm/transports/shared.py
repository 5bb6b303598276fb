"""Shared memory, for CPU tensors of ranks on one host.

Memory that `allocate` gave is read in place by the peers; any other tensor is copied piece by piece through slots that
they can read. Sums are made in one order on every rank that makes them, so results repeat bit by bit, and where Gloo's
path has an order of its own (reduce-scatter, reduce) it is the same one.

Collectives are over when their call returns: where every core computes nothing can be hidden behind anything
(`docs/decisions/017-shared-memory.md`). So all ranks must issue the collectives of all their groups in one order, as
the engine does. Sends and receives move when any operation waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.comm.transports.base import Work
from meshwright.comm.transports.shared_barrier import Barrier, call_number
from meshwright.comm.transports.shared_messages import Messages
from meshwright.comm.transports.shared_segment import NOWHERE, Arena, PeerArena, Place
from meshwright.comm.transports.shared_slots import Neighbour, Slots

# Below, two barriers cost more than copying into a slot and back.
IN_PLACE_BYTES = 128 << 10
# Below, each rank makes the whole sum of more than two ranks by itself; above, each makes a part.
_DIVIDED_BYTES = 16 << 10
# Elements that are summed at once: partial sums stay in the cache.
_BLOCK_NUMEL = 1 << 16


class SharedTransport:
    """Collectives of ranks that share a host.

    Args:
        index: this rank's position in the group.
        neighbours: all ranks of the group.
        barrier: of the group.
        messages: of the group.
        arena: where `allocate` takes memory from.
        arenas: what is mapped of other ranks, of this group or of others on this host.

    Attributes:
        in_place_bytes: from which size on tensors are read in place, where they can be.
    """

    name = "shared memory"

    def __init__(
        self,
        index: int,
        neighbours: Sequence[Neighbour],
        *,
        barrier: Barrier,
        messages: Messages,
        arena: Arena,
        arenas: Mapping[int, PeerArena],
    ) -> None:
        self.in_place_bytes = IN_PLACE_BYTES
        self._index = index
        self._size = len(neighbours)
        self._neighbours = tuple(neighbours)
        self._barrier = barrier
        self._messages = messages
        self._arena = arena
        self._arenas = arenas
        self._slots = Slots(index, neighbours, barrier)
        self._partial: Tensor | None = None

    @property
    def scratch_bytes(self) -> int:
        """This rank's slots as far as they were used, and messages that arrived before they were asked for."""
        return self._slots.written_bytes + self._messages.kept_bytes

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Transport`."""
        return self._arena.allocate(numel, dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Transport`. It is the first rank's."""
        call, turn = call_number("allocate", numel, dtype), self._barrier.turn
        memory = self._arena.allocate(numel, dtype) if self._index == 0 else torch.zeros(0)
        self._barrier.show(self._arena.find(memory), self._arena.freed)
        self._barrier.meet(call)
        if self._index > 0 and numel:
            memory = self._read(0, *self._barrier.shown(self._neighbours[0].words, turn), numel, dtype)
        self._barrier.meet(call)
        return memory

    def close(self) -> None:
        """Tell the peers that this rank takes part no more; whoever waits for it gets an error."""
        self._barrier.leave()

    def all_reduce(self, tensor: Tensor) -> Work:
        """See `Transport`."""
        flat, call = _flat(tensor), call_number("all_reduce", tensor.numel(), tensor.dtype)
        order = range(self._size)
        tensors = self._meet_in_place(flat, call)
        if tensors is not None:
            part = self._part(flat.numel())
            targets = [tensors[i][part] for i in (self._index, *self._others())]
            self._sum_into(targets, [tensors[i][part] for i in order])
            self._barrier.meet(call)
        elif self._size == 2 or flat.numel() * flat.element_size() < _DIVIDED_BYTES:
            for number, piece in enumerate(self._slots.pieces(flat)):
                self._sum_into([piece], self._slots.exchange(piece, call, number))
        else:
            for number, piece in enumerate(self._slots.pieces(flat)):
                self._divided_sum(piece, order, call, number)
        return _DONE

    def reduce(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`. The root's own values come first, then the others' in rank order."""
        flat, call = _flat(tensor), call_number("reduce", tensor.numel(), tensor.dtype, index)
        order = [index, *(i for i in range(self._size) if i != index)]
        tensors = self._meet_in_place(flat, call)
        if tensors is not None:
            part = self._part(flat.numel())
            self._sum_into([tensors[index][part]], [tensors[i][part] for i in order])
            self._barrier.meet(call)
        elif self._size == 2 or flat.numel() * flat.element_size() < _DIVIDED_BYTES:
            for number, piece in enumerate(self._slots.pieces(flat)):
                read = self._slots.exchange(piece, call, number)
                if self._index == index:
                    self._sum_into([piece], [read[i] for i in order])
        else:
            for number, piece in enumerate(self._slots.pieces(flat)):
                self._divided_sum(piece, order, call, number, root=index)
        return _DONE

    def reduce_scatter(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        whole, mine = _flat(source), _flat(output)
        call = call_number("reduce_scatter", whole.numel(), whole.dtype)
        tensors = self._meet_in_place(whole, call)
        if tensors is not None:
            own = slice(self._index * mine.numel(), (self._index + 1) * mine.numel())
            self._sum_into([mine], [tensor[own] for tensor in tensors])
            self._barrier.meet(call)
            return _DONE
        blocks = whole.view(self._size, -1)
        if self._slots.fits(blocks):
            self._sum_into([mine], self._slots.exchange_blocks(blocks, call))
            return _DONE
        for number, columns in enumerate(self._slots.columns(blocks)):
            self._sum_into([mine[columns]], self._slots.exchange_blocks(blocks[:, columns], call, number))
        return _DONE

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        whole, mine = _flat(output), _flat(source)
        call = call_number("all_gather", whole.numel(), whole.dtype)
        tensors = self._meet_in_place(mine, call)
        if tensors is not None:
            self._copy_blocks(whole.view(self._size, -1), tensors)
            self._barrier.meet(call)
        elif self._slots.fits(mine):
            torch.cat(self._slots.exchange(mine, call), out=whole)
        else:
            blocks = whole.view(self._size, -1)
            step = self._slots.slot_bytes // mine.element_size()
            for number, start in enumerate(range(0, mine.numel(), step)):
                piece = mine[start : start + step]
                shown = [*self._slots.exchange(piece, call, number)]
                shown[self._index] = piece
                self._copy_blocks(blocks[:, start : start + step], shown)
        return _DONE

    def broadcast(self, tensor: Tensor, index: int) -> Work:
        """See `Transport`."""
        flat, call = _flat(tensor), call_number("broadcast", tensor.numel(), tensor.dtype, index)
        tensors = self._meet_in_place(flat, call, root=index)
        if tensors is not None:
            if not self._is_same(flat, tensors[index]):
                flat.copy_(tensors[index])
            self._barrier.meet(call)
            return _DONE
        for number, piece in enumerate(self._slots.pieces(flat)):
            slot = self._slots.shown(piece.numel(), piece.dtype, number)[index]
            if self._index == index:
                slot.copy_(piece)
            self._barrier.meet(call)
            if self._index != index:
                piece.copy_(slot)
        return _DONE

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Transport`."""
        blocks, target = (_flat(tensor).view(self._size, -1) for tensor in (source, output))
        call = call_number("all_to_all", blocks.numel(), blocks.dtype)
        tensors = self._meet_in_place(blocks.view(-1), call)
        if tensors is not None:
            self._copy_blocks(target, [tensor.view(self._size, -1)[self._index] for tensor in tensors])
            self._barrier.meet(call)
        elif self._slots.fits(blocks):
            torch.stack(self._slots.exchange_blocks(blocks, call), out=target)
        else:
            for number, columns in enumerate(self._slots.columns(blocks)):
                shown = self._slots.exchange_blocks(blocks[:, columns], call, number)
                self._copy_blocks(target[:, columns], shown)
        return _DONE

    def send(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return Work([self._messages.send(tensor, index, tag)])

    def receive(self, tensor: Tensor, index: int, tag: int) -> Work:
        """See `Transport`."""
        return Work([self._messages.receive(tensor, index, tag)])

    def barrier(self) -> Work:
        """See `Transport`."""
        self._barrier.meet(call_number("barrier"))
        return _DONE

    def lowered(self, op: str, nbytes: int, index: int = 0) -> Counter[str]:
        """See `Transport`: nothing goes over a wire."""
        return Counter()

    # Memory that peers read in place.

    def _meet_in_place(self, tensor: Tensor, call: int, root: int | None = None) -> list[Tensor] | None:
        """Every rank's tensor where the peers may read it, at a barrier; None where it must go through slots.

        All ranks decide alike: what they show at the barrier tells. With `root` only that one's tensor counts.
        """
        if tensor.numel() * tensor.element_size() < self.in_place_bytes:
            return None
        turn = self._barrier.turn
        self._barrier.show(self._arena.find(tensor), self._arena.freed, self._slots.routes.choose())
        self._barrier.meet(call)
        self._slots.begin(self._barrier.shown_route(self._neighbours[0].words, turn))
        shown = [self._barrier.shown(neighbour.words, turn) for neighbour in self._neighbours]
        needed = range(self._size) if root is None else (root,)
        if any(shown[i][0].serial == NOWHERE.serial for i in needed):
            return None
        tensors = [tensor] * self._size
        for i in needed:
            if i != self._index:
                tensors[i] = self._read(i, *shown[i], tensor.numel(), tensor.dtype)
        return tensors

    def _read(self, index: int, place: Place, freed: int, numel: int, dtype: torch.dtype) -> Tensor:
        """What rank `index` showed."""
        if place.owner == self._arena.rank:
            return self._arena.view(place, numel=numel, dtype=dtype)
        count = freed if place.owner == self._neighbours[index].rank else None
        return self._arenas[place.owner].view(place, count, numel=numel, dtype=dtype)

    def _part(self, numel: int) -> slice:
        """The elements that this rank sums."""
        return slice(numel * self._index // self._size, numel * (self._index + 1) // self._size)

    def _sum_into(self, targets: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
        """Sum `terms` in their order, block by block, into all `targets`, which may be among the terms."""
        numel = targets[0].numel()
        if len(terms) == 2 and (len(targets) == 1 or numel <= _BLOCK_NUMEL):
            self._sum_block(targets, terms)
            return
        for start in range(0, numel, _BLOCK_NUMEL):
            block = slice(start, min(start + _BLOCK_NUMEL, numel))
            self._sum_block([target[block] for target in targets], [term[block] for term in terms])

    def _sum_block(self, targets: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
        first, *others = targets
        if len(terms) == 2:
            torch.add(terms[0], terms[1], out=first)
        else:
            total = self._partial_sum(first)
            torch.add(terms[0], terms[1], out=total)
            for term in terms[2:-1]:
                total.add_(term)
            torch.add(total, terms[-1], out=first)
        for other in others:
            other.copy_(first)

    def _partial_sum(self, like: Tensor) -> Tensor:
        """Private memory for the sum so far: targets may still be needed as terms."""
        if self._partial is None or self._partial.numel() < like.numel() or self._partial.dtype != like.dtype:
            self._partial = torch.empty(_BLOCK_NUMEL, dtype=like.dtype)
        return self._partial[: like.numel()]

    def _copy_blocks(self, targets: Tensor, sources: Sequence[Tensor]) -> None:
        """Copy every rank's block in place, the right neighbour's first so that nobody is everybody's first."""
        for step in range(1, self._size + 1):
            i = (self._index + step) % self._size
            target = targets[i]
            if not self._is_same(target, sources[i]):
                target.copy_(sources[i])

    def _is_same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors are the same memory, perhaps at two addresses."""
        if one.data_ptr() == other.data_ptr():
            return True
        place = self._arena.find(one)
        return place != NOWHERE and place == self._arena.find(other)

    def _divided_sum(
        self, piece: Tensor, order: Sequence[int], call: int, number: int, *, root: int | None = None
    ) -> None:
        """Each rank sums a part; then all of them (or the root) collect the parts."""
        shown = self._slots.exchange(piece, call, number)
        sums = self._slots.shown(piece.numel(), piece.dtype, number)
        own = self._part(piece.numel())
        self._sum_into([sums[self._index][own]], [shown[i][own] for i in order])
        self._barrier.meet(call)
        if root is None or root == self._index:
            for i in range(self._size):
                part = slice(piece.numel() * i // self._size, piece.numel() * (i + 1) // self._size)
                piece[part].copy_(sums[i][part])

    def _others(self) -> list[int]:
        """The other ranks, each rank starting with its right neighbour so that nobody is everybody's first."""
        return [(self._index + step) % self._size for step in range(1, self._size)]


def _flat(tensor: Tensor) -> Tensor:
    return (tensor.detach() if tensor.requires_grad else tensor).view(-1)


# A collective that is over, the same for all calls: its `wait` does nothing.
_DONE = Work(())
