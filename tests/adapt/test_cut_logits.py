"""Logits cut over the vocabulary: any loss computes what it does of whole ones, and cross-entropy gathers nothing."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from meshwright.adapt.cut_logits import CutLogits

SIZES = {2: (51, 50), 3: (34, 34, 33)}
DOUBLE = torch.float64


def _labels(generator: torch.Generator) -> torch.Tensor:
    labels = torch.randint(0, 101, (2, 7), generator=generator)
    labels[0, 3] = -100
    return labels


LOSSES = {
    "flat sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "view mean": lambda x, y: F.cross_entropy(x.view(-1, 101), y.view(-1)),
    "reshape, other ignored": lambda x, y: F.cross_entropy(
        x.contiguous().reshape(14, 101), y.clamp(0).flatten(), ignore_index=0
    ),
    "shifted, smoothed": lambda x, y: F.cross_entropy(
        x[:, :-1, :].float().reshape(-1, 101), y[:, 1:].flatten(), label_smoothing=0.1
    ),
    "ellipsis, temperature": lambda x, y: F.cross_entropy(
        (x[..., :-1, :] / 2).flatten(0, 1), y[:, 1:].flatten()
    ),
    "probabilities as targets": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), torch.full((14, 101), 1 / 101, dtype=x.dtype)
    ),
    "weights of classes": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.arange(101, dtype=x.dtype)
    ),
    "one loss a token": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").square().sum(),
    "classes first": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "own softmax": lambda x, y: -(x - x.logsumexp(-1, keepdim=True)).gather(-1, y.clamp(0)[..., None]).sum(),
    "a slice of the vocabulary": lambda x, y: x[..., 10:60].square().sum() + x[0, 1, 2] + x.size(-1) + x.shape[2],
    "bias of the vocabulary": lambda x, y: F.cross_entropy(
        (x + torch.arange(101, dtype=x.dtype)).flatten(0, 1), y.flatten()
    ),
    "changed in place": lambda x, y: _changed(x, y),
}  # fmt: skip
# Whose logits no rank gathers.
ON_PARTS = ("flat sum", "view mean", "reshape, other ignored", "shifted, smoothed", "ellipsis, temperature")


def _changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    x[:, :, 5] = 0
    return F.cross_entropy(x.flatten(0, 1), y.flatten())


def _check(mesh, sizes: tuple[int, ...]) -> None:
    group, index = mesh.group("dp"), mesh.rank
    for name, loss in LOSSES.items():
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(2, 7, 101, generator=generator, dtype=DOUBLE).requires_grad_()
        labels = _labels(generator)
        expected = loss(whole * 1, labels)
        expected.backward()
        mine = whole.detach().split(list(sizes), -1)[index].clone().requires_grad_()
        mesh.log.reset_counters()
        found = loss(CutLogits.of(mine * 1, group, sizes, cause="t"), labels)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected, msg=name, rtol=1e-6, atol=0)
        found.backward()
        tolerance = 1e-6 if "smoothed" in name else 1e-12  # `float()` rounds
        wanted = whole.grad.split(list(sizes), -1)[index]
        torch.testing.assert_close(mine.grad, wanted, rtol=tolerance, atol=tolerance, msg=name)
        assert mesh.log.calls == Counter({("all_gather", "dp"): 1}), name
        numel = 4 * (12 if "shifted" in name or "ellipsis" in name else 14)
        sent = mesh.log.bytes["all_gather", "dp"]
        is_small = sent <= numel * 8 * len(sizes)
        assert is_small == (name in ON_PARTS), (name, sent)


@pytest.mark.parametrize("size", [2, 3])
def test_any_loss_is_that_of_whole_logits(ranks, size: int) -> None:
    """pitfall: the loss of gathered logits is too large by log(tp)."""
    ranks.run(_check, size, SIZES[size])
