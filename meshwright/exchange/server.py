"""Parameter server: workers send their values to servers, each of which sums one part and sends the sum back.

Chunk s belongs to server s. A server takes its workers in the order of their ranks: it needs the memory of one
message, and the sum has one order. The busiest rank carries workers / servers of the buffer each way, where a ring
carries less than two whatever the number. The two halves are collectives of their own: a push reduces a buffer to one
server, a pull broadcasts it from there; the other servers take no part. Source: Li et al., Scaling Distributed Machine
Learning with the Parameter Server, OSDI 2014.
"""

from __future__ import annotations

from meshwright.exchange.program import Program, Receive, Send, Span, Step


def server_program(num_workers: int, num_servers: int, rank: int) -> Program:
    """Steps of `rank`; ranks from `num_workers` on are servers."""
    if rank < num_workers:
        parts = [(num_workers + s, Span(s, s + 1)) for s in range(num_servers)]
        return (
            Step(sends=tuple(Send(server, part) for server, part in parts)),
            Step(receives=tuple(Receive(server, part) for server, part in parts)),
        )
    part = Span(rank - num_workers, rank - num_workers + 1)
    return (
        *_taken(num_workers, part),
        Step(sends=tuple(Send(worker, part) for worker in range(num_workers))),
    )


def push_program(num_workers: int, server: int, rank: int) -> Program:
    """Steps of `rank` in the sum of the workers' buffers into that of the server at rank `server`."""
    if rank < num_workers:
        return (Step(sends=(Send(server, Span(0, 1)),)),)
    return _taken(num_workers, Span(0, 1)) if rank == server else ()


def pull_program(num_workers: int, server: int, rank: int) -> Program:
    """Steps of `rank` in the copy of the buffer of the server at rank `server` to all workers."""
    if rank < num_workers:
        return (Step(receives=(Receive(server, Span(0, 1)),)),)
    return (Step(sends=tuple(Send(w, Span(0, 1)) for w in range(num_workers))),) if rank == server else ()


def _taken(num_workers: int, part: Span) -> Program:
    """What a server does with its workers' values: the first one's are stored over its own, which count nothing."""
    return tuple(Step(receives=(Receive(worker, part, adds=worker > 0),)) for worker in range(num_workers))
