"""Pairs of `ledger.py`: each was wrong before the ledger knew what the comment says; `make parity` has them all."""

from __future__ import annotations

import pytest

from tests.parity.ledger import BOUND, Pair, measure, ratios

FEW = [
    Pair(
        "ResNet-50, narrow", 3, "fp32", "every:2"
    ),  # statistics over ranks; receive buffers are no activations
    Pair("torch's encoder, checkpoints", 1, "fp32", "none"),  # a layer without gradients; masks in the making
    Pair("Llama", 3, "fp32", "constant"),  # three blocks gathered at once
    Pair("convolutions, dropout", 0, "fp32", "budget:1 MiB"),  # momentum None: the counter is a value
]


@pytest.mark.parametrize("pair", FEW, ids=str)
def test_what_is_predicted_is_measured(ranks, pair: Pair) -> None:
    ledger = measure(ranks, pair)
    assert not ledger.unknown
    for category, ratio in ratios(ledger).items():
        assert ratio == pytest.approx(1, abs=BOUND), f"{category}: {ledger.line()}"
