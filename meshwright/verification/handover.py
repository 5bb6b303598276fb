"""A checkpoint between two runs of a comparison, by the product's own code."""

from __future__ import annotations

from meshwright.checkpoint.folder import step_name
from meshwright.checkpoint.manifest import RunFacts
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.writer import Place, Writer
from meshwright.training.saving import (
    aliases_of,
    expected_tensors,
    items_to_save,
    load_generators,
    load_items,
    load_numbers,
    state_numbers,
)
from meshwright.verification.job import Handover
from meshwright.verification.rank import CandidateRank


def save_rank(rank: CandidateRank, handover: Handover) -> None:
    """Write this rank's part of the checkpoint; rank 0 waits for all."""
    state, group = rank.state, rank.engine.groups.everyone
    writer = Writer(
        Place(handover.folder, group.index, group.size, "verify"),
        background=False,
        expected=expected_tensors(rank.engine),
        progress=lambda: group.log.progress("checkpoint"),
    )
    run = RunFacts(state.step, state.tokens, state=state_numbers(state), aliases=aliases_of(rank.engine))
    writer.save(items_to_save(state), run)
    writer.finish()


def load_rank(rank: CandidateRank, handover: Handover) -> None:
    """Go on from the checkpoint."""
    with CheckpointReader(handover.folder / step_name(handover.step)) as reader:
        load_items(rank.state, reader)
        load_numbers(rank.state, reader.manifest.run)
        load_generators(rank.engine, reader)
