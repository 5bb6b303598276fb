import pytest
import torch
from torch import nn

from meshwright.models import IGNORED_LABEL, classification_loss, language_model_loss


def test_sum_and_count_skip_ignored_labels() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[1, IGNORED_LABEL, 6], [IGNORED_LABEL, IGNORED_LABEL, 0]])
    total, count = language_model_loss(nn.Identity(), {"tokens": logits, "labels": labels})
    probabilities = logits.softmax(-1)
    expected = -(probabilities[0, 0, 1].log() + probabilities[0, 2, 6].log() + probabilities[1, 2, 0].log())
    torch.testing.assert_close(total, expected)
    assert total.shape == count.shape == ()
    assert count.dtype == torch.int64
    assert int(count) == 3


def test_parts_of_a_batch_add_up() -> None:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, IGNORED_LABEL, 3, 2, 1])
    whole = classification_loss(nn.Identity(), {"inputs": inputs, "labels": labels})
    parts = [
        classification_loss(nn.Identity(), {"inputs": inputs[part], "labels": labels[part]})
        for part in (slice(0, 2), slice(2, 3), slice(3, 6))
    ]
    torch.testing.assert_close(sum(total for total, _ in parts), whole[0])
    assert sum(int(count) for _, count in parts) == int(whole[1]) == 5


def test_no_valid_label_is_zero_not_nan() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    total, count = language_model_loss(
        nn.Identity(), {"tokens": logits, "labels": torch.full((1, 2), IGNORED_LABEL)}
    )
    total.backward()
    assert total.item() == 0.0
    assert int(count) == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sum_has_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    logits = torch.zeros(1, 2, 3, dtype=dtype)
    total, _ = language_model_loss(
        nn.Identity(), {"tokens": logits, "labels": torch.zeros(1, 2, dtype=torch.long)}
    )
    assert total.dtype == expected
