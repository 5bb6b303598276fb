"""Masks are functions of key and global index; how good they are, and that no cut or device changes a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshwright.comm import rng
from meshwright.comm.rng import Draw, MicroStep, fold, keep_mask

CPU = torch.device("cpu")
BLOCK = 1 << 16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other on busy cores spin for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _mask(numel: int, key: int = 5, first: int = 0, p: float = 0.1) -> Tensor:
    return keep_mask(numel, key=key, first=first, drop_probability=p, device=CPU)


def _word(key: int, index: int) -> int:
    """The documented hash of one element in Python integers, signed 32 bits."""

    def signed(x: int) -> int:
        return (x + 2**31) % 2**32 - 2**31

    mixed = (key + (index >> 16) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    x = signed((index & 0xFFFF) + mixed % 2**32)
    x = signed((x ^ (x >> 16)) * 0x7FEB352D)
    x = signed((x ^ (x >> 15) ^ signed(mixed >> 32)) * 0x046CA68B)
    return signed((x ^ (x >> 14)) * 0x31848BAB)


@pytest.mark.parametrize("first", [0, BLOCK - 7, 2**32 - 3, 3 * 2**40 + 1])
def test_bits_are_those_of_the_documented_hash(first: int) -> None:
    key, p = 2**63 - 25, 0.37
    expected = [_word(key, first + i) >= round(p * 2**32) - 2**31 for i in range(200)]
    assert _mask(200, key, first, p).tolist() == expected


@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, 5 * BLOCK + 17])
@pytest.mark.parametrize("cut", [1, 1000, BLOCK, 2 * BLOCK + 5])
def test_any_piece_has_the_bits_of_the_whole(first: int, cut: int) -> None:
    whole = _mask(3 * BLOCK, first=first)
    pieces = [_mask(cut, first=first), _mask(3 * BLOCK - cut, first=first + cut)]
    assert torch.equal(torch.cat(pieces), whole)


def test_blocks_hashed_in_one_pass_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _mask(7 * BLOCK + 11, first=BLOCK - 5)
    monkeypatch.setattr(rng, "_CPU_BLOCKS", 3)
    assert torch.equal(_mask(7 * BLOCK + 11, first=BLOCK - 5), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_bits_of_a_cpu() -> None:
    arguments = {"key": 9, "first": BLOCK - 5, "drop_probability": 0.3}
    on_gpu = keep_mask(5 * BLOCK, device=torch.device("cuda"), **arguments)
    assert torch.equal(on_gpu.cpu(), keep_mask(5 * BLOCK, device=CPU, **arguments))


@pytest.mark.parametrize(("p", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_certain_outcomes_are_certain(p: float, share: float) -> None:
    assert float(_mask(BLOCK, p=p).double().mean()) == share


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_the_probability(p: float) -> None:
    numel = 1 << 20
    deviation = (p * (1 - p) / numel) ** 0.5
    assert abs(float((~_mask(numel, p=p)).double().mean()) - p) < 5 * deviation


def _correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of independent masks with p = 0.1."""
    centred = (a.double() - 0.9) * (b.double() - 0.9)
    return float(centred.sum()) / (0.09 * centred.numel() ** 0.5)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 768, BLOCK])
def test_neighbours_are_independent(lag: int) -> None:
    masks = [_mask(1 << 19, key=fold(1, number)) for number in range(8)]
    values = [_correlation(mask[:-lag], mask[lag:]) for mask in masks]
    assert max(map(abs, values)) < 5
    assert abs(sum(values)) < 5 * len(values) ** 0.5


@pytest.mark.parametrize(
    ("key", "other"),
    [
        (fold(1, 2), fold(1, 3)),
        (fold(1, 2), fold(2, 2)),
        (fold(1, 2), fold(2, 1)),
        (7, 8),
        (7, 7 + 2**40),
    ],
    ids=["steps", "seeds", "swapped", "neighbouring keys", "far keys"],
)
def test_keys_give_independent_masks(key: int, other: int) -> None:
    assert abs(_correlation(_mask(1 << 20, key), _mask(1 << 20, other))) < 5


def test_patterns_of_neighbours_are_equally_likely() -> None:
    bits = _mask(1 << 20, p=0.5).view(-1, 8).long()
    counts = torch.bincount((bits << torch.arange(8)).sum(1), minlength=256).double()
    expected = bits.shape[0] / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_a_draw_places_its_elements_in_the_global_tensor() -> None:
    draw = Draw(key=3, first=1000, drop_probability=0.2)
    assert torch.equal(draw.keep(10, 60, CPU), _mask(50, key=3, first=1010, p=0.2))
    assert draw.scale == 1.25


def test_keys_depend_on_seed_and_step_only() -> None:
    here = MicroStep(seed=1, step=2, first_row=0, num_rows=4, total_rows=4)
    there = MicroStep(seed=1, step=2, first_row=6, num_rows=2, total_rows=4)
    assert here.key == there.key
    assert here.is_whole
    assert not there.is_whole
    later = MicroStep(seed=1, step=3, first_row=0, num_rows=4, total_rows=4)
    assert len({here.key, later.key, fold(2, 1)}) == 3
    assert all(0 <= fold(value) < 2**63 for value in (-1, 0, 2**63))


@pytest.mark.parametrize(("num_rows", "first_row"), [(0, 0), (5, 0), (1, -1)])
def test_impossible_places_are_refused(num_rows: int, first_row: int) -> None:
    with pytest.raises(AssertionError, match="row"):
        MicroStep(seed=0, step=0, first_row=first_row, num_rows=num_rows, total_rows=4)
