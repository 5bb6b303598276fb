"""Values of a tape where tensor-parallel ranks have a part of the tokens: shorter on their way from stage to stage.

Between the first repeated block and the end of the chain a rank of `plan.sequence_parallel` has its tokens only, so
that is what a stage hands on. A tape is recorded of a model that is not split, and says shapes of whole tokens; here
those of a rank take their place, and a stage that begins inside of the chain is told where its tokens lie.

Owns which values are cut. Must not know how tokens are cut and gathered inside of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import TensorLayout, TokenChain, TokenRange, token_range
from meshwright.pipeline.cut import Stage
from meshwright.pipeline.tape import Call, Tape


@dataclass(frozen=True)
class CutTokens:
    """Which values of a tape a rank has in part; number to (dim, (first, ours, all))."""

    ranges: Mapping[int, TokenRange]

    def of_stage(self, stage: Stage) -> TokenRange | None:
        """What the first calls of a stage get: tokens of this rank, or None for whole ones."""
        return next((self.ranges[n] for n in stage.receives if n in self.ranges), None)


def cut_tokens(tape: Tape, layout: TensorLayout) -> tuple[Tape, CutTokens]:
    """`tape` with the shapes of this rank, and which of its values are cut.

    Raises:
        PlanError: E268 where something is made of cut tokens that has not their shape, so that nobody knows its part.
    """
    chain = layout.chain
    if chain is None:
        return tape, CutTokens({})
    found: dict[int, TokenRange] = {}
    for call in tape.calls:
        cut = [n for n in call.inputs if n in found]
        if call.module:
            made = _of_module(call, chain)
        elif cut:
            made = [n for n in call.outputs if n >= 0]
            _check_shapes(tape, call, cut[0])
        else:
            made = []
        for number in made:
            found[number] = token_range(tape.values[number].shape, layout.size, layout.index)
    values = list(tape.values)
    for number, (dim, (_, ours, _all)) in found.items():
        shape = values[number].shape
        values[number] = replace(values[number], shape=(*shape[:dim], ours, *shape[dim + 1 :]))
    return replace(tape, values=tuple(values)), CutTokens(found)


def _of_module(call: Call, chain: TokenChain) -> list[int]:
    """The hidden state that a module of the chain returns, unless tokens are whole behind it."""
    inside = call.module in chain.blocks and call.module != chain.last
    return [n for n in call.outputs[:1] if n >= 0] if inside else []


def _check_shapes(tape: Tape, call: Call, cut: int) -> None:
    shape = tape.values[cut].shape
    for number in call.outputs:
        if number >= 0 and tape.values[number].shape != shape:
            raise PlanError(
                "E268",
                f"plan.sequence_parallel with plan.pp: between repeated blocks {call.describe()} makes a tensor of "
                f"shape {tape.values[number].shape} from a hidden state of shape {shape}, of which a rank has some "
                f"tokens only: no stage would know which. Move it into a block, or set plan.sequence_parallel=false.",
            )
