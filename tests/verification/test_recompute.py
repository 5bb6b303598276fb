"""plan.recompute under every sharding policy computes what one device does, with the collectives that are declared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright.errors import PlanError
from tests.parity.cover import as_cases, pairwise
from tests.verification.models import Rows, Tokens, loss_of_labels
from tests.verification.test_verify import language_model_loss, make_gpt


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(dim), nn.Linear(dim, dim), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Blocks(nn.Module):
    """Batch statistics and dropout in repeated blocks, and a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        width = Rows()[0]["x"].shape[-1]
        self.blocks = nn.ModuleList(Block(width) for _ in range(5))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SUBJECTS = {
    "blocks": (Blocks, loss_of_labels, Rows()),
    "gpt": (make_gpt, language_model_loss, Tokens(31, 7)),
}
FACTORS = {
    "subject": list(SUBJECTS),
    "zero": [0, 1, 2, 3],
    "processes": [1, 2, 3],
    "recompute": ["full", "every:2", "constant", "selective", "offload"],
    "precision": ["fp64", "bf16"],
}
CASES = as_cases(pairwise(FACTORS), num_default=5)


@pytest.mark.parametrize("case", CASES)
def test_what_runs_again_changes_nothing(case, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    build, loss, data = SUBJECTS[case["subject"]]
    result = meshwright.verify(
        build,
        loss,
        data,
        plan=f"zero={case['zero']},recompute={case['recompute']},bucket_bytes=4096 bytes",
        processes=case["processes"],
        precision=case["precision"],
        resume=False,
    )
    assert result.ok, result.table()
    assert f"recompute {case['recompute']}" in result.candidate


@pytest.mark.parity
def test_patterns_under_zero3() -> None:
    plan = 'zero=3,recompute={"blocks.0" = "none", "blocks.[1-3]" = "every:2", "*.norm" = "full"}'
    result = meshwright.verify(Blocks, loss_of_labels, Rows(), plan=plan, processes=2, resume=False)
    assert result.ok, result.table()


@pytest.mark.parametrize(
    ("plan", "processes"),
    [
        ("transport=shm,zero=3,recompute=every:2", 2),
        ("transport=gloo,zero=3,recompute=selective:tanh+dropout+linear+batch_norm", 2),
        pytest.param("sync=parameter_server,recompute=full", 3, marks=pytest.mark.parity),
        pytest.param("sync=parameter_server,servers=2,recompute=constant", 4, marks=pytest.mark.parity),
        pytest.param("transport=shm,zero=2,recompute=constant", 3, marks=pytest.mark.parity),
        pytest.param("transport=shm,zero=3,recompute=full", 2, marks=pytest.mark.parity),
    ],
)
def test_on_other_transports_and_with_servers(plan: str, processes: int, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = meshwright.verify(
        Blocks, loss_of_labels, Rows(), plan=plan, processes=processes, steps=2, resume=False
    )
    assert result.ok, result.table()


def gpt2_that_checkpoints() -> nn.Module:
    """A model of transformers whose own gradient checkpointing is on."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 31}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of_logits(model, batch):
    logits = model(input_ids=batch["tokens"]).logits
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (batch["labels"] != -100).sum()


@pytest.mark.parity
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("word", ["full", "every:2", "constant", "selective"])
def test_around_a_models_own_checkpoints(zero: int, word: str, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = meshwright.verify(
        gpt2_that_checkpoints,
        loss_of_logits,
        Tokens(31, 7),
        plan=f"zero={zero},recompute={word}",
        processes=2,
        steps=2,
        resume=False,
    )
    assert result.ok, result.table()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match="is for repeated blocks"):
        meshwright.verify(
            lambda: nn.Linear(6, 5), loss_of_labels, Rows(), plan="recompute=full", processes=2, resume=False
        )
