"""Zero bubble: backward is split; ranks wait for gradients of inputs, and gradients of weights fill the gaps.

With F, I and W the times of a stage's forward, input gradient and weight gradient, the bubble of a rank is
(P-1)(F + I - W) for H1, which keeps as many activations as 1F1B does on rank 0, and (P-1)(F + I - 2W) for H2, which
keeps 2P - 1. In V the rank p holds the stages p and 2P-1-p, so the last stage is on rank 0 and its backward starts
there at once: no bubble for F = I = W with the activations of H1.
Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241).
"""

from __future__ import annotations

from meshwright.schedule.action import Action, Schedule, without_extra


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each of `num_ranks` ranks holds one stage; rank p defers the weight gradients of p micro-batches."""
    return _handmade("zb-h1", num_ranks, num_microbatches, growth=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """As `zb_h1`, with twice the warm-up forwards and twice the deferred weight gradients."""
    return _handmade("zb-h2", num_ranks, num_microbatches, growth=2)


def _handmade(name: str, num_ranks: int, num_microbatches: int, *, growth: int) -> Schedule:
    """Rank p runs growth·(P-1-p) + 1 forwards ahead, and weight gradients growth·p micro-batches behind."""
    programs = []
    for rank in range(num_ranks):
        ahead = min(growth * (num_ranks - 1 - rank) + 1, num_microbatches)
        behind = growth * rank
        program = [Action("F", rank, m) for m in range(ahead)]
        for m in range(num_microbatches):
            program.append(Action("I", rank, m))
            if m >= behind:
                program.append(Action("W", rank, m - behind))
            if ahead + m < num_microbatches:
                program.append(Action("F", rank, ahead + m))
        left = range(max(0, num_microbatches - behind), num_microbatches)
        programs.append((*program, *(Action("W", rank, m) for m in left)))
    return Schedule(name, num_ranks, num_microbatches, (tuple(range(num_ranks)),), tuple(programs))


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each of `num_ranks` ranks holds two stages, folded like a V: rank p the stages p and 2P-1-p.

    Written for at least 2P micro-batches; of fewer the missing ones are left out.
    """
    padded = max(num_microbatches, 2 * num_ranks)
    programs = [_v_program(num_ranks, padded, rank) for rank in range(num_ranks)]
    folded = tuple(range(num_ranks)) + tuple(reversed(range(num_ranks)))
    return Schedule(
        "zb-v", 2 * num_ranks, num_microbatches, (folded,), without_extra(programs, num_microbatches)
    )


class _Chunk:
    """The next action of each kind of one of a rank's two stages."""

    def __init__(self, program: list[Action], stage: int) -> None:
        self._program = program
        self._stage = stage
        self.done = {"F": 0, "I": 0, "W": 0}

    def add(self, *ops: str) -> None:
        for op in ops:
            self._program.append(Action(op, self._stage, self.done[op]))  # type: ignore[arg-type]
            self.done[op] += 1


def _v_program(num_ranks: int, num_microbatches: int, rank: int) -> list[Action]:
    program: list[Action] = []
    down, up = _Chunk(program, rank), _Chunk(program, 2 * num_ranks - 1 - rank)
    # The deepest ranks start latest: the shallow ones run forwards down the V until the first comes up again.
    for _ in range(2 * (num_ranks - rank) - 1):
        down.add("F")
    for _ in range(rank):
        up.add("F")
        down.add("F")
    for _ in range(num_ranks - rank):
        up.add("F", "I", "W")
    while up.done["F"] < num_microbatches:
        if down.done["F"] < num_microbatches:
            down.add("F")
        down.add("I", "W")
        up.add("F", "I", "W")
    # What is left: first the input gradients that others wait for, their weight gradients at the end.
    for _ in range(rank):
        down.add("I")
        up.add("I")
    for _ in range(num_ranks - rank):
        down.add("I", "W")
    while up.done["W"] < num_microbatches:
        up.add("W")
    while down.done["W"] < num_microbatches:
        down.add("W")
    return program
