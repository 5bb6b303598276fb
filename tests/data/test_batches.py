import itertools
from itertools import chain

import pytest
import torch

from meshwright.data.batches import Batches, heldout_batches
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import ConfigError, PlanError


class Numbers:
    """Sample i is the number i: a batch shows which samples it holds."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return {"id": torch.tensor(index)}


def micro_steps(dp_size, *, num_microbatches, steps=range(4), seed=5):
    """Samples of each micro-step over all ranks, in rank order."""
    ranks = [
        Batches(Numbers(50), BatchGeometry(24, num_microbatches, dp_size, dp_rank), seed=seed)
        for dp_rank in range(dp_size)
    ]
    return [
        torch.cat([rank.micro_batch(step, k)["id"] for rank in ranks]).tolist()
        for step in steps
        for k in range(num_microbatches)
    ]


def flat(micro_steps):
    return list(chain.from_iterable(micro_steps))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("dp_size", [2, 3, 4, 5, 8])
def test_micro_steps_do_not_depend_on_the_number_of_ranks(dp_size, num_microbatches):
    assert micro_steps(dp_size, num_microbatches=num_microbatches) == micro_steps(
        1, num_microbatches=num_microbatches
    )


def test_the_stream_does_not_depend_on_accumulation_and_covers_each_epoch():
    stream = flat(micro_steps(1, num_microbatches=1, steps=range(5)))
    assert stream == flat(micro_steps(4, num_microbatches=3, steps=range(5)))
    assert sorted(stream[:50]) == sorted(stream[50:100]) == list(range(50))
    assert stream[:50] != stream[50:100]
    assert stream != flat(micro_steps(1, num_microbatches=1, steps=range(5), seed=6))


def test_a_step_needs_nothing_from_the_steps_before():
    assert micro_steps(2, num_microbatches=2, steps=[3]) == micro_steps(2, num_microbatches=2)[-2:]


def test_batches_without_shuffle_and_their_position():
    batches = Batches(Numbers(10), BatchGeometry(4, 2), seed=0, shuffle=False)
    assert batches.micro_batch(2, 1)["id"].tolist() == [0, 1]
    assert batches.sample_ids(1, 0).tolist() == [4, 5]
    assert batches.position_after(2) == 12


def test_an_empty_dataset_is_named():
    with pytest.raises(ConfigError, match=r"^E105 the dataset has 0 samples"):
        Batches(Numbers(0), BatchGeometry(1), seed=0)


@pytest.mark.parametrize(
    ("geometry", "nearest"),
    [(BatchGeometry(100, 3, 4), "99, 102"), (BatchGeometry(6, 2, 4), "8"), (BatchGeometry(3, 1, 4), "4")],
)
def test_batches_that_cannot_be_cut_are_named(geometry, nearest):
    with pytest.raises(
        PlanError, match=rf"^E203 train\.global_batch={geometry.global_batch} .*can: {nearest}\."
    ):
        Batches(Numbers(10), geometry, seed=0)


@pytest.mark.parametrize("num_samples", [8, 20, 37, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_evaluation_sees_each_sample_once_on_every_mesh(num_samples, batch_size):
    chosen = None
    for dp_size in (1, 2, 3, 8):
        ranks = [
            list(
                heldout_batches(
                    Numbers(60), num_samples, batch_size=batch_size, dp_size=dp_size, dp_rank=rank
                )
            )
            for rank in range(dp_size)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        sizes = [len(batch["id"]) for batches in ranks for batch in batches]
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size + (min(num_samples, 60) % dp_size != 0)
        ids = [int(sample) for together in zip(*ranks, strict=True) for b in together for sample in b["id"]]
        assert len(ids) == len(set(ids)) == min(num_samples, 60)
        chosen = chosen or ids
        assert ids == chosen


def test_places_with_unlike_numbers_of_ranks_evaluate_the_same_batches():
    """17 samples on 1, 2 or 3 ranks: the same batches, each cut over the ranks of its place."""
    found = []
    for dp_size in (1, 2, 3):
        ranks = [
            [
                batch["id"].tolist()
                for batch in heldout_batches(
                    Numbers(60), 17, batch_size=2, dp_size=dp_size, dp_rank=rank, most_ranks=3
                )
            ]
            for rank in range(dp_size)
        ]
        found.append([[*itertools.chain(*together)] for together in zip(*ranks, strict=True)])
        assert all(batch for rank in ranks for batch in rank)
    assert found[0] == found[1] == found[2]
    assert [len(batch) for batch in found[0]] == [6, 6, 5]


def test_evaluation_samples_are_spread_over_the_split():
    ids = next(heldout_batches(Numbers(10_000), 100, batch_size=100))["id"]
    assert ids.min() < 1000
    assert ids.max() > 9000


def test_evaluation_with_fewer_samples_than_ranks_is_named():
    with pytest.raises(
        ConfigError, match=r"^E105 evaluation has 3 held-out samples for 4 .*train\.eval_samples"
    ):
        heldout_batches(Numbers(3), 100, batch_size=1, dp_size=4)
