"""Training programs as users write them, and the same interface over plain PyTorch on one process.

Each program takes `(lab)`, a `PlainLab` or a `ShardedLab`, which builds models and optimizers and cuts batches; it
returns numbers. So one text runs as the reference and on ranks. The plain lab shares no code with the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.comm.mesh import Mesh
from meshwright.layout.plan import Precision, TrainPlan
from meshwright.layout.policy import find_policy
from meshwright.layout.recompute import parse_recompute
from meshwright.mesh import MeshSpec
from meshwright.training.own_build import Site, build_model
from meshwright.training.own_optimizer import make_own_optimizer
from meshwright.training.own_step import LoopRules

ROWS = 12  # of a global micro-batch; every tested world divides it
WIDTH = 5


class Tower(nn.Module):
    """A root, blocks (units of zero3) of which one is used twice, and a head."""

    def __init__(self, outputs: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, outputs)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = x + self.drop(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Pair(nn.Module):
    """A generator and a critic, which train in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Tower(WIDTH)
        self.critic = Tower(1)

    def forward(self, x: Tensor, part: str) -> Tensor:
        return self.generator(x) if part == "generator" else self.critic(x)


def draw(key: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(key))


class PlainModel:
    """What plain PyTorch does for the same program."""

    def __init__(self, module: nn.Module, loss: Any = None) -> None:
        self.module = module
        self.loss = loss

    def __call__(self, *args: Any) -> Tensor:
        return self.module(*args)

    def encode(self, x: Tensor) -> Tensor:
        return self.module.encode(x)

    @contextmanager
    def accumulate(self, num_microbatches: int = 1, *, backwards: int = 1) -> Iterator[None]:
        self.count = 0.0
        self.module.zero_grad()
        yield
        divisor = self.count or num_microbatches
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= divisor

    def backward(self, total: Tensor, count: float) -> None:
        self.count += count
        total.backward()

    def step(self, batch: Tensor) -> float:
        with self.accumulate():
            loss = self.loss(self.module, batch)
            loss.backward()
        return loss.item()

    def clip_grad_norm(self, limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.module.parameters(), limit))


class PlainLab:
    """One process, plain PyTorch."""

    rank, world = 0, 1

    def __init__(self, clip_norm: float | None = None) -> None:
        self.clip_norm = clip_norm

    def build(self, build: Callable[[], nn.Module], loss: Any = None) -> PlainModel:
        torch.manual_seed(0)
        return PlainModel(build().double(), loss)

    def optimizer(
        self, model: Any, kind: Any, *, only: str = "*", groups: Any = (), **options: Any
    ) -> torch.optim.Optimizer:
        members: dict[str, dict[str, Any]] = {}
        for name, parameter in model.module.named_parameters():
            if fnmatchcase(name, only):
                own = next((o for pattern, o in groups if fnmatchcase(name, pattern)), {})
                members.setdefault(repr(own), {"params": [], **own})["params"].append(parameter)
        optimizer = kind(list(members.values()), **options)
        if self.clip_norm is not None:

            def clip(*_: Any) -> None:
                mine = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(mine, self.clip_norm)

            optimizer.register_step_pre_hook(clip)
        return optimizer

    def part(self, x: Tensor) -> Tensor:
        rows = len(x) // self.world
        return x[self.rank * rows : (self.rank + 1) * rows]

    def state(self, model: Any) -> list[tuple[str, int, Tensor]]:
        return [(name, 0, p.detach().flatten()) for name, p in model.module.named_parameters()]


