"""What travels: bytes and operations of every kind as formulas and as the log counts them; memory of a rank ~ S / N."""

from __future__ import annotations

import pytest
import torch

from meshwright.adapt.context_parallel import ContextScope
from meshwright.context import all_gather, ring, ulysses
from meshwright.context.attend import attend, calls_of_attention, two_d_ranks
from meshwright.context.blocks import Attention
from meshwright.context.masks import AttentionMask
from meshwright.layout.sequence import cut_sequence
from meshwright.models import Llama, LlamaConfig, language_model_loss
from meshwright.recompute.live_bytes import LiveBytes
from meshwright.training.sequences import over_sequences


def _issued(mesh, kind, heads, dtype) -> tuple:
    """(calls, bytes) of forward and of backward, and the tensors' parts."""
    group = mesh.group("dp")
    cut = cut_sequence(24, group.size, kind)
    shapes = [
        (2, number, cut.local_length, width)
        for number, width in ((heads[0], 6), (heads[1], 6), (heads[1], 4))
    ]
    query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    found = []
    mesh.log.reset_counters()
    call = Attention(AttentionMask(is_causal=True), 24, 1.0)
    out = attend(query, key, value, call=call, cut=cut, group=group, kind=kind)
    for _ in range(2):
        calls = {op: count for (op, _), count in mesh.log.calls.items() if count}
        found.append((calls, {op: count for (op, _), count in mesh.log.bytes.items() if count}))
        mesh.log.reset_counters()
        if len(found) == 1:
            out.sum().backward()
    return found, (query, key, value), group, cut


def _check(mesh, kind, heads, dtype) -> None:
    found, (query, key, value), group, cut = _issued(mesh, kind, heads, dtype)
    declared = calls_of_attention(kind, group.size, num_heads=heads[0], num_kv_heads=heads[1])
    assert [calls for calls, _ in found] == [dict(calls) for calls in declared]
    sizes = [nbytes for _, nbytes in found]
    if kind == "allgather":
        logged = all_gather.logged_bytes(key, value, group.size)
        assert sizes == [{op: two[i] for op, two in logged.items() if two[i]} for i in range(2)]
    elif kind == "ring":
        assert [nbytes["send"] for nbytes in sizes] == list(ring.sent_bytes(key, value, group.size))
    elif kind == "ulysses":
        sent = ulysses.sent_bytes(
            query, key, value, ulysses.HeadRanks(group, tuple(range(group.size)), group.index)
        )
        if "all_to_all" in sizes[0]:  # the log counts a rank's own block too
            assert [n["all_to_all"] * (group.size - 1) // group.size for n in sizes] == list(sent)
        else:
            assert [nbytes["send"] for nbytes in sizes] == list(sent)
    else:
        ranks, inner = two_d_ranks(cut, group)
        exchanged = ulysses.sent_bytes(query, key, value, ranks)
        spread = ulysses.Heads.of(*heads, ranks.size)
        kv = spread.repeats(ranks.index)
        number = len(kv) if kv is not None else len(spread.kv[ranks.index])
        parts = [x.new_empty(2, number, ranks.size * cut.local_length, x.shape[-1]) for x in (key, value)]
        travelled = ring.sent_bytes(*parts, inner.size)
        assert [nbytes["send"] for nbytes in sizes] == [
            a + b for a, b in zip(exchanged, travelled, strict=True)
        ]


def _check_all(mesh, kinds) -> None:
    for kind in kinds:
        for heads in ((4, 4), (8, 4), (6, 3), (4, 1)):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                _check(mesh, kind, heads, dtype)


@pytest.mark.parametrize(
    ("size", "kinds"), [(2, ("ring", "ulysses", "allgather")), (4, ("ring", "ulysses", "2d"))]
)
def test_bytes_are_those_of_the_formulas(ranks, size, kinds) -> None:
    """Uneven and repeated heads, values of another width, sums of 16-bit gradients in float32."""
    ranks.run(_check_all, size, kinds)


def _peak(mesh, length: int, kind: str) -> int:
    """Bytes that a forward and backward have at once besides weights, gradients and the batch."""
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 64}
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=64, max_seq_len=length, **sizes))
    tokens = torch.randint(64, (1, length))
    batch = {"tokens": tokens, "labels": tokens}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), tokens]
    loss = over_sequences(language_model_loss, ContextScope(mesh.group("dp"), kind))
    with LiveBytes(known) as meter:
        loss(model, batch)[0].backward()
    return meter.peak


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["ring", "ulysses", "allgather"])
def test_activation_memory_is_proportional_to_the_slice(ranks, kind) -> None:
    """S = 1k .. 16k on 1, 2 and 4 ranks: bytes / (S / N) are one number, but for gathered keys."""
    rates = {}
    for size in (1, 2, 4):
        for length in (1024, 4096, 16384):
            peaks = ranks.run(_peak, size, length, kind, timeout=300.0)
            rates[size, length] = max(peaks) / (length / size)
    base = rates[1, 16384]
    print({key: round(rate / base, 3) for key, rate in rates.items()})
    allowed = 1.35 if kind == "allgather" else 1.1
    assert all(0.9 < rate / base < allowed for rate in rates.values()), rates
