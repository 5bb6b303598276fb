"""Words of a published row on the software that ran it, and what that software holds in memory.

Owns the words. Each says what code does, and any row can have it; none is the name of who published a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.simulation.job import Attention, Layout


@dataclass(frozen=True)
class Software:
    """Attributes: a row's words in small letters; whether it is torch's FSDP, DeepSpeed, a library of layers for this
    generation of device, compiled; its attention."""

    words: str
    is_fsdp: bool
    is_deepspeed: bool
    is_engine: bool
    is_compiled: bool
    attention: Attention


def software_of(row: Mapping[str, str]) -> Software:
    """What a row says."""
    keys = ("compile_fused_notes", "zero_stage_fsdp", "dtype")
    words = " ".join(row.get(key, "") for key in keys).lower()
    is_fsdp = "fsdp" in words
    is_engine = "transformerengine" in words or words.startswith("te,")
    is_flash = is_fsdp or ("flash" in words and "no flash" not in words) or "torch.compile" in words
    return Software(
        words=words,
        is_fsdp=is_fsdp,
        is_deepspeed="deepspeed" in f"{words} {row.get('schedule', '').lower()}",
        is_engine=is_engine,
        is_compiled="torch.compile" in words.replace("no torch.compile", ""),
        attention="engine" if is_engine else ("flash" if is_flash else "unfused"),
    )


def with_memory(layout: Layout, own: Software) -> Layout:
    """The layout with what its software holds."""
    in_16_bits = "pure" in own.words or (own.is_deepspeed and "fp16" in own.words)
    return replace(
        layout,
        gradient_bytes=2 if in_16_bits or own.is_engine else 4,
        # DeepSpeed's defaults: 5e8 elements in 16 bits for each of two buffers; updates copy gradients.
        optimizer_bytes=16 if own.is_deepspeed else 12,
        bucket_bytes=2 * 10**9 if own.is_deepspeed else 0,
        keeps_outputs=own.is_deepspeed,
        logit_bytes=_logit_bytes(own, is_cut=layout.tp > 1),
        accumulator_bytes=2 if "fp32 grad accumulation" in own.words else 0,
        # Distributed tensors are gathered as they are used.
        keeps_gathered="fsdp2" in own.words or "gathered inputs kept" in own.words,
        # Searched with room for as many micro-batches as there are stages, or twice that.
        keeps={"zb-h1": layout.pp, "zb-h2": 2 * layout.pp}.get(layout.schedule, 0),
        counts_head="stages cut by cost" in own.words,
        holds_stage=own.is_fsdp,
    )


def _logit_bytes(own: Software, *, is_cut: bool) -> int:
    """Of one logit at the peak of its loss, by what its code holds at once: 16 bits, float32, and copies of these.

    torch's own loss: results and gradients of two steps in float32; of distributed tensors that are cut along the
    vocabulary also the shifted logits or their exponentials. A fused loss that reads 16 bits (llm-foundry's) has
    nothing else. Megatron-LM's works in place; DeepSpeed's fork clones.
    """
    if "fsdp2" in own.words:
        return 18 if is_cut else 14
    if own.is_fsdp:
        return 4
    if own.is_engine or own.is_compiled:
        return 6
    return 10 if own.is_deepspeed else 8
