"""Clipping as torch does it."""

import math

import pytest
import torch

from meshwright.training.clip import clip_coefficient


@pytest.mark.parametrize("limit", [0.01, 1.0, 2.5, 1e6])
def test_clipping_equals_torch(limit: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for seed, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    gradients = [parameter.grad.clone() for parameter in parameters]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    torch.nn.utils.clip_grad_norm_(parameters, limit)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(
            gradient * clip_coefficient(norm, limit), parameter.grad, rtol=1e-6, atol=0
        )


def test_small_gradients_and_no_limit_leave_gradients_alone() -> None:
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(0.999, 1.0) == 1.0
    assert clip_coefficient(1e30, None) == 1.0
    assert clip_coefficient(10.0, 1.0) == pytest.approx(0.1, rel=1e-6)
