"""The list of adaptations, and whole trainings with them: one process, several ranks, any policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.adapt import registry
from meshwright.adapt.dropout import stateless
from meshwright.comm.ops import DataGroups
from meshwright.comm.rng import MicroStep
from meshwright.data.index_law import BatchGeometry, rank_range
from meshwright.errors import PlanError, WorkerError
from meshwright.layout.policy import find_policy
from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.initial import initialise
from meshwright.models.loss import classification_loss, language_model_loss
from meshwright.sharding.engine import ShardingEngine
from meshwright.testing.ranks import local_mesh
from meshwright.testing.reference import Trace, run_reference
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, parameter_groups
from meshwright.training.randomness import StatelessDraws
from meshwright.training.state import TrainState
from meshwright.training.step import train_step
from tests.parity.harness import Comparison, _tensors

GLOBAL_BATCH, NUM_STEPS, SEED, CLIP = 10, 3, 7, 0.05
SPEC = OptimizerSpec("adamw", lr=0.01, weight_decay=0.1, eps=1e-6)
VOCAB, SEQ = 31, 7


class ConvNet(nn.Module):
    """Batch normalisation between convolutions and after a linear layer, one use of it recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU())
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5, momentum=None)) for _ in range(2)]
        )
        self.norm = nn.BatchNorm1d(20)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(20, 3)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        x = torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)
        return self.head(self.drop(self.norm(x)))


@dataclass(frozen=True)
class Case:
    model: str
    policy: str
    world: int
    accumulate: int
    recompute: bool = False

    def __str__(self) -> str:
        name = f"{self.model}-{self.policy}-{self.world}ranks-acc{self.accumulate}"
        return name + ("-recomputed" if self.recompute else "")


class _RecomputedGPT(GPT):
    """Every block is checkpointed."""

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        x = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.final_norm(x))


def _build(case: Case) -> nn.Module:
    torch.manual_seed(2)
    if case.model == "cnn":
        model = ConvNet()
        model.recompute = case.recompute
        return model.double()
    config = GPTConfig(
        vocab_size=VOCAB, max_seq_len=SEQ, dim=24, num_layers=2, num_heads=3, ffn_dim=53, dropout=0.1
    )
    model = _RecomputedGPT(config) if case.recompute else GPT(config)
    initialise(model, 1)
    return model.double()


def _samples(case: Case, ids: range) -> dict[str, Tensor]:
    rows = []
    for index in ids:
        generator = torch.Generator().manual_seed(1000 + index)
        if case.model == "cnn":
            inputs = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
            rows.append({"inputs": inputs, "labels": torch.tensor(index % 3)})
        else:
            tokens = torch.randint(VOCAB, (SEQ + 1,), generator=generator)
            rows.append({"tokens": tokens[:-1], "labels": tokens[1:]})
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def _loss(case: Case) -> Any:
    return classification_loss if case.model == "cnn" else language_model_loss


