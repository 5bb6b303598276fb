"""What is to be verified, and what the reference and the ranks answer. Plain values that travel by pickle; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.layout.plan import TrainPlan
from meshwright.layout.uses import UnitUses
from meshwright.training.config import RunConfig
from meshwright.verification.sources import GradientSamples
from meshwright.verification.tensors import Key, PieceStats, Recorded, Tolerance

if TYPE_CHECKING:
    from meshwright.verification.rank import CandidateRank


@dataclass(frozen=True)
class Functions:
    """A user's model, loss and data as Python objects.

    Attributes:
        build: () -> nn.Module.
        loss: (model, batch) -> (sum, count), or a bare scalar that is a mean over samples.
        data: map-style dataset.
    """

    build: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    data: Any


@dataclass(frozen=True)
class VerifyJob:
    """One comparison.

    Attributes:
        config: seed, optimizer, clipping, and the model and data where `functions` is None.
        plan: what the candidate runs; its precision holds for the reference too.
        steps: optimizer steps.
        functions: the model, loss and data where they are given as Python objects.
        inject: called on every candidate rank before training, to commit a fault; see `CandidateRank`.
    """

    config: RunConfig
    plan: TrainPlan
    steps: int
    functions: Functions | None = None
    inject: Callable[[CandidateRank], None] | None = None


@dataclass(frozen=True)
class Handover:
    """A checkpoint between two runs of a comparison.

    Attributes:
        folder: of checkpoints.
        step: after which it is written.
    """

    folder: Path
    step: int


# Samples of one micro-step: (dataset index, digest of the sample's content).
Samples = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Uses:
    """What one micro-step of the reference used, as far as ranks communicate for it.

    Attributes:
        units: in which order they ran.
        num_statistics: sums of batch statistics, forward and backward.
        forward_statistics: those of the forward alone, by name of the module that takes them.
    """

    units: UnitUses
    num_statistics: int
    forward_statistics: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Reference:
    """What the run on one device left, besides its tensors in a file.

    Attributes:
        recorded: the tensors in the file.
        tolerances: by check.
        losses: of each step.
        samples: (step, micro-step) to the samples of the whole micro-step, in order.
        num_samples: length of the dataset: of one epoch.
        ties: groups of parameter names that are one tensor.
        uses: of units and batch statistics, by micro-step from the first to the last.
        clip_norm: limit of the gradient norm, low enough to act; None: no clipping.
        uncompared: names of module outputs in which samples have no rows of their own.
        asks_for_float32: whether the model does so in a float64 run; then both runs give it float64.
        peak_memory_bytes: of the process.
        loss_scale: of fp16, low enough that no step overflows; None in other precisions.
    """

    recorded: tuple[Recorded, ...]
    tolerances: Mapping[str, Tolerance]
    losses: tuple[float, ...]
    samples: Mapping[tuple[int, int], Samples]
    num_samples: int
    ties: tuple[tuple[str, ...], ...]
    uses: tuple[Uses, ...]
    clip_norm: float | None
    uncompared: tuple[str, ...]
    asks_for_float32: bool
    peak_memory_bytes: int
    loss_scale: float | None = None


@dataclass(frozen=True)
class RankReport:
    """What one candidate rank measured.

    Attributes:
        rank: global rank.
        stats: its pieces against the reference.
        samples: (step, micro-step) to the samples it read.
        digests: tensors that every rank must hold bitwise alike; check, step, -1 and name to a checksum.
        issued: collectives of each step by operation.
        declared: the same as the plan declares it for what the reference used.
        broken_ties: groups of tied names that are no longer one tensor, with the step that first found them so.
        peak_memory_bytes: of the process.
        gradient_samples: step and parameter to a few elements of its gradient, before and after the reduction.
        copy_digests: parts of tensors that some ranks hold a copy of, which must be bitwise alike.
        transport: what carried the collectives, in words.
        copy: the ranks that hold one copy of the model together and read the same samples, this one among them.
        place: of a pipeline whose places have unlike numbers of ranks, that of this rank; the ranks of each read all
            samples together.
        uncalled: modules whose own calls no rank makes: what is between their parts is divided over stages.
    """

    rank: int
    stats: tuple[PieceStats, ...]
    samples: Mapping[tuple[int, int], Samples]
    digests: Mapping[Key, int]
    issued: tuple[Mapping[str, int], ...]
    declared: tuple[Mapping[str, int], ...]
    broken_ties: Mapping[tuple[str, ...], int]
    peak_memory_bytes: int
    gradient_samples: Mapping[tuple[int, str], GradientSamples]
    copy_digests: Mapping[Key, int] = field(default_factory=dict)
    transport: str = "gloo"
    copy: tuple[int, ...] = ()
    place: int = 0
    uncalled: frozenset[str] = frozenset()
