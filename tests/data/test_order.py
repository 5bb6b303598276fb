from itertools import pairwise

import numpy as np
import pytest

from meshwright.data.order import sample_ids


@pytest.mark.parametrize("num_samples", [*range(1, 201), 12345])
def test_every_epoch_visits_every_sample_once(num_samples):
    for epoch in (0, 1, 7):
        ids = sample_ids(epoch * num_samples, num_samples, num_samples=num_samples, seed=3)
        assert ids.dtype == np.int64
        assert np.array_equal(np.sort(ids), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 5, 64, 1000, 70_000])
def test_any_cut_of_the_stream_gives_the_same_ids(num_samples):
    whole = sample_ids(0, 2 * num_samples + 3, num_samples=num_samples, seed=11)
    cuts = sorted([0, 1, num_samples // 2, num_samples, num_samples + 1, 2 * num_samples + 3])
    parts = [
        sample_ids(start, stop - start, num_samples=num_samples, seed=11) for start, stop in pairwise(cuts)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_are_different_orders():
    orders = [
        tuple(sample_ids(epoch * 500, 500, num_samples=500, seed=seed))
        for seed in (0, 1, -1)
        for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)


def test_the_order_is_frozen():
    # These ids are what earlier runs were trained on; another order would break every resumed run.
    assert sample_ids(8, 6, num_samples=10, seed=0).tolist() == [6, 3, 3, 4, 1, 7]


def test_order_looks_uniform():
    # Each of 20 slots should hold each of 20 ids about 100 times in 2000 epochs: chi-square with 19^2 degrees
    # of freedom has mean 361 and standard deviation 27.
    ids = sample_ids(0, 20 * 2000, num_samples=20, seed=5).reshape(2000, 20)
    counts = np.stack([np.bincount(ids[:, slot], minlength=20) for slot in range(20)])
    assert np.square(counts - 100).sum() / 100 < 361 + 5 * 27


def test_without_shuffle_the_datasets_order_repeats():
    assert sample_ids(2, 5, num_samples=4, seed=9, shuffle=False).tolist() == [2, 3, 0, 1, 2]


def test_a_vast_dataset_needs_memory_for_the_ids_asked_for_only():
    ids = sample_ids(10**15, 1000, num_samples=10**12, seed=1)
    assert len(set(ids.tolist())) == 1000
    assert ids.min() >= 0
    assert ids.max() < 10**12
    assert ids.max() > 9 * 10**11


@pytest.mark.parametrize(("position", "count", "num_samples"), [(-1, 1, 1), (0, -1, 1), (0, 1, 0)])
def test_impossible_requests_are_refused(position, count, num_samples):
    with pytest.raises(AssertionError, match=r"negative|empty"):
        sample_ids(position, count, num_samples=num_samples, seed=0)
