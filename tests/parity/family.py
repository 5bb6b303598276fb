"""The data-parallel family against one device by `verify`: copies, whole owners, Muon, statistics of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.launching.verify import job_of
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.plan import TrainPlan, TransportName
from meshwright.layout.policy import Ownership
from meshwright.models import GPT, GPTConfig, Llama, LlamaConfig, language_model_loss
from meshwright.verification.job import Functions, VerifyJob
from tests.verification.models import Net, Rows, loss_of_labels

# 24 samples in 2 micro-steps of 12: cut evenly over 1, 2, 3, 4 and 6 ranks.
GLOBAL_BATCH, NUM_MICROBATCHES = 24, 2


class Tokens:
    """Sequences of unequal numbers of valid labels."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[: index % 6] = -100
        return {"tokens": tokens[:-1], "labels": labels}


class Images:
    """Small images; some labels are ignored."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(3, 6, 6, generator=generator),
            "label": torch.tensor(-100 if index % 7 == 2 else index % 3),
        }


class Residual(nn.Module):
    """Two convolutions with batch statistics around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.again = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_again = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolve(x)).relu()
        return (x + self.norm_again(self.again(y))).relu()


class ResNet(nn.Module):
    """A stem, residual blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.blocks = nn.ModuleList([Residual(5) for _ in range(2)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def make_gpt() -> nn.Module:
    sizes = {"num_layers": 2, "dim": 24, "num_heads": 3, "ffn_dim": 53}
    return GPT(GPTConfig(vocab_size=31, max_seq_len=7, **sizes))


def make_llama() -> nn.Module:
    sizes = {"num_layers": 3, "dim": 24, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 37}
    return Llama(LlamaConfig(vocab_size=31, max_seq_len=7, **sizes))


SUBJECTS: dict[str, Functions] = {
    "net": Functions(Net, loss_of_labels, Rows()),
    "gpt": Functions(make_gpt, language_model_loss, Tokens()),
    "llama": Functions(make_llama, language_model_loss, Tokens()),
    "resnet": Functions(ResNet, loss_of_labels, Images()),
}


@dataclass(frozen=True)
class Shape:
    """A place in the family: ranks, ZeRO stage, copies and ownership."""

    world: int
    zero: int
    copies: int = 1
    ownership: Ownership = "flat"
    transport: TransportName = "gloo"

    def __str__(self) -> str:
        return f"{self.world}ranks-zero{self.zero}-{self.copies}copies-{self.ownership}-{self.transport}"

    def plan(self, job: VerifyJob) -> TrainPlan:
        """The plan of `job` on this shape."""
        request = PlanRequest(
            policy=self.zero,
            precision=job.plan.precision,
            bucket_bytes=4096,
            hsdp=self.world // self.copies if self.copies > 1 else None,
            ownership=self.ownership,
            transport=self.transport,
        )
        unchecked = make_plan(request, world_size=self.world, global_batch=12 * self.world)
        return replace(
            unchecked, global_batch=job.plan.global_batch, num_microbatches=job.plan.num_microbatches
        )


def job(subject: str, *, optimizer: str, precision: str, global_batch: int = GLOBAL_BATCH) -> VerifyJob:
    """What every shape is compared on."""
    options: Any = {"optimizer": optimizer, "precision": precision, "global_batch": global_batch}
    made = job_of(SUBJECTS[subject], plan="micro_batch=1", processes=1, options=options)
    return replace(made, plan=replace(made.plan, num_microbatches=NUM_MICROBATCHES))
