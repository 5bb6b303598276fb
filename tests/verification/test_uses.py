"""Declared collectives are those that are issued, for models that the closed formula does not know."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.launching.verify import job_of
from meshwright.verification.job import Functions
from tests.parity.verifying import Verifier
from tests.verification.models import Rows, loss_of_labels


class Blocks(nn.Module):
    """Blocks in the order that is given, with batch normalisation or recomputed where asked."""

    def __init__(self, order, *, root=True, normalises=False, recompute=None):
        super().__init__()
        self.order, self.recompute = order, recompute
        norm = nn.BatchNorm1d(12) if normalises else nn.Identity()
        width = 12
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(6 if i == 0 and not root else width, width),
                nn.BatchNorm1d(width) if normalises else nn.Identity(),
                nn.Tanh(),
            )
            for i in range(4)
        )
        self.first = nn.Linear(6, width) if root else nn.Identity()
        self.norm = norm
        self.head = nn.Linear(width, 3) if root else nn.Identity()

    def forward(self, x):
        x = self.first(x)
        for index in self.order:
            block = self.blocks[index]
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x)) if isinstance(self.head, nn.Linear) else x[:, :3]


class Aside(nn.Module):
    """A block whose output the loss never sees, one that only hands on, and one without gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.first(x)
        self.blocks[2](x)
        x = self.blocks[0](x)
        with torch.no_grad():
            shift = self.blocks[1](x)
        return self.head(x + shift + self.blocks[3](x.detach()))


class Beside(nn.Module):
    """Blocks that leave a second result beside their output, made after it, for the end of the forward."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            y = self.main(x).tanh()
            self.beside = self.other(y).tanh().mean(1, keepdim=True)
            return y

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for index in (1, 2, 0):
            x = self.blocks[index](x)
        return self.head(x) * sum(block.beside for block in self.blocks)


CASES = {
    "in order": lambda: Blocks((0, 1, 2, 3)),
    "reversed": lambda: Blocks((3, 2, 1, 0)),
    "again": lambda: Blocks((0, 1, 0, 2, 3)),
    "twice running": lambda: Blocks((0, 0, 1, 2, 2)),
    "some": lambda: Blocks((1, 3)),
    "last twice": lambda: Blocks((3, 0, 3)),
    "no root": lambda: Blocks((0, 2, 1, 2), root=False),
    "recomputed": lambda: Blocks((0, 2, 1), recompute=False),
    "recomputed by autograd": lambda: Blocks((2, 0, 1), recompute=True),
    "batch norm": lambda: Blocks((0, 1, 0, 2), normalises=True),
    "batch norm recomputed": lambda: Blocks((0, 1, 2), normalises=True, recompute=False),
    "batch norm recomputed by autograd": lambda: Blocks((0, 1, 2), normalises=True, recompute=True),
    "batch norm of the input": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "aside": Aside,
    "beside": Beside,
}


@pytest.fixture(scope="module")
def verifier(ranks):
    with Verifier(ranks) as made:
        yield made


# Six orders cover each rule once; all of them run with `make parity`.
DEFAULT = ("again", "last twice", "no root", "recomputed", "batch norm", "batch norm recomputed by autograd")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.parity) for name in CASES]
)
def test_declared_is_issued(verifier, name):
    zeros = (3, 2) if "norm" in name else (3,)
    functions = Functions(CASES[name], loss_of_labels, Rows())
    jobs = [job_of(functions, plan=f"zero={zero}", processes=2, options={"steps": 2}) for zero in zeros]
    prepared = verifier.prepare(jobs[0])
    for job in jobs:
        result = verifier.run(prepared, plan=job.plan)
        assert result.ok, result.table()
        assert result.check("counts").compared == 4