class ShardedLab(PlainLab):
    """Ranks, with the engine."""

    def __init__(
        self,
        mesh: Any,
        policy: str,
        clip_norm: float | None = None,
        *,
        seed: int = 0,
        copies: int = 1,
        precision: Precision = "fp64",
        recompute: str = "none",
    ) -> None:
        """`policy` may end in `/whole`; `copies` of the model are trained by as many ranks each."""
        self.rank, self.world = mesh.rank, mesh.world.size
        self.rules = LoopRules(seed=seed, clip_norm=clip_norm)
        name, _, ownership = policy.partition("/")
        row = dataclasses.replace(find_policy(name, bucket_bytes=512), ownership=ownership or "flat")
        spec = MeshSpec.of(dp_replicate=copies, dp_shard=self.world // copies)
        self.mesh = Mesh(spec, mesh.world, log=mesh.log, device=torch.device("cpu"))
        again = parse_recompute(recompute)
        self.plan = TrainPlan(spec, row, ROWS, ROWS // self.world, 1, precision, recompute=again)

    def build(self, build: Callable[[], nn.Module], loss: Any = None) -> Any:
        site = Site(self.plan, self.mesh, self.rules)
        return build_model(build, site, loss=loss, siblings=[], say=lambda _: None)

    def optimizer(
        self, model: Any, kind: Any, *, only: str = "*", groups: Any = (), **options: Any
    ) -> torch.optim.Optimizer:
        return make_own_optimizer(model, kind, options, only=only, groups=groups)

    def state(self, model: Any) -> list[tuple[str, int, Tensor]]:
        shards = model.state.engine.shards
        return [(s.name, s.piece.start, s.parameter.detach().flatten().clone()) for s in shards]


def mean_loss(lab: Any) -> Any:
    """A bare mean, accumulated; groups, a scheduler, an evaluation between steps and one inside."""
    model = lab.build(Tower)
    groups = [("*.bias", {"weight_decay": 0.0}), ("head.*", {"lr": 0.05})]
    optimizer = lab.optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1, groups=groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        with model.accumulate(2):
            for k in range(2):
                x = lab.part(draw(10 * step + k))
                F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
                if k == 0:
                    with torch.no_grad():
                        seen.append(model(draw(1)).sum().item())
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            seen.append(model(draw(2)).sum().item())
    return seen, lab.state(model)


def weighted_loss(lab: Any) -> Any:
    """A sum over unequally many things on each rank, none on some; the norm is asked for, and clipped."""
    model = lab.build(Tower)
    optimizer = lab.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    norms = []
    for step in range(3):
        with model.accumulate(2):
            for k in range(2):
                x = draw(20 * step + k)
                keep = torch.arange(ROWS) < step + 2 * k
                x, keep = lab.part(x), lab.part(keep)
                model.backward((model(x).squeeze(1) - x[:, 0]).square()[keep].sum(), int(keep.sum()))
        norms.append(model.clip_grad_norm(0.3))
        optimizer.step()
    return norms, lab.state(model)


def gradient_penalty(lab: Any) -> Any:
    """A Wasserstein critic's penalty: the gradient by inputs is part of the loss."""
    model = lab.build(Tower)
    optimizer = lab.optimizer(model, torch.optim.RMSprop, lr=0.003)
    for step in range(2):
        with model.accumulate(2):
            for k in range(2):
                real, fake = lab.part(draw(4 * step + k)), lab.part(draw(100 + 4 * step + k))
                between = (0.3 * real + 0.7 * fake).requires_grad_()
                (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).square().mean()
                (model(fake).mean() - model(real).mean() + 10 * penalty).backward()
        optimizer.step()
    return [], lab.state(model)


def adversaries(lab: Any) -> Any:
    """Two optimizers over disjoint parameters, in turn; each clips by the norm of its own."""
    model = lab.build(Pair)
    critic = lab.optimizer(model, torch.optim.Adam, lr=0.01, only="critic.*")
    generator = lab.optimizer(model, torch.optim.Adagrad, lr=0.02, only="generator.*")
    for step in range(3):
        real, noise = lab.part(draw(step)), lab.part(draw(50 + step))
        with model.accumulate():
            fake = model(noise, "generator").detach()
            (model(fake, "critic").mean() - model(real, "critic").square().mean()).backward()
        critic.step()
        with model.accumulate():
            (-model(model(noise, "generator"), "critic").mean()).backward()
        generator.step()
    with model.accumulate():
        (model(model(noise, "generator"), "critic") - 1).square().mean().backward()
    critic.step()
    generator.step()
    return [], lab.state(model)


def several_backwards(lab: Any) -> Any:
    """Two backward calls a micro-step: of two forwards, then of one graph that is kept; and a method of the module."""
    model = lab.build(Tower)
    optimizer = lab.optimizer(model, torch.optim.NAdam, lr=0.01)
    for step in range(2):
        x, y = lab.part(draw(step)), lab.part(draw(60 + step))
        with model.accumulate(2, backwards=2):
            first, second = model(x).mean(), model(y).square().mean()
            first.backward()
            second.backward()
            out = model.encode(y)
            out.square().mean().backward(retain_graph=True)
            out.mean().backward()
        optimizer.step()
    with model.accumulate(2):  # two forwards before the first backward
        losses = [model(lab.part(draw(70 + k))).square().mean() for k in range(2)]
        for loss in losses:
            loss.backward()
    optimizer.step()
    return [], lab.state(model)


class Normed(Tower):
    """With statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.encode(x)))


def _mean_square(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


def whole_steps(lab: Any) -> Any:
    """A step in one call, by a loss that is a bare mean; batch statistics; an optimizer with momentum."""
    model = lab.build(Normed, loss=_mean_square)
    optimizer = lab.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for step in range(3):
        losses.append(model.step(lab.part(draw(30 + step))))
        optimizer.step()
    return losses, lab.state(model)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    program.__name__: program
    for program in (
        mean_loss,
        weighted_loss,
        gradient_penalty,
        adversaries,
        several_backwards,
        whole_steps,
    )
}
