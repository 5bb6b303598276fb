"""Kernels and their merging: torch's private operator as it is used, large scores, queries that see nothing."""

from __future__ import annotations

import pytest
import torch

from meshwright.context import kernels
from meshwright.context.blocks import Attention, Blocks, Running, pieces, zeros_for
from meshwright.context.kernels import FLASH, WRITTEN_OUT, Block, choose_kernel
from meshwright.context.masks import AttentionMask
from meshwright.layout.sequence import cut_sequence


def _inputs(dtype=torch.float64, keys=7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 5, 6), (2, 2, keys, 6), (2, 2, keys, 6), (2, 4, 5, 6)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def test_the_private_operator_has_the_signature_that_is_called() -> None:
    assert str(kernels._FLASH._schema) == (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    )
    assert str(kernels._FLASH_BACKWARD._schema).startswith(
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor "
        "value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_both_kernels_give_the_same(dtype, masked) -> None:
    """Also of a query that sees no key: output 0, log-sum-exp -inf, no gradient."""
    query, key, value, grad = _inputs(dtype)
    visible = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[1, :, 2] = False
    block = Block(0.4, visible=visible if masked else None)
    (out, lse), (plain, plain_lse) = (k.forward(query, key, value, block) for k in (FLASH, WRITTEN_OUT))
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(out, plain, rtol=limit, atol=limit)
    torch.testing.assert_close(lse, plain_lse.to(lse.dtype), rtol=limit, atol=limit)
    assert bool((lse[1, :, 2] == -torch.inf).all()) == masked
    final = out, lse.masked_fill(lse == -torch.inf, 0.0)
    for ours, theirs in zip(
        *(k.backward(grad, (query, key, value), final, block) for k in (FLASH, WRITTEN_OUT)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
        assert torch.isfinite(ours).all()


def test_merging_takes_the_largest_score_out_of_the_exponentials() -> None:
    """Scores of +-10,000: exp of any of them would be 0 or infinite."""
    query, key, value, _ = _inputs(keys=8)
    query = query * 4000
    call = Attention(AttentionMask(), 8, 1.0)
    running = Running(query, 6)
    for half in (slice(0, 4), slice(4, 8)):
        Blocks(call, ((0, 5),)).forward(
            running, query, key[:, :, half], value[:, :, half], ((half.start, half.stop),)
        )
    out, lse = running.finish()
    scores = query @ key.repeat_interleave(2, 1).mT
    assert scores.abs().max() > 1e4
    torch.testing.assert_close(
        out, scores.softmax(-1) @ value.repeat_interleave(2, 1), rtol=1e-11, atol=1e-11
    )
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=0)


def test_queries_that_see_no_key_at_all_give_zeros_and_no_gradient() -> None:
    query, key, value, grad = _inputs()
    valid = torch.zeros(2, 7, dtype=torch.bool)
    valid[1] = True
    blocks = Blocks(Attention(AttentionMask(valid=valid), 7, 1.0), ((0, 5),))
    running = Running(query, 6)
    blocks.forward(running, query, key, value, ((0, 7),))
    out, lse = running.finish()
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()
    sums = zeros_for(query, key, value)
    blocks.backward(grad, (query, key, value), (out, lse), ((0, 7),), sums)
    assert all(torch.isfinite(total).all() and (total[0] == 0).all() for total in sums)


def test_blocks_that_nothing_counts_in_are_not_computed() -> None:
    """Half of the scores of a causal mask; a window leaves all but a band out."""
    cut = cut_sequence(4096, 4, "ring")

    def scores(mask: AttentionMask) -> list[int]:
        call = Attention(mask, 4096, 1.0)
        return [
            sum(
                (piece.queries.stop - piece.queries.start) * (piece.keys.stop - piece.keys.start)
                // (2 if piece.kind == "causal" else 1)
                for other in range(4)
                for piece in pieces(call, cut.runs(rank), cut.runs(other))
            )
            for rank in range(4)
        ]  # fmt: skip

    assert scores(AttentionMask(is_causal=True)) == [4096**2 // 8] * 4
    assert sum(scores(AttentionMask())) == 4096**2
    assert sum(scores(AttentionMask(is_causal=True, window=64))) < 4096 * (512 + 64)


def test_kernels_are_chosen_by_what_they_take() -> None:
    query, _, value, _ = _inputs()
    assert choose_kernel(query, value, has_dropout=False) is FLASH
    assert choose_kernel(query, value, has_dropout=True) is WRITTEN_OUT
    assert choose_kernel(query, value[..., :3], has_dropout=False) is WRITTEN_OUT
