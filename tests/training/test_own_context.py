"""Steps of a user's own loop over sequences that are cut over ranks: those of one process, dropout included."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import PlanError
from meshwright.layout.plan import TrainPlan
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.training.own_build import Site, build_model
from meshwright.training.own_optimizer import make_own_optimizer
from meshwright.training.own_step import LoopRules, StepBatch

LENGTH, ROWS, MICRO_STEPS, VOCABULARY = 10, 4, 2, 29
DATA = torch.Generator().manual_seed(3)
TOKENS = torch.randint(VOCABULARY, (6 * ROWS, LENGTH + 1), generator=DATA)


def gpt() -> GPT:
    sizes = {"num_layers": 1, "dim": 16, "num_heads": 4, "ffn_dim": 24, "dropout": 0.2}
    return GPT(GPTConfig(vocab_size=VOCABULARY, max_seq_len=LENGTH, **sizes))


def built(mesh, cp: int, loss):
    """A model of a job on this rank, and its readers: (how many, which)."""
    spec = MeshSpec.of(dp_shard=mesh.world.size // cp, cp=cp)
    mesh = Mesh(spec, mesh.world, log=mesh.log, device=torch.device("cpu"))
    plan = TrainPlan(spec, find_policy("zero3", bucket_bytes=512), ROWS, ROWS, 1, "fp64")
    site = Site(plan, mesh, LoopRules(seed=5, clip_norm=0.5))
    model = build_model(gpt, site, loss=loss, siblings=[], say=lambda _: None)
    groups = mesh.data_groups()
    return model, groups.num_readers, groups.reader_index


def rows_at(start: int, stop: int):
    tokens = TOKENS[start:stop]
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def read(geometry, step: int, microbatch: int):
    rows = geometry.rank_range(step, microbatch)
    return rows_at(rows.start, rows.stop)


def train(mesh, cp: int):
    """Losses of steps of micro-batches, then of one batch of the user's own; and the weights."""
    model, readers, index = built(mesh, cp, language_model_loss)
    optimizer = make_own_optimizer(model, torch.optim.AdamW, {"lr": 0.01}, only=None, groups=None)
    losses = []
    geometry = BatchGeometry(2 * ROWS, MICRO_STEPS, readers, index)
    for step in range(2):
        losses.append(model.step(StepBatch(geometry, partial(read, geometry, step))))
        optimizer.step()
    mine = ROWS // readers
    losses.append(model.step(rows_at(16 + index * mine, 16 + (index + 1) * mine)))
    optimizer.step()
    return losses, {name: value for name, value in model.state_dict().items() if name}


def test_steps_over_cut_sequences_are_those_of_one_process(ranks) -> None:
    ((losses, weights),) = ranks.run(train, 1, 1)
    for world, cp in ((2, 2), (4, 2)):
        found = ranks.run(train, world, cp)
        for cut, _ in found:
            torch.testing.assert_close(torch.tensor(cut), torch.tensor(losses), rtol=1e-12, atol=0)
        assert found[0][1].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[0][1][name], value, rtol=1e-10, atol=1e-13)


def refusals(mesh) -> list[str]:
    def bare_mean(model, batch):
        total, count = language_model_loss(model, batch)
        return total / count

    texts = []
    model, *_ = built(mesh, 2, bare_mean)
    for call in (lambda: model.step(rows_at(0, 4)), lambda: model.accumulate().__enter__()):
        with pytest.raises(PlanError) as caught:
            call()
        texts.append(f"{caught.value.code} {caught.value.message}")
    return texts


def test_what_cannot_be_cut_is_refused(ranks) -> None:
    for texts in ranks.run(refusals, 2):
        assert texts[0].startswith(
            "E251 plan.cp cuts sequences, and the loss returned Tensor: a mean over a part"
        )
        assert texts[1].startswith("E255 plan.cp = 2 with model.accumulate() is not built")
