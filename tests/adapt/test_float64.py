"""Within float64 throughout nothing is rounded to float32, forward or backward, and all is put back."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.adapt.float64 import asks_for_float32, float64_throughout

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def root_mean_square(x):
    """As models write it that train in 16 bits."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


ASKING = {
    "to": root_mean_square,
    "float": lambda x: x.float().double(),
    "type": lambda x: x.type(torch.float32).double(),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32).double(),
    "sum": lambda x: x.sum(-1, dtype=torch.float32).double(),
    "zeros": lambda x: torch.zeros(4, 2) + x @ torch.ones(6, 2),
    "positions": lambda x: (x.float() @ torch.arange(6)[:, None].float()).double(),
    "checkpoint": lambda x: checkpoint(root_mean_square, x, use_reentrant=False),
}
SILENT = {
    "float64": lambda x: x.square().softmax(-1),
    "int": lambda x: x + torch.arange(6),
    "view": lambda x: x.detach().view(torch.int64).double(),
    "like": lambda x: torch.zeros_like(x) + x.new_ones(6),
}


@pytest.mark.parametrize("name", ASKING)
def test_asking_for_float32_gives_float64(name):
    assert asks_for_float32(lambda: ASKING[name](X))
    with float64_throughout():
        leaf = X.clone().requires_grad_()
        value = ASKING[name](leaf)
        value.sum().backward()
        # An error of 1e-12 would be lost in float32.
        moved = ASKING[name](X + 1e-12)
    assert value.dtype == leaf.grad.dtype == torch.float64
    slope = (moved - value).sum() / 1e-12
    assert float(slope.detach()) == pytest.approx(float(leaf.grad.sum()), abs=0.05)


@pytest.mark.parametrize("name", SILENT)
def test_float64_needs_nothing(name):
    assert not asks_for_float32(lambda: SILENT[name](X))


def test_everything_is_put_back():
    with pytest.raises(RuntimeError, match="inside"), float64_throughout():
        raise RuntimeError("inside")
    assert torch.zeros(1).dtype == X.float().dtype == torch.float32


def test_a_custom_backward_that_casts_is_wide_too():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.float())
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * grad.float() + 0 * x

    with float64_throughout():
        leaf = X.clone().requires_grad_()
        (Double.apply(leaf) * (1 / 3)).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(X, 2 / 3))


def test_torchs_compiler_is_not_loaded():
    """Guards the private switch: with it on, every run would pay for an import that takes longer than the run."""
    text = (
        "import sys, torch; from meshwright.adapt.float64 import asks_for_float32; "
        "print(asks_for_float32(lambda: torch.zeros(1)), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
