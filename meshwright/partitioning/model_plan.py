"""From a captured model to stages: the three phases in one call, and the plan as plain data for an executor.

Owns the two ways: ours (cheapest cuts, exact stages, all micro-batches) and RaNNC's (coarsening, uncoarsening,
compaction, its recurrence and its loops). Must not know torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.partitioning.chain import Chain
from meshwright.partitioning.coarsen import coarsen
from meshwright.partitioning.compact import compact
from meshwright.partitioning.graph_costs import GraphCosts, contiguous
from meshwright.partitioning.levels import BlockCosts, Level, additive
from meshwright.partitioning.partition import Partition
from meshwright.partitioning.search import search, search_rannc
from meshwright.partitioning.segments import cheapest_cuts
from meshwright.partitioning.stage_costs import Group, Problem
from meshwright.partitioning.uncoarsen import uncoarsen

MOST_BLOCKS = 40
_RANNC_BLOCKS = 30


@dataclass(frozen=True)
class ModelStage:
    """What one stage of a model runs, for an executor.

    Attributes:
        tasks: numbers of its tasks in the graph, ascending; constants are repeated in every stage that needs them.
        modules: paths of the modules that they belong to, in order.
        ranks: that run it, each with an equal part of every micro-batch.
    """

    tasks: tuple[int, ...]
    modules: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ModelPlan:
    """A model in stages.

    Attributes:
        partition: stages over blocks.
        stages: the same over tasks.
        steps: of phase 2, by name.
        levels: blocks of parts after each step; the last ones are cut into stages.
        num_atomic: parts of phase 1.
        batch: samples of a step.
        copies: pipelines beside each other; ranks are of the first.
        step_seconds: expected; for RaNNC's way None.
        bound: no plan within the search is below this; None where there is no certificate.
    """

    partition: Partition
    stages: tuple[ModelStage, ...]
    steps: tuple[str, ...]
    levels: tuple[Level, ...]
    num_atomic: int
    batch: int
    copies: int = 1
    step_seconds: float | None = None
    bound: float | None = None

    @property
    def gap(self) -> float:
        """The part of the step that a better plan of these blocks could save at most."""
        if self.step_seconds is None or self.bound is None:
            return self.partition.gap
        return max(0.0, (self.step_seconds - self.bound) / self.step_seconds)


def plan_model(
    costs: GraphCosts,
    problem: Problem,
    *,
    batch: int,
    num_microbatches: tuple[int, ...] = (),
    most_blocks: int = MOST_BLOCKS,
) -> ModelPlan:
    """The best stages, replicas and micro-batches over at most about `most_blocks` blocks.

    Args:
        costs: of the model.
        problem: devices and rules; shares, objective and micro-batches are replaced.
        batch: samples of a step.
        num_microbatches: what to try; empty: divisors of the batch.
        most_blocks: the more, the better the balance and the longer the search.

    Raises:
        DoesNotFitError: E270 with what is lacking.
        PlanError: E271 for stages or micro-batches that cannot be.
    """
    level = blocks_by_cuts(costs, most_blocks)
    tried = search(
        lambda samples: costs.chain(level, samples), problem, batch=batch, num_microbatches=num_microbatches
    )
    found = tried.partition
    return ModelPlan(
        found,
        stages_of(costs, level, found),
        ("cheapest cuts",),
        (level,),
        len(costs.atomic.parts),
        batch,
        step_seconds=tried.step_seconds,
        bound=tried.bound,
    )


def plan_model_rannc(
    costs: GraphCosts, problem: Problem, *, batch: int, nodes: int = 1, most_blocks: int = _RANNC_BLOCKS
) -> ModelPlan:
    """The stages that RaNNC's three phases and loops give; arguments and errors as `plan_model`."""
    group = problem.groups[0]
    samples = max(1, -(-batch // (problem.num_devices * 32)))
    levels = blocks_by_rannc(costs, samples, group, most_blocks)
    found, copies = search_rannc(
        lambda count: costs.chain(levels[-1], count), problem, batch=batch, nodes=nodes
    )
    stages = stages_of(costs, levels[-1], found)
    merges = tuple(f"coarsening {number}" for number in range(1, len(levels) - 2))
    return ModelPlan(
        found,
        stages,
        (*merges, "uncoarsening", "compaction"),
        levels[1:],
        len(costs.atomic.parts),
        batch,
        copies,
    )


def blocks_by_cuts(costs: GraphCosts, most_blocks: int) -> Level:
    """Contiguous blocks of about equal seconds, cut where little passes."""
    parts = costs.parts(costs.graph.batch)
    seconds = [f + b for f, b in zip(parts.forward, parts.backward, strict=True)]
    level = costs.parts_level
    live = Chain(costs.chain(level, costs.graph.batch).blocks, level.carried).live_bytes
    starts: tuple[int, ...] = ()
    longest = sum(seconds) / most_blocks
    while not starts or len(starts) > most_blocks:
        starts = cheapest_cuts(seconds, live, longest=longest)
        longest *= 1.15
    return Level(contiguous(starts, len(seconds)), level.carried)


def blocks_by_rannc(costs: GraphCosts, samples: int, group: Group, most_blocks: int) -> tuple[Level, ...]:
    """Single parts, then levels of coarsening, of uncoarsening and of compaction."""
    parts = costs.parts(samples)
    # microseconds, as sigma is a whole number there
    seconds = [(f + b) * 1e6 for f, b in zip(parts.forward, parts.backward, strict=True)]
    share = samples / costs.graph.batch
    block_costs = BlockCosts(
        additive(seconds), communication=lambda size: size * share / group.bandwidth * 1e6
    )
    levels = coarsen(costs.parts_level, block_costs)
    fine = uncoarsen(levels[-2:], block_costs)
    return (*levels, fine, compact(fine, block_costs, most_blocks=most_blocks, compat=True))


def stages_of(costs: GraphCosts, level: Level, found: Partition) -> tuple[ModelStage, ...]:
    """Tasks, modules and ranks of each stage."""
    stages = []
    for stage, ranks in zip(found.stages, found.ranks, strict=True):
        parts = sorted(part for members in level.blocks[stage.first : stage.last + 1] for part in members)
        tasks = sorted(
            {
                n
                for part in parts
                for n in (*costs.atomic.parts[part].constants, costs.atomic.parts[part].task)
            }
        )
        paths = dict.fromkeys(costs.graph.tasks[task].path for task in tasks)
        stages.append(ModelStage(tuple(tasks), tuple(path for path in paths if path), ranks))
    return tuple(stages)
