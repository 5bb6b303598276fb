"""1F1B: after a warm-up, a forward for each backward, so rank p keeps the activations of min(M, P - p) micro-batches.

The bubble is that of GPipe, (P-1)/M of the ideal time. With V chunks a rank (interleaved), rank p holds the stages p,
p + P, ..., and the bubble shrinks to (P-1)/(V·M), for V times the messages.
Sources: PipeDream-Flush, Narayanan et al., ICML 2021 (arXiv 2006.09503); interleaving: Megatron-LM, SC 2021
(arXiv 2104.04473).
"""

from __future__ import annotations

from meshwright.schedule.action import Action, Schedule, without_extra


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each of `num_ranks` ranks holds one stage."""
    programs = []
    for rank in range(num_ranks):
        forwards = [Action("F", rank, m) for m in range(num_microbatches)]
        backwards = [Action("B", rank, m) for m in range(num_microbatches)]
        programs.append(tuple(alternate(forwards, backwards, min(num_ranks - rank - 1, num_microbatches))))
    return Schedule("1f1b", num_ranks, num_microbatches, (tuple(range(num_ranks)),), tuple(programs))


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Each of `num_ranks` ranks holds `num_chunks` stages, a rank's stages `num_ranks` apart.

    Written for rounds of `num_ranks` micro-batches; of a last, shorter round the missing ones are left out.
    """
    padded = -(-num_microbatches // num_ranks) * num_ranks
    programs = []
    for rank in range(num_ranks):
        forwards, backwards = [], []
        for first in range(0, padded, num_ranks):
            for chunk in range(num_chunks):
                for m in range(first, first + num_ranks):
                    forwards.append(Action("F", chunk * num_ranks + rank, m))
                    backwards.append(Action("B", (num_chunks - chunk - 1) * num_ranks + rank, m))
        warmup = (num_chunks - 1) * num_ranks + 2 * (num_ranks - rank - 1)
        programs.append(alternate(forwards, backwards, min(warmup, len(forwards))))
    num_stages = num_ranks * num_chunks
    placement = (tuple(stage % num_ranks for stage in range(num_stages)),)
    return Schedule(
        "interleaved", num_stages, num_microbatches, placement, without_extra(programs, num_microbatches)
    )


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward by turns, then the rest of the backwards."""
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *backwards[steady:]]
