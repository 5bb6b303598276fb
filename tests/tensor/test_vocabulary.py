"""Embedding and cross-entropy over a cut vocabulary against one device: uneven, smoothed, z-loss, ignored labels."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from meshwright.tensor import vocabulary
from meshwright.tensor.vocabulary import LossTerms

CHUNKS = {1: (101,), 2: (51, 50), 3: (34, 34, 33), 4: (60, 0, 40, 1)}
DOUBLE = torch.float64


def _first(sizes, index: int) -> int:
    return sum(sizes[:index])


def _embedding(mesh, sizes) -> None:
    group, index = mesh.group("dp"), mesh.rank
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(101, 6, generator=generator, dtype=DOUBLE)
    tokens = torch.randint(0, 101, (2, 7), generator=generator)
    g = torch.randn(2, 7, 6, generator=generator, dtype=DOUBLE)
    plain = table.clone().requires_grad_()
    F.embedding(tokens, plain).backward(g)
    mine = table.split(list(sizes))[index].clone().requires_grad_()
    y = vocabulary.embedding(tokens, mine, group, first=_first(sizes, index), cause="t")
    assert torch.equal(y, table[tokens])
    y.backward(g)
    torch.testing.assert_close(mine.grad, plain.grad.split(list(sizes))[index])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_embedding(ranks, size: int) -> None:
    ranks.run(_embedding, size, CHUNKS[size])


def _plain_loss(logits: torch.Tensor, labels: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    loss = F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        reduction="sum",
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
    )
    counted = labels != terms.ignore_index
    return loss + terms.z_loss * logits.logsumexp(-1)[counted].square().sum()


def _cross_entropy(mesh, sizes, terms: LossTerms) -> None:
    group, index = mesh.group("dp"), mesh.rank
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 5, 101, generator=generator, dtype=DOUBLE) * 4
    logits[0, 0, 7] = 900.0  # exponentials would overflow
    logits[0, 1] -= 2000.0
    labels = torch.randint(0, 101, (3, 5), generator=generator)
    labels[1, :2] = labels[2, 4] = terms.ignore_index
    plain = logits.clone().requires_grad_()
    wanted = _plain_loss(plain, labels, terms)
    (wanted * 0.5).backward()
    mine = logits.split(list(sizes), -1)[index].clone().requires_grad_()
    mesh.log.reset_counters()
    loss = vocabulary.summed_cross_entropy(
        mine, labels, group, first=_first(sizes, index), vocab_size=101, terms=terms, cause="t"
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    (loss * 0.5).backward()
    torch.testing.assert_close(mine.grad, plain.grad.split(list(sizes), -1)[index], rtol=1e-11, atol=1e-12)
    issued = Counter({op: n for (op, _), n in mesh.log.calls.items() if n})
    assert issued == ({"all_gather": 1} if group.size > 1 else {})
    if group.size > 1:  # four numbers a token from every rank: the logits stay where they are
        assert mesh.log.events()[-1].numel == 4 * 15 * group.size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "terms",
    [
        LossTerms(),
        LossTerms(ignore_index=-1, label_smoothing=0.1),
        LossTerms(label_smoothing=0.2, z_loss=1e-2),
    ],
)
def test_cross_entropy(ranks, size: int, terms: LossTerms) -> None:
    """pitfalls: label smoothing over a rank's part alone; a vocabulary that ranks do not divide, padded."""
    ranks.run(_cross_entropy, size, CHUNKS[size], terms)


def _ignored_not_a_number(mesh) -> None:
    logits = torch.zeros(2, 4)
    logits[1] = torch.nan
    logits.requires_grad_()
    loss = vocabulary.summed_cross_entropy(
        logits, torch.tensor([1, -100]), mesh.group("dp"), first=4 * mesh.rank, vocab_size=8, cause="t"
    )
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(8.0).log())
    assert torch.equal(logits.grad[1], torch.zeros(4))


def test_an_ignored_token_adds_nothing_whatever_its_logits_are(ranks) -> None:
    ranks.run(_ignored_not_a_number, 2)


def _low_precision(mesh) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(6, 40, generator=generator) * 3).bfloat16()
    labels = torch.randint(0, 40, (6,), generator=generator)
    mine = logits.split([30, 10], -1)[mesh.rank].clone().requires_grad_()
    loss = vocabulary.summed_cross_entropy(
        mine, labels, mesh.group("dp"), first=30 * mesh.rank, vocab_size=40, cause="t"
    )
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels, reduction="sum"))
    loss.backward()
    assert mine.grad.dtype == torch.bfloat16


def test_logits_of_16_bits_are_summed_in_float32(ranks) -> None:
    ranks.run(_low_precision, 2)