def _candidate(mesh: Any, case: Case) -> dict[str, Any]:
    model, group = _build(case), mesh.group("dp")
    engine = ShardingEngine(
        model,
        policy=find_policy(case.policy, bucket_bytes=4096),
        groups=DataGroups.of(group),
        device=torch.device("cpu"),
    )
    registry.install(model, engine)
    geometry = BatchGeometry(GLOBAL_BATCH, case.accumulate, dp_size=group.size, dp_rank=group.index)
    state = TrainState(
        engine,
        ShardedOptimizer(SPEC, engine.shards),
        randomness=StatelessDraws(geometry, seed=SEED).around,
    )
    losses, norms = [], []
    for step in range(NUM_STEPS):
        result = train_step(
            state,
            lambda k, step=step: _samples(case, geometry.rank_range(step, k)),
            loss=_loss(case),
            num_microbatches=case.accumulate,
            lr=SPEC.lr,
            clip_norm=CLIP,
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
    pieces = [
        (s.name, s.piece.start, s.piece.stop, s.parameter.detach().flatten().clone()) for s in engine.shards
    ]
    return {"losses": losses, "norms": norms, "pieces": pieces, "buffers": dict(model.named_buffers())}


def _reference(case: Case) -> tuple[Trace, dict[str, Tensor]]:
    """A plain model on one process, torch's own BatchNorm, masks of the whole micro-step; nothing recomputed."""
    model = _build(Case(case.model, "ddp", 1, case.accumulate))
    size = GLOBAL_BATCH // case.accumulate
    steps = []
    for step in range(NUM_STEPS):
        places = [MicroStep(SEED, step, k * size, size, size) for k in range(case.accumulate)]
        parts = [step * GLOBAL_BATCH + place.first_row for place in places]
        steps.append(
            [(place, _samples(case, range(i, i + size))) for place, i in zip(places, parts, strict=True)]
        )

    def loss(model: nn.Module, batch: tuple[MicroStep, dict[str, Tensor]]) -> Any:
        with stateless(batch[0]):
            return _loss(case)(model, batch[1])

    parameters = list(model.parameters())
    groups = [
        {"params": [parameters[i] for i in members], "weight_decay": decay}
        for members, decay in parameter_groups(SPEC, [tuple(p.shape) for p in parameters])
    ]
    optimizer = torch.optim.AdamW(groups, lr=SPEC.lr, betas=SPEC.betas, eps=SPEC.eps)
    return run_reference(model, loss, steps, optimizer=optimizer, clip_norm=CLIP), dict(model.named_buffers())


CASES = [
    *(
        Case("gpt", policy, world, accumulate)
        for policy in ("ddp", "zero3")
        for world in (1, 2, 3)
        for accumulate in (1, 2)
    ),
    *(Case("gpt", policy, world, 2, recompute=True) for policy in ("zero2", "zero3") for world in (1, 3)),
    *(Case("cnn", policy, world, 1) for policy in ("ddp", "zero3") for world in (1, 2, 3)),
    Case("cnn", "zero1", 3, 2),
    *(Case("cnn", policy, world, 2, recompute=True) for policy in ("ddp", "zero3") for world in (1, 3)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_with_dropout_or_batch_norm_equals_one_process(ranks, case: Case) -> None:
    trace, buffers = _reference(case)
    held = ranks.run(_candidate, case.world, case)
    _tensors("parameter", [rank["pieces"] for rank in held], trace.parameters, 1e-12, Comparison())
    for rank in held:
        assert rank["losses"] == pytest.approx(trace.losses, rel=1e-12)
        assert rank["norms"] == pytest.approx(trace.norms, rel=1e-12)
        assert rank["buffers"].keys() == buffers.keys()
        for name, value in buffers.items():
            torch.testing.assert_close(rank["buffers"][name], value, rtol=1e-12, atol=1e-13, msg=name)


def test_dropout_is_the_same_for_any_number_of_micro_steps() -> None:
    losses = [
        _candidate(local_mesh(), Case("gpt", "ddp", 1, accumulate))["losses"] for accumulate in (1, 2, 5)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


def _unlike(mesh: Any, difference: str) -> str:
    """One rank drops in one layer more, or its samples are longer."""
    group = mesh.group("dp")
    odd = group.index == 1

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        y = model(torch.cat([x, x], 1) if difference == "shape" and odd else x)
        y = nn.functional.dropout(y, 0.1) if difference == "layer" and odd else y
        return nn.functional.dropout(y, 0.2).sum(), len(x)

    model = nn.Linear(3, 3)
    engine = ShardingEngine(
        model, policy=find_policy("ddp"), groups=DataGroups.of(group), device=torch.device("cpu")
    )
    randomness = StatelessDraws(
        BatchGeometry(4, 1, dp_size=group.size, dp_rank=group.index),
        seed=SEED,
        must_agree=partial(group.log.must_agree, group.axis),
    ).around
    state = TrainState(engine, ShardedOptimizer(SPEC, engine.shards), randomness=randomness)
    try:
        train_step(
            state, lambda _: torch.ones(2, 4, 3), loss=loss, num_microbatches=1, lr=0.1, clip_norm=None
        )
    except WorkerError as error:
        return error.code
    return "agreed"


@pytest.mark.parametrize(
    ("difference", "outcome"), [("none", "agreed"), ("layer", "E404"), ("shape", "E404")]
)
def test_ranks_that_drop_otherwise_are_found(ranks, difference: str, outcome: str) -> None:
    assert ranks.run(_unlike, 2, difference) == [outcome, outcome]


def _engine(model: nn.Module) -> ShardingEngine:
    group = local_mesh().group("dp")
    return ShardingEngine(
        model, policy=find_policy("ddp"), groups=DataGroups.of(group), device=torch.device("cpu")
    )


def test_undo_puts_every_module_back() -> None:
    model = ConvNet()
    undo = registry.install(model, _engine(model))
    adapted = [type(m).__name__ for m in model.modules() if "forward" in vars(m)]
    assert adapted == ["BatchNorm2d", "BatchNorm2d", "BatchNorm2d", "BatchNorm1d", "Linear"]
    undo()
    assert not any("forward" in vars(m) for m in model.modules())


def test_warnings_of_all_adaptations() -> None:
    model = ConvNet()
    texts = registry.warnings_of(model, dropout_kind="native", num_ranks=2, num_microbatches=2)
    assert [text[:4] for text in texts] == ["W205", "W206"]
    assert registry.warnings_of(model, dropout_kind="stateless", num_ranks=2, num_microbatches=1) == []


def _refused(mesh: Any, kind: Any) -> str:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), nn.BatchNorm1d(4))
    group = mesh.group("dp")
    engine = ShardingEngine(
        model, policy=find_policy("ddp"), groups=DataGroups.of(group), device=torch.device("cpu")
    )
    try:
        registry.install(model, engine, dropout_kind=kind)
    except PlanError as error:
        assert "forward" not in vars(model[1])
        return error.code
    return "installed"


@pytest.mark.parametrize(("kind", "outcome"), [("stateless", "E208"), ("native", "installed")])
def test_layers_that_cannot_be_cut_are_refused_before_anything_changes(
    ranks, kind: str, outcome: str
) -> None:
    assert ranks.run(_refused, 2, kind) == [outcome, outcome]


def test_ranks_read_the_rows_that_masks_are_drawn_for() -> None:
    """The order of samples and of masks is one: that of the index law."""
    rows = rank_range(3, 1, global_batch=12, num_microbatches=2, dp_size=4, dp_rank=1)
    geometry = BatchGeometry(12, 2, dp_size=4, dp_rank=1)
    ones = torch.ones(len(rows), 50)
    with StatelessDraws(geometry, seed=0).around(3, 1):
        held = torch.dropout(ones, 0.5, True)
    with stateless(MicroStep(0, 3, 0, 12, 12)):
        whole = torch.dropout(torch.ones(12, 50), 0.5, True)
    assert torch.equal(held, whole[rows.start - 36 : rows.stop - 36])
