"""Where a batch is cut for context parallelism: every token once, labels shifted before, padding never valid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.adapt.context_parallel import ContextScope
from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group
from meshwright.errors import PlanError
from meshwright.layout.sequence import cut_sequence
from meshwright.models.hf_loss import next_token_labels
from meshwright.training.sequences import cut_batch, over_sequences, padding_warning

LENGTH = 11


def _batch() -> dict[str, Tensor]:
    ids = torch.arange(1, 1 + 2 * LENGTH).view(2, LENGTH)
    return {"input_ids": ids, "weights": torch.rand(2, LENGTH, 3), "number": torch.arange(2)}


@pytest.mark.parametrize(("kind", "size"), [("ring", 3), ("ulysses", 2), ("2d", 4)])
def test_labels_are_shifted_before_the_cut(kind, size) -> None:
    """Put together again, slices are the whole; what a slice's last token predicts is in the next slice."""
    batch = _batch() | {"labels": _batch()["input_ids"].clone().fill_(5)}
    cut = cut_sequence(LENGTH, size, kind)
    whole = next_token_labels(batch)
    found = torch.full((2, cut.padded), -7)
    for rank in range(size):
        part, place = cut_batch(batch, cut, rank)
        places = [p for start, stop in cut.runs(rank) for p in range(start, stop)]
        found[:, places] = part["shift_labels"]
        known = torch.tensor([p < LENGTH for p in places])
        assert torch.equal(part["position_ids"][0, known], torch.tensor(places)[known])
        assert torch.equal(part["input_ids"][:, known], batch["input_ids"][:, torch.tensor(places)[known]])
        assert torch.equal(part["weights"][:, known], batch["weights"][:, torch.tensor(places)[known]])
        assert torch.equal(part["number"], batch["number"])
        assert (place.documents, place.valid) == (None, None)
    assert torch.equal(found[:, :LENGTH], whole)
    assert (found[:, LENGTH:] == -100).all()


def test_documents_and_padding_are_those_of_whole_sequences() -> None:
    cut = cut_sequence(LENGTH, 2, "ring")
    begins = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)])
    part, place = cut_batch(_batch() | {"position_ids": begins.expand(2, -1)}, cut, 1)
    assert place.documents is not None
    assert place.documents[0].tolist() == [0] * 4 + [1] * (LENGTH - 4)
    assert (
        part["position_ids"].tolist()
        == [begins[[p for a, b in cut.runs(1) for p in range(a, b)]].tolist()] * 2
    )
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    assert cut_batch(_batch() | {"attention_mask": mask}, cut, 0)[1].valid is None
    mask[1, 7:] = 0
    part, place = cut_batch(_batch() | {"attention_mask": mask}, cut, 0)
    assert place.valid is not None
    assert place.valid.sum(1).tolist() == [LENGTH, 7]
    assert "attention_mask" not in part


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    cut = cut_sequence(LENGTH, 2, "ring")
    refused = {
        "E251 plan.cp cuts sequences, and a batch (inputs) has none": {"inputs": torch.zeros(2, 3)},
        "E251 plan.cp cuts sequences of 11 positions, and labels have shape (2,)": _batch()
        | {"labels": torch.zeros(2)},
        "E250 plan.cp > 1: an attention_mask of shape (2, 1, 11, 11)": _batch()
        | {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)},
    }
    for text, batch in refused.items():
        with pytest.raises(PlanError) as caught:
            cut_batch(batch, cut, 0)
        assert f"{caught.value.code} {caught.value.message}".startswith(text)


def test_a_loss_that_shifts_labels_once_more_is_refused() -> None:
    """Labels counted in a slice must be those of its positions: shifted inside, each slice loses one."""

    class Scope(ContextScope):
        def forward(self, place):
            self.num_calls = 1
            return self.entered()

    scope = Scope(Group("cp", (0, 1), 0, None, CommLog()), "ring")
    batch = {"tokens": torch.zeros(2, 8, dtype=torch.long), "labels": torch.ones(2, 8, dtype=torch.long)}

    def shifts(_model, part):
        return torch.zeros(()), (part["labels"][:, 1:] != -100).sum()

    with pytest.raises(PlanError) as caught:
        over_sequences(shifts, scope)(None, batch)
    assert caught.value.code == "E251"
    assert "the loss counted 6 of 8 labels of this rank's positions: it shifts them" in caught.value.message
    total, count = over_sequences(lambda _m, part: (torch.zeros(()), part["labels"].numel()), scope)(
        None, batch
    )
    assert (float(total), count) == (0.0, 8)


def test_padding_is_said_with_its_numbers() -> None:
    assert padding_warning(8200, 8, "ring") == (
        "W204 cp=8 pads seq_len 8,200 to 8,208 (8 padded tokens a sequence, never counted as valid)"
    )
    assert padding_warning(8192, 8, "ring") is None
    assert padding_warning(8200, 8, "ulysses") is None
