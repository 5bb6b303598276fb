"""One device: what a training step costs in memory and FLOPs, predicted and measured.

Before a model is cut over devices one must know what there is to cut. A step holds weights, gradients, Adam's two
moments and the activations that the backward needs; it executes matrix products. All of it follows from a few
sizes: L layers, width D, N heads, vocabulary V, batch B, sequence S. This lesson predicts each figure by a
formula, runs the step with plain PyTorch, and measures.
Simplification: only matrix products count as FLOPs, and memory that lives for one operation only is left out.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from meshwright.lessons.measuring import activation_bytes, executed_flops, step_seconds, tensor_bytes
from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import bars
from meshwright.models import build_model, initialise
from meshwright.presets import ModelPreset, find_model, matmul_flops_per_token, num_parameters
from meshwright.testing.ranks import RankPool
from meshwright.training.flops import device_peak

BATCH, SEQ_LEN, FLOAT_BYTES = 4, 128, 4


def main() -> None:
    """Run the lesson."""
    torch.manual_seed(0)
    preset = find_model("gpt-nano")
    model = build_model(preset.family, dataclasses.asdict(preset))
    initialise(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(preset.vocab_size, (BATCH, SEQ_LEN + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    sizes = f"L={preset.num_layers} D={preset.dim} N={preset.num_heads} V={preset.vocab_size}"
    print(f"{preset.name} on one device: {sizes}, and B={BATCH} S={SEQ_LEN}\n")
    show_memory(preset, model, optimizer, batch)
    show_flops(preset, model, optimizer, batch)
    print("\n3. The engine on one rank computes this very step as plain PyTorch does:")
    pool = RankPool()
    print(check_parity(pool, "ddp", num_ranks=1).line())
    pool.close()


def show_memory(
    preset: ModelPreset, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> None:
    """Predicted and measured bytes of one step, as a table and as bars."""
    activations = activation_bytes(model, batch)
    optimizer.step()
    n, parameters = num_parameters(preset), list(model.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    rows = {
        "weights": (FLOAT_BYTES * n, tensor_bytes(parameters)),
        "gradients": (FLOAT_BYTES * n, tensor_bytes(p.grad for p in parameters)),
        "Adam moments": (2 * FLOAT_BYTES * n, tensor_bytes(moments)),
        "activations": (predict_activation_bytes(preset), activations),
    }
    print(f"1. Memory. {n:,} parameters; Adam in fp32 keeps four numbers for each, 16 bytes.")
    print(
        "   Activations: 4·B·S·(L·(16·D + N + 4) + 2·D + V + 2). They grow with the batch, the rest does not.\n"
    )
    print(f"  {'bytes':<14}{'predicted':>12}{'measured':>12}")
    for name, (predicted, measured) in rows.items():
        print(f"  {name:<14}{predicted:>12,}{measured:>12,}")
        assert abs(predicted - measured) <= 0.001 * measured, f"{name}: {predicted} is not {measured}"
    print("\n" + bars({name: row[1] / 2**20 for name, row in rows.items()}, unit="MiB", digits=1) + "\n")


def predict_activation_bytes(preset: ModelPreset) -> int:
    """What a backward needs: 16 tensors of width D a block, N log-sums, 4 norm statistics; the end of the model."""
    block = 16 * preset.dim + preset.num_heads + 4
    end = 2 * preset.dim + 2 + preset.vocab_size
    return FLOAT_BYTES * BATCH * SEQ_LEN * (preset.num_layers * block + end)


def show_flops(
    preset: ModelPreset, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> None:
    """Predicted and executed FLOPs of one step, and what share of the peak they reach."""
    predicted = BATCH * SEQ_LEN * matmul_flops_per_token(preset, SEQ_LEN, causal=False)
    executed = executed_flops(model, batch)
    print(
        "2. FLOPs. A multiply-add is two, and backward costs twice the forward: 6 a token for each parameter in"
    )
    print("   a product, and 12·L·D·S a token for the scores of attention.\n")
    print(f"  predicted {predicted:,.0f}   executed {executed:,}")
    assert executed == predicted, "the formula must count what runs"
    seconds, peak = step_seconds(model, optimizer, batch), device_peak(torch.device("cpu"), "fp32")
    assert peak is not None, "the peak of a CPU is measured"
    rate = predicted / seconds
    print(f"  {seconds * 1e3:.0f} ms a step, the optimizer included = {rate / 1e9:.0f} GFLOP/s")
    print(
        f"  MFU = {rate / 1e9:.0f} / {peak.flops_per_second / 1e9:.0f} = {rate / peak.flops_per_second:.0%}"
        f"   ({peak.name})"
    )
