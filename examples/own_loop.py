"""A loop that no trainer has: a generator against a critic with a gradient penalty, two optimizers, one module.

One process or several, with any plan, the numbers are the same:
    python examples/own_loop.py
    meshwright train examples/own_loop.py -n 2 zero=3

Source of the losses: Gulrajani et al. 2017, "Improved training of Wasserstein GANs" (arXiv 1704.00028).
"""

import math
import sys

import torch
from torch import Tensor, nn

import meshwright


class Pair(nn.Module):
    """What trains together is one module; each optimizer takes its part by name."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def generate(self, noise: Tensor) -> Tensor:
        """(samples, 4) -> points of the plane."""
        return self.generator(noise)

    def judge(self, points: Tensor) -> Tensor:
        """Points -> how real they look."""
        return self.critic(points)


class Ring(torch.utils.data.Dataset):
    """Points on a circle, with the noise and the weights of their step: what is random belongs to a sample."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        angle = 2 * math.pi * torch.rand((), generator=draw)
        real = torch.stack([angle.cos(), angle.sin()])
        return real, torch.randn(4, generator=draw), torch.rand(1, generator=draw)


def penalty(model: meshwright.ShardedModel, real: Tensor, fake: Tensor, weight: Tensor) -> Tensor:
    """How far the critic's slope between real and fake is from 1."""
    between = (weight * real + (1 - weight) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model.judge(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def main() -> None:
    """Train and say how round the generated points are."""
    with meshwright.job(sys.argv[1] if sys.argv[1:] else "", seed=1) as job:
        model = job.build(Pair)
        critic = job.optimizer(model, torch.optim.Adam, only="critic.*", lr=3e-3, betas=(0.5, 0.9))
        generator = job.optimizer(model, torch.optim.Adam, only="generator.*", lr=1e-3, betas=(0.5, 0.9))
        for batch in job.batches(Ring(), global_batch=64, steps=60):
            real, noise, weight = batch[0]
            with torch.no_grad():
                fake = model.generate(noise)
            with model.accumulate():
                loss = model.judge(fake).mean() - model.judge(real).mean()
                (loss + 10 * penalty(model, real, fake, weight)).backward()
            critic.step()
            if job.step % 3 == 0:
                with model.accumulate():
                    (-model.judge(model.generate(noise)).mean()).backward()
                generator.step()
            if job.step % 20 == 0:
                job.log(radius=job.mean(fake.norm(dim=1).mean()), distance=-job.mean(loss))


if __name__ == "__main__":
    main()
