"""FLOPs counted from execution equal the preset's formula; attention on CPUs counts."""

import dataclasses

import pytest
import torch
from torch import nn

from meshwright.models.build import build_model
from meshwright.models.loss import language_model_loss
from meshwright.presets import find_model, matmul_flops_per_token
from meshwright.training.flops import FlopsPerSample, count_flops, count_flops_by_graph, device_peak

SEQ = 16


def _samples(vocab_size: int, count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(vocab_size, (count, SEQ), generator=torch.Generator().manual_seed(0))
    return [{"tokens": row, "labels": row} for row in tokens]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "gpt-nano",
            {
                "num_layers": 3,
                "dim": 24,
                "num_heads": 4,
                "ffn_dim": 100,
                "vocab_size": 61,
                "max_seq_len": SEQ,
            },
        ),
        (
            "llama-nano",
            {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 50, "vocab_size": 61},
        ),
    ],
)
@pytest.mark.parametrize("num_samples", [1, 3])
def test_counted_flops_are_the_formula_with_full_attention(name: str, changes, num_samples: int) -> None:
    preset = find_model(name).with_changes(**changes)
    model = build_model(preset.family, dataclasses.asdict(preset))
    counted = count_flops(model, language_model_loss, _samples(preset.vocab_size, num_samples))
    assert counted.full == SEQ * matmul_flops_per_token(preset, SEQ, causal=False)
    assert counted.causal == counted.full  # from execution alone the mask is not known


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_on_cpus_is_not_zero() -> None:
    sample = torch.ones(2, SEQ, 8)  # heads, sequence, width
    counted = count_flops(_Attention(), lambda model, batch: (model(batch).sum(), 1), [sample])
    forward = 2 * 2 * 2 * SEQ * SEQ * 8  # two products, multiply-add, heads
    assert counted == FlopsPerSample(3.0 * forward, 3.0 * forward)


def test_counting_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    samples = [torch.ones(4), torch.zeros(4)]
    counted = count_flops(model, lambda model, batch: (model(batch).sum(), 1), samples)
    assert counted.full == 3 * 2 * 4 * 4
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_peak_of_a_cpu_process_is_measured_and_named() -> None:
    peak = device_peak(torch.device("cpu"), "fp32")
    assert peak is not None
    assert peak.flops_per_second > 1e8
    assert peak.name.startswith("measured 1024³ fp32 matmul on ")


def test_a_model_on_meta_is_counted_by_its_graph_causal_attention_too() -> None:
    sizes = {"num_layers": 2, "dim": 24, "num_heads": 4, "ffn_dim": 100, "vocab_size": 61, "max_seq_len": SEQ}
    preset = find_model("gpt-nano").with_changes(**sizes)
    with torch.device("meta"):
        model = build_model(preset.family, dataclasses.asdict(preset))
    counted = count_flops_by_graph(model, language_model_loss, _samples(preset.vocab_size, 2))
    assert counted == FlopsPerSample(
        SEQ * matmul_flops_per_token(preset, SEQ, causal=False),
        SEQ * matmul_flops_per_token(preset, SEQ, causal=True),
    )
    assert (
        count_flops_by_graph(
            model, lambda model, batch: float(model(batch["tokens"]).sum()), [{"tokens": torch.ones(4)}]
        )
        is None
    )
