import torch

from meshwright.models import MLP, MLPConfig, initialise


def test_forward_equals_the_equations() -> None:
    model = MLP(MLPConfig(num_layers=2, dim=8, input_dim=5, num_classes=3)).double()
    initialise(model, seed=2)
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = (x @ p["blocks.0.weight"].T + p["blocks.0.bias"]).clamp(min=0)
    hidden = (hidden @ p["blocks.1.weight"].T + p["blocks.1.bias"]).clamp(min=0)
    torch.testing.assert_close(model(x).detach(), hidden @ p["head.weight"].T + p["head.bias"])


def test_start_keeps_the_scale_through_the_layers() -> None:
    model = MLP(MLPConfig(num_layers=4, dim=512, input_dim=512, num_classes=512))
    initialise(model, seed=2)
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    # He et al. 2015: the mean square before each ReLU stays twice that of the input.
    assert 1.6 < model(x).square().mean().item() < 2.4
