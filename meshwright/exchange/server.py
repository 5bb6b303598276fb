"""Parameter server: workers send their values to servers, each of which sums one part and sends the sum back.

Chunk s belongs to server s. A server takes its workers in the order of their ranks: it needs the memory of one
message, and the sum has one order. The busiest rank carries workers / servers of the buffer each way, where a ring
carries less than two whatever the number. Source: Li et al., Scaling Distributed Machine Learning with the Parameter
Server, OSDI 2014.
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
    taken = [Step(receives=(Receive(worker, part, adds=worker > 0),)) for worker in range(num_workers)]
    return (*taken, Step(sends=tuple(Send(worker, part) for worker in range(num_workers))))
