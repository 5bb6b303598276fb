"""plan.mode = "auto" is one device: unmodified models cut by what their units cost here.

Measured on warm ranks and run by `verify`'s own code there; a few through real processes elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.comm.mesh import Mesh
from meshwright.launching.verify import job_of
from meshwright.testing.ranks import RankPool
from meshwright.training.agreeing import measure_rank
from meshwright.training.config import RunConfig
from meshwright.training.deciding import Decision, decide
from meshwright.training.measured import Measured, agreed
from meshwright.verification.job import Functions
from meshwright.verification.subject import make_task_of
from tests.parity.verifying import Verifier
from tests.pipeline.models import (
    EncoderDecoder,
    Images,
    Pairs,
    UNet,
    Uneven,
    make_gpt2,
    make_t5,
    pair_loss,
    pixel_loss,
    t5_loss,
)
from tests.verification.checks import assert_one_device
from tests.verification.models import Rows, Tokens, loss_of_labels


class Pictures:
    """Coloured images and a class."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "pixel_values": torch.randn(3, 16, 16, generator=generator),
            "labels": torch.tensor(index % 5),
        }


def make_resnet() -> nn.Module:
    """ResNet of transformers: bottlenecks of four levels with unequal widths and batch statistics."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 2, 1], "num_labels": 5}
    return ResNetForImageClassification(ResNetConfig(**sizes))


def resnet_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"])


def gpt2_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    from meshwright.models.hf_loss import causal_lm_loss

    return causal_lm_loss(model, batch)


SUBJECTS: dict[str, tuple[Any, Any, Any]] = {
    "u-net": (UNet, pixel_loss, Images()),
    "t5": (make_t5, t5_loss, Pairs(101, 7)),
    "resnet": (make_resnet, resnet_loss, Pictures()),
    "encoder-decoder": (lambda: EncoderDecoder(101), pair_loss, Pairs(101, 7)),
    "mlp": (Uneven, loss_of_labels, Rows()),
    "gpt2": (make_gpt2, gpt2_loss, Tokens(101, 7)),
}
# Processes and what is fixed of the plan.
PLANS = [
    (2, "pp=2"),
    (3, "pp=3,zero=1"),
    (4, "pp=4,micro_batch=3"),
    (4, "pp=2,zero=3,transport=shm"),
    (4, "pp=2,schedule=gpipe,recompute=full"),
    (3, ""),
    (3, "pp=2"),  # one rank and two
    (2, "pp=2,schedule=zb-v"),
]


@pytest.fixture(scope="module")
def verifier(ranks) -> Iterator[Verifier]:
    with Verifier(ranks) as made:
        yield made


def measure_here(mesh: Mesh, config: RunConfig, functions: Functions) -> Measured:
    return measure_rank(config, make_task_of(config, functions), mesh.world, device=mesh.device)


class Deciding:
    """Decides as the launcher does, on warm ranks; remembers what."""

    def __init__(self, ranks: RankPool, cache_dir: Path) -> None:
        self._ranks, self._cache_dir = ranks, cache_dir
        self.found: list[Decision] = []

    def __call__(self, config: RunConfig, processes: int, functions: Functions | None) -> Decision:
        data = config.data.model_copy(update={"cache_dir": self._cache_dir})
        config = config.model_copy(update={"data": data})
        measured = self._ranks.run(measure_here, processes, config, functions, timeout=200.0)
        self.found.append(decide(config, agreed(measured), world_size=processes))
        return self.found[-1]


@pytest.mark.parametrize(
    ("subject", "processes", "fixed"),
    [
        ("u-net", 2, "pp=2"),
        *(
            pytest.param(subject, *plan, marks=pytest.mark.parity)
            for subject, plan in itertools.product(SUBJECTS, PLANS)
            if (subject, *plan) != ("u-net", 2, "pp=2")
        ),
    ],
)
def test_an_automatic_plan_is_one_device(verifier, ranks, tmp_path, subject, processes, fixed):
    build, loss, data = SUBJECTS[subject]
    if "recompute" in fixed and subject == "u-net":
        pytest.skip("has no repeated blocks")
    deciding = Deciding(ranks, tmp_path)
    job = job_of(
        Functions(build, loss, data),
        plan=",".join(part for part in ("mode=auto", fixed) if part),
        processes=processes,
        options={"steps": 2, "global_batch": 12},  # verify's own default would fix micro_batch
        decide=deciding,
    )
    assert len(deciding.found) == 1
    if fixed:
        assert job.plan.mesh.size("pp") == int(fixed[3])
    if job.plan.mesh.size("pp") > 1:
        assert len(job.plan.stages) == job.plan.num_stages - 1
    result = verifier.run(verifier.prepare(job), timeout=200)
    assert_one_device(result, limit=1e-11)
    assert len(list((tmp_path / "unit-seconds").iterdir())) == 1, "the next run measures nothing"
