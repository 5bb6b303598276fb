import math

import numpy as np
import pytest
import torch

from meshwright.verification.store import Comparer, Positions, Recorder
from meshwright.verification.tensors import NOISE_FACTOR, Noise, tolerance

BARE = tolerance("fp64", Noise())


def key(name, check="gradients"):
    return (check, 1, -1, name)


@pytest.fixture
def recorded(tmp_path):
    """A file of three gradients of two modules and an activation whose samples are its second dim."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(7, 5, generator=generator, dtype=torch.float64),
        "a.bias": torch.zeros(7, dtype=torch.float64) + 1e-18,
        "b.weight": torch.randn(700, 500, generator=generator, dtype=torch.float64),
    }
    output = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64)
    with Recorder(tmp_path / "file") as recorder:
        for name, tensor in tensors.items():
            recorder.add(key(name), tensor, order=0)
        recorder.add(("activations", 1, 0, "net"), output, order=0, batch_dim=1, rows_per_sample=2)
        return tmp_path / "file", recorder.finish(), {**tensors, "net": output}


def comparer_of(recorded):
    path, items, tensors = recorded
    limits = {"gradients": BARE, "activations": BARE}
    return Comparer(path, items, tolerances=limits, rank=1), tensors


def test_equal_pieces_have_no_difference(recorded):
    comparer, tensors = comparer_of(recorded)
    comparer.compare(key("a.weight"), tensors["a.weight"].flatten()[6:30], start=6)
    comparer.compare(("activations", 1, 0, "net"), tensors["net"][:, 2:6], start=2)
    comparer.compare(key("b.weight"), 3 * tensors["b.weight"], divisor=3.0)
    assert [(s.start, s.stop, s.numel, s.num_wrong) for s in comparer.stats] == [
        (6, 30, 24, 0),
        (2, 6, 48, 0),
        (0, 350_000, 350_000, 0),
    ]
    assert all(stats.largest_error <= 1e-15 for stats in comparer.stats)
    assert all(stats.rank == 1 for stats in comparer.stats)


@pytest.mark.parametrize("place", [0, 17, 349_999])
def test_one_element_off_by_1e_8_of_the_largest_is_wrong(recorded, place):
    comparer, tensors = comparer_of(recorded)
    actual = tensors["b.weight"].flatten().clone()
    actual[place] += 1e-8 * actual.abs().max()
    comparer.compare(key("b.weight"), actual)
    (stats,) = comparer.stats
    assert (stats.num_wrong, stats.first_wrong, stats.last_wrong) == (1, place, place)


def test_a_factor_is_seen_as_one_ratio(recorded):
    comparer, tensors = comparer_of(recorded)
    comparer.compare(key("a.weight"), 2 * tensors["a.weight"])
    (stats,) = comparer.stats
    assert stats.num_wrong == 35
    assert (stats.ratio_low, stats.ratio_high) == (2.0, 2.0)


def test_samples_of_an_output_are_named_by_row(recorded):
    comparer, tensors = comparer_of(recorded)
    actual = tensors["net"][:, 4:8].clone()
    actual[2, 1, 3] += 1.0
    comparer.compare(("activations", 1, 0, "net"), actual, start=4)
    (stats,) = comparer.stats
    assert (stats.first_wrong, stats.last_wrong, stats.num_wrong) == (5, 5, 1)


def test_what_is_no_number_is_wrong(recorded):
    comparer, tensors = comparer_of(recorded)
    actual = tensors["a.weight"].flatten().clone()
    actual[3] = math.nan
    comparer.compare(key("a.weight"), actual)
    (stats,) = comparer.stats
    assert math.isnan(stats.largest_error)
    assert stats.num_wrong == 1


def test_noise_around_zero_is_judged_by_the_module(recorded):
    comparer, tensors = comparer_of(recorded)
    comparer.compare(key("a.bias"), -tensors["a.bias"])
    item = comparer.knows(key("a.bias"))
    (stats,) = comparer.stats
    assert stats.num_wrong == 0
    assert item.scale.module_largest == tensors["a.weight"].abs().max()
    assert BARE.norm_error(item, stats.square_error) < 1e-15


def test_other_shapes_and_unknown_tensors_are_findings(recorded):
    comparer, tensors = comparer_of(recorded)
    comparer.compare(key("a.weight"), torch.zeros(40, dtype=torch.float64))
    comparer.compare(("activations", 1, 0, "net"), tensors["net"][:2], start=0)
    comparer.compare(key("c.weight"), torch.zeros(1))
    problems = [stats.problem for stats in comparer.stats]
    assert problems == [
        "shape (40,) at row 0 does not fit into (35,)",
        "shape (8, 2, 4) at row 0 does not fit into (8, 3, 4)",
        "the reference has no such tensor",
    ]


def test_empty_and_complex_tensors(tmp_path):
    wave = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    with Recorder(tmp_path / "file") as recorder:
        recorder.add(key("empty"), torch.zeros(0, 3), order=0)
        recorder.add(key("wave"), wave, order=0)
        items = recorder.finish()
    comparer = Comparer(tmp_path / "file", items, tolerances={"gradients": BARE}, rank=0)
    comparer.compare(key("empty"), torch.zeros(0, 3))
    comparer.compare(key("wave"), wave.conj())
    empty, conjugate = comparer.stats
    assert (empty.numel, empty.square_error) == (0, 0.0)
    assert (conjugate.numel, conjugate.num_wrong) == (4, 2)


def test_limits_rise_with_measured_noise():
    assert (BARE.norm, BARE.element) == (1e-12, 1e-9)
    noisy = tolerance("fp32", Noise(norm=1e-4, element=2e-4, module=1e-3))
    assert (noisy.norm, noisy.element) == (NOISE_FACTOR * 1e-4, NOISE_FACTOR * 2e-4)
    assert noisy.module == NOISE_FACTOR * 1e-3


def test_a_piece_of_a_sequence_is_compared_without_its_padding() -> None:
    """Of the last rank of a short sequence nothing may be left."""
    whole = np.arange(6.0).reshape(1, 3, 2)
    piece = torch.full((1, 2, 2), -1.0)
    expected, found = Positions(1, (2, 3), 3, 0, 2).of(whole, piece)
    assert (expected.tolist(), found.tolist()) == ([[[4.0, 5.0]]], [[[-1.0, -1.0]]])
    expected, found = Positions(1, (4, 5), 3, 1, 2).of(whole, piece)
    assert (expected.shape, tuple(found.shape)) == ((1, 0, 2), (1, 0, 2))
