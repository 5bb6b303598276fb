"""Recomputation: keep fewer activations, run layers again in backward.

What forward saves for backward grows with batch, sequence and depth. A layer whose input alone is kept can run once
more when its backward comes: memory is bought with time. How much of either is a choice: every layer, every k-th,
attention only, nothing but the first input, or the fastest way that fits. The result is the same to the bit.
Simplification: the third part runs on paper, in units of a layer's forward and its output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.layout.recompute import parse_recompute
from meshwright.lessons.measuring import executed_flops
from meshwright.lessons.parity import check_parity
from meshwright.lessons.pictures import bars
from meshwright.models import GPT, GPTConfig
from meshwright.partitioning.checkpointing import Layer, cost_of, optimal
from meshwright.presets import find_model
from meshwright.recompute.install import install
from meshwright.recompute.live_bytes import LiveBytes
from meshwright.simulation.memory import layer_activation_bytes
from meshwright.testing.ranks import RankPool

BATCH, SEQ, DIM, DEPTH, KIB = 2, 32, 32, 16, 1024
WORDS = ("none", "selective", "full")


def main() -> None:
    """Run the lesson."""
    gpt3, s = find_model("gpt3-175b"), 2048
    print(f"1. A layer of {gpt3.name} keeps 34·s·b·h + 5·a·s²·b bytes in 16 bits: s={s}, b=1. MiB:\n")
    layer = {w: layer_activation_bytes(gpt3, seq_len=s, micro_batch=1, kept=w) / 2**20 for w in WORDS}  # type: ignore[arg-type]
    print(bars(layer, unit="MiB"))
    print("  Scores and weights of attention are most of it, and cheap to compute again: selective.\n")

    print(f"2. {DEPTH} layers that save as much as they are given, measured. every:k keeps N/k inputs and")
    print("   makes one part anew at a time: N/k + k, least at k = √N. full is every:1.\n")
    plain, *rest = (measure("none"), *(measure(f"every:{k}") for k in (1, 2, 4, 8, 16)))
    peaks = {"none": plain[1]} | {f"k = {2**i}": row[1] for i, row in enumerate(rest)}
    print(bars({name: peak / KIB for name, peak in peaks.items()}, unit="KiB at the peak"))
    assert min(peaks, key=peaks.__getitem__) == "k = 4"
    print(f"  Forwards of layers: {plain[2]}, and {rest[0][2]} with any k. A GPT block saves 17 times its")
    print("  input: there N/k + 17·k is least at k = 1 until N is large.\n")
    print("   constant keeps the first input, whatever the depth, and runs N + N(N+1)/2 forwards:\n")
    for depth in (2, 4, 8, 16):
        kept, _, forwards = measure("constant", depth)
        assert forwards == depth + depth * (depth + 1) // 2
        print(f"  N = {depth:2}: {kept / KIB:.0f} KiB kept beside it, {forwards:3} forwards")

    print("\n3. The fastest way that fits: 8 layers, forward 1, backward 2, output 1, saved 3. By limit:\n")
    chain = [Layer(1, 2, 1, 3)] * 8
    for limit in (6, 7, 8, 10, 14, 18, 22, 26):
        schedule = optimal(chain, input_bytes=1, limit=limit, slots=limit, rules="rotor")
        assert schedule is not None
        cost = cost_of(schedule, chain, input_bytes=1)
        print(bars({f"{limit:2}": cost.seconds, "": 52}).splitlines()[0] + f"   {schedule}")

    print("\n4. MFU counts the FLOPs of the model, HFU those that were executed. HFU / MFU:\n")
    flops = {word: executed_flops(make(word), batch()) for word in WORDS}
    shares = {word: flops[word] / flops["none"] for word in WORDS}
    print(bars(shares, digits=3))
    assert 1 < shares["selective"] < shares["full"] < 4 / 3
    print("  A model that runs again what it need not shows a higher HFU and a lower speed.\n")

    print("5. The law: a block runs again where its gradients are due, and nothing else changes.\n")
    pool = RankPool()
    for policy, word in (("ddp", "full"), ("zero3", "constant")):
        print(check_parity(pool, policy, num_ranks=2, num_microbatches=2, recompute=word).line())
    pool.close()


def make(word: str, depth: int = DEPTH) -> nn.Module:
    """A small GPT of `depth` blocks that keeps what `word` says."""
    sizes = {"num_layers": depth, "dim": DIM, "num_heads": 4, "ffn_dim": 4 * DIM, "vocab_size": 64}
    model = GPT(GPTConfig(**sizes, max_seq_len=SEQ))  # type: ignore[arg-type]
    install(model, parse_recompute(word))
    return model


def batch() -> dict[str, Tensor]:
    """Tokens that predict themselves."""
    return dict.fromkeys(("tokens", "labels"), torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 64)


def measure(word: str, depth: int = DEPTH) -> tuple[int, int, int]:
    """Bytes that layers keep, bytes at the peak, and forwards of layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(depth)))
    installed = install(layers, parse_recompute(word))
    x = torch.randn(16 * SEQ, DIM, requires_grad=True)
    with LiveBytes([x, *layers.parameters()]) as meter:
        result = layers(x)
        kept = meter.total - result.nbytes
        torch.autograd.grad(result.sum(), x)
    reruns = sum(sum(recomputer.reruns.values()) for recomputer in installed.recomputers)
    return kept, meter.peak, depth + reruns
