"""Training in legs: each on other ranks with another policy, joined by checkpoints alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.adapt import registry
from meshwright.checkpoint import folder
from meshwright.checkpoint.manifest import RunFacts
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.writer import Place, Writer
from meshwright.data.index_law import BatchGeometry
from meshwright.layout.policy import Ownership, find_policy
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.randomness import StatelessDraws
from meshwright.training.saving import aliases, expected_tensors, items_to_save, load_items
from meshwright.training.state import TrainState
from meshwright.training.step import no_samples, train_step
from tests.parity import models
from tests.parity.harness import with_servers
from tests.sharding.harness import data_groups

GLOBAL_BATCH, LR, CLIP, SEED = 12, 0.01, 0.5, 5
SPECS = {
    "adamw": OptimizerSpec("adamw", lr=LR, weight_decay=0.1, eps=1e-6),
    "sgd": OptimizerSpec("sgd", lr=LR, weight_decay=0.1, momentum=0.9),
    "plain": OptimizerSpec("sgd", lr=LR),
    "muon": OptimizerSpec("muon", lr=LR, weight_decay=0.1, momentum=0.9, eps=1e-6, adamw_lr=LR),
}


class Statistics(nn.Module):
    """BatchNorm, dropout, a buffer of each kind, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 5))
        self.register_buffer("table", torch.linspace(1, 2, 7), persistent=False)
        self.layers = nn.Sequential(
            nn.Linear(5, 13), nn.BatchNorm1d(13), nn.Dropout(0.2), nn.Linear(13, 13), nn.BatchNorm1d(13)
        )
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.head = nn.Linear(13, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.frozen(self.layers(inputs * self.scale)))


def statistics_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch["inputs"])
    return nn.functional.cross_entropy(logits, batch["labels"].clamp(min=0), reduction="sum"), len(logits)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    if name != "statistics":
        return models.build(name, dtype)
    torch.manual_seed(2)
    return Statistics().to(dtype)


@dataclass(frozen=True)
class Leg:
    """Steps up to `stop` on `world` ranks, then a checkpoint."""

    world: int
    policy: str
    stop: int
    accumulate: int = 1
    copies: int = 1
    ownership: Ownership = "flat"
    servers: int = 0  # of the world


@dataclass
class Rank:
    """A rank that can train."""

    state: TrainState
    geometry: BatchGeometry
    model: str
    accumulate: int
    is_server: bool = False

    def step(self) -> tuple[float, list[int]]:
        """Loss, and the global samples that this rank saw."""
        step, seen = self.state.step, []

        def micro_batch(k: int) -> Any:
            if self.is_server:
                return None
            ids = self.geometry.rank_range(step, k)
            seen.extend(ids)
            kind = "mlp" if self.model == "statistics" else self.model
            return models.samples(kind, ids.start, len(ids), torch.float64)

        loss = statistics_loss if self.model == "statistics" else models.loss_of(self.model)
        result = train_step(
            self.state,
            micro_batch,
            loss=no_samples if self.is_server else loss,
            num_microbatches=self.accumulate,
            lr=LR,
            clip_norm=CLIP,
        )
        assert result.applied
        return result.loss, seen


def make_rank(
    mesh: Any,
    model: str,
    optimizer: str,
    policy: str,
    accumulate: int = 1,
    *,
    frozen: tuple[str, ...] = (),
    copies: int = 1,
    ownership: Ownership = "flat",
    servers: int = 0,
) -> Rank:
    module = build(model)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    groups = with_servers(mesh, servers).data_groups() if servers else data_groups(mesh, copies)
    engine = ShardingEngine(
        module,
        policy=find_policy(policy, bucket_bytes=4096, ownership=ownership),
        groups=groups,
        device=torch.device("cpu"),
    )
    registry.install(module, engine, dropout_kind="stateless")
    module.train()
    workers = groups.workers
    geometry = BatchGeometry(GLOBAL_BATCH, accumulate, groups.num_workers, workers.index)
    state = TrainState(engine, ShardedOptimizer(SPECS[optimizer], engine.shards))
    must_agree = partial(workers.log.must_agree, workers.axis)
    state.randomness = StatelessDraws(geometry, seed=SEED, must_agree=must_agree).around
    return Rank(state, geometry, model, accumulate, groups.is_server)


def make_writer(rank: Rank, root: Path, *, attempt: str = "a", background: bool = False) -> Writer:
    group = rank.state.engine.group
    place = Place(root, group.index, group.size, attempt)
    return Writer(place, background, expected_tensors(rank.state.engine))


def facts(rank: Rank) -> RunFacts:
    state = rank.state
    return RunFacts(
        state.step,
        state.tokens,
        state.step * GLOBAL_BATCH,
        {"expected_count": state.expected_count},
        aliases=aliases(state.engine.model),
    )


def load(rank: Rank, path: Path) -> int:
    """Load a checkpoint; the bytes read."""
    with CheckpointReader(path) as reader:
        load_items(rank.state, reader)
        run = reader.manifest.run
        rank.state.step, rank.state.tokens = run.step, run.tokens
        rank.state.expected_count = run.state["expected_count"]
        return reader.bytes_read


def run_leg(mesh: Any, model: str, optimizer: str, leg: Leg, root: Path, first: int) -> dict[str, Any]:
    shape = {"copies": leg.copies, "ownership": leg.ownership, "servers": leg.servers}
    rank = make_rank(mesh, model, optimizer, leg.policy, leg.accumulate, **shape)
    read = load(rank, root / folder.step_name(first)) if first else 0
    losses, samples = [], []
    while rank.state.step < leg.stop:
        loss, seen = rank.step()
        losses.append(loss)
        samples.append(seen)
    writer = make_writer(rank, root, attempt=f"leg{first}")
    writer.save(items_to_save(rank.state), facts(rank))
    writer.finish()
    return {"losses": losses, "samples": samples, "read": read}


def run_legs(ranks: Any, model: str, optimizer: str, legs: list[Leg], root: Path) -> dict[str, Any]:
    """All legs, one after the other; losses, and the sorted samples of every step."""
    losses: list[float] = []
    samples: list[list[int]] = []
    reads = []
    for first, leg in zip([0, *(leg.stop for leg in legs)], legs, strict=False):
        results = ranks.run(run_leg, leg.world, model, optimizer, leg, root, first)
        losses += results[0]["losses"]
        samples += [
            sorted(itertools.chain(*parts)) for parts in zip(*(r["samples"] for r in results), strict=True)
        ]
        reads.append([result["read"] for result in results])
    return {"losses": losses, "samples": samples, "reads": reads}
