"""plan.tp of models that no table knows, through real processes, is one device."""

from __future__ import annotations

import pytest

import meshwright
from tests.parity.cover import as_cases, pairwise
from tests.verification.handmade import (
    SEQUENCE,
    VOCABULARY,
    Layers,
    Nano,
    loss_of_logits,
    make_bert,
    make_gpt2,
    make_hf_llama,
    make_t5,
)
from tests.verification.models import Tokens

SUBJECTS = {
    "nano": Nano,
    "nano gated": lambda: Nano(gated=True),
    "nano dropout": lambda: Nano(0.3),
    "gpt2": make_gpt2,
    "gpt2 dropout": lambda: make_gpt2(0.3),
    "bert": make_bert,
    "t5": make_t5,
    "layers": Layers,
    "llama": make_hf_llama,
    "qwen3": lambda: make_hf_llama("Qwen3"),
}
FACTORS = {
    "subject": list(SUBJECTS),
    "tp": [2, 3, 4],
    "way": ["pairs", "tokens"],
    "zero": [0, 1, 2, 3],
    "transport": ["gloo", "shm"],
}
# Two chains of blocks, or none: tokens are not cut.
WITHOUT_CHAIN = ("t5", "layers")
CASES = as_cases(
    [
        {"subject": "nano dropout", "tp": 3, "way": "tokens", "zero": 3, "transport": "shm"},
        *(c for c in pairwise(FACTORS) if c["way"] == "pairs" or c["subject"] not in WITHOUT_CHAIN),
        *({"subject": s, "tp": 2, "way": "pairs", "zero": 1, "transport": "shm"} for s in WITHOUT_CHAIN),
    ],
    num_default=1,
)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Tiny models wait for threads longer than they compute."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("case", CASES)
def test_a_derived_layout_is_one_device(case):
    """With dp 2 where that leaves at most 4 processes."""
    processes = case["tp"] * (2 if case["tp"] <= 2 else 1)
    result = meshwright.verify(
        SUBJECTS[case["subject"]],
        loss_of_logits,
        Tokens(VOCABULARY, SEQUENCE),
        plan=f"tp={case['tp']},zero={case['zero']},transport={case['transport']},bucket_bytes=4096 bytes"
        + (",sequence_parallel=true" if case["way"] == "tokens" else ""),
        processes=processes,
        steps=2,
        layout={"*": "derived"},
    )
    assert result.ok, result.table()
    assert max(found.worst_relative for found in result.checks) < 1e-12
    assert result.check("counts").compared > 0
    assert result.check("activations").compared > 0


@pytest.mark.parity
def test_nothing_need_be_said_of_a_model_that_no_table_knows():
    result = meshwright.verify(
        make_gpt2, loss_of_logits, Tokens(VOCABULARY, SEQUENCE), plan="tp=2,zero=1", processes=4, steps=2
    )
    assert result.ok, result.table()
