"""The checker says of 1,000 random mutants exactly what running them on numbers says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.errors import PlanError
from meshwright.exchange.catalogue import ALGORITHMS, generate, make_exchange
from meshwright.exchange.check import Message, problem_of, rounds_of
from meshwright.exchange.program import Exchange, Program, Receive, Send, Span, Step
from tests.exchange.interpreter import is_right

NUM_MUTANTS = 1000


def every_exchange(largest: int) -> list[Exchange]:
    made = []
    for n in range(1, largest + 1):
        for algorithm in ALGORITHMS:
            for collective in algorithm.collectives:
                for options in options_of(algorithm.name, collective, n):
                    made.append(make_exchange(algorithm.name, collective, n, **options))
    return made


def options_of(algorithm: str, collective: str, n: int) -> list[dict[str, int]]:
    if algorithm == "hierarchical":
        return [{"ranks_per_node": k} for k in range(1, n + 1)]
    if algorithm == "parameter_server":
        roots = range(3) if collective != "all_reduce" else (0,)
        return [{"num_servers": s, "root": root} for s in (1, 2, 3) for root in roots if root < s]
    if collective in ("broadcast", "reduce"):
        return [{"root": root} for root in range(n)]
    return [{}]


def test_every_generated_exchange_is_right():
    for exchange in every_exchange(9):
        assert problem_of(exchange) is None, exchange
        assert is_right(exchange, seed=1), exchange


def mutate(exchange: Exchange, rng: random.Random) -> Exchange:
    """One random change of one rank's program: a message lost, doubled, redirected, shifted, or out of order."""
    ranks = [r for r, program in enumerate(exchange.programs) if program]
    rank = rng.choice(ranks)
    program = list(exchange.programs[rank])
    where = rng.randrange(len(program))
    step = program[where]
    kinds = ["drop step", "double step", *["swap steps"] * (len(program) > 1), *["message"] * 4]
    kind = rng.choice(kinds)
    if kind == "drop step":
        del program[where]
    elif kind == "double step":
        program.insert(where, step)
    elif kind == "swap steps":
        other = rng.randrange(len(program))
        program[where], program[other] = program[other], program[where]
    else:
        program[where] = mutate_message(step, exchange, rng)
    programs = list(exchange.programs)
    programs[rank] = tuple(program)
    return replace(exchange, programs=tuple(programs))


def mutate_message(step: Step, exchange: Exchange, rng: random.Random) -> Step:
    sends, receives = list(step.sends), list(step.receives)
    messages: list[Send | Receive] = [*sends, *receives]
    old = rng.choice(messages)
    changes = ["drop", "double", "peer", "span"] + (["adds", "adds"] if isinstance(old, Receive) else [])
    change = rng.choice(changes)
    side: list = sends if isinstance(old, Send) else receives
    position = side.index(old)
    if change == "drop":
        del side[position]
    elif change == "double":
        side.insert(position, old)
    elif change == "peer":
        side[position] = replace(old, peer=rng.randrange(exchange.num_ranks))
    elif change == "span":
        first = rng.randrange(exchange.num_chunks)
        side[position] = replace(old, span=Span(first, rng.randrange(first, exchange.num_chunks) + 1))
    else:
        assert isinstance(old, Receive)
        side[position] = replace(old, adds=not old.adds)
    return Step(tuple(sends), tuple(receives))


def test_mutants_are_judged_as_running_them_judges():
    rng = random.Random(7)
    originals = [exchange for exchange in every_exchange(6) if any(exchange.programs)]
    wrong = 0
    for number in range(NUM_MUTANTS):
        mutant = mutate(rng.choice(originals), rng)
        right = is_right(mutant, seed=number)
        assert (problem_of(mutant) is None) == right, (mutant, problem_of(mutant))
        wrong += not right
    assert wrong > NUM_MUTANTS * 0.8  # else the mutants show nothing


def test_texts_name_rank_step_and_chunk():
    ring = make_exchange("ring", "all_reduce", 3)
    cut = replace(ring, programs=(ring.programs[0][:-1], *ring.programs[1:]))
    assert problem_of(cut) == "ranks [1, 2] never finish: rank 1 waits in step 3"
    first: Program = (replace(ring.programs[0][0], receives=(Receive(2, Span(1, 2), adds=False),)),)
    stored = replace(ring, programs=(first + ring.programs[0][1:], *ring.programs[1:]))
    text = problem_of(stored)
    assert text is not None
    assert "instead of 1 x rank 0's chunk" in text
    assert text.endswith("(all_reduce by ring)")


def test_rounds_of_a_ring():
    history = rounds_of(make_exchange("ring", "reduce_scatter", 3))
    assert [len(now.held[0][0]) for now in history] == [
        1,
        1,
        3,
    ]  # chunk 0 is summed at rank 0 in the last step
    assert history[1].held[2][0] == {(1, 0), (2, 0)}
    assert Message(1, 2, Span(0, 1), Span(0, 1), adds=True) in history[1].messages


@pytest.mark.parametrize(
    ("algorithm", "collective", "text"),
    [
        ("rng", "all_reduce", "unknown exchange algorithm 'rng'.*Did you mean 'ring'"),
        ("tree", "all_to_all", "tree does not carry out all_to_all.*pairwise"),
    ],
)
def test_refused_by_name(algorithm, collective, text):
    with pytest.raises(PlanError, match=text) as caught:
        generate(algorithm, collective, 4)
    assert caught.value.code == "E220"
