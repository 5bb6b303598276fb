"""The index law: which global stream positions each micro-step of each data-parallel rank holds.

Owns the arithmetic only. Must not know the sample order, tensors or process groups. First the global batch is
cut into micro-steps, only then each micro-step over the data-parallel ranks; so what one micro-step holds
never depends on the mesh. Model-parallel ranks (tp, pp, cp) share their `dp_rank` and read the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchGeometry:
    """How a global batch is cut for one rank.

    Attributes:
        global_batch: samples per optimizer step, over all ranks.
        num_microbatches: micro-steps per optimizer step; divides `global_batch`.
        dp_size: data-parallel ranks (dp_replicate x dp_shard).
        dp_rank: index of this rank among them.
        first_sample: stream position of step 0; not 0 where a run goes on with another global batch than it had.
    """

    global_batch: int
    num_microbatches: int = 1
    dp_size: int = 1
    dp_rank: int = 0
    first_sample: int = 0

    def start_of(self, step: int) -> int:
        """Global stream position of the first sample of `step`."""
        return self.first_sample + step * self.global_batch

    def rank_range(self, step: int, microbatch: int) -> range:
        """Global stream positions that this rank reads in one micro-step; see `rank_range`."""
        part = rank_range(
            step,
            microbatch,
            global_batch=self.global_batch,
            num_microbatches=self.num_microbatches,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
        )
        return range(self.first_sample + part.start, self.first_sample + part.stop)


def rank_range(
    step: int, microbatch: int, *, global_batch: int, num_microbatches: int, dp_size: int, dp_rank: int
) -> range:
    """Global stream positions that data-parallel rank `dp_rank` reads in one micro-step.

    With m micro-steps and global batch B, micro-step k of step s holds the positions
    [sB + kB/m, sB + (k+1)B/m); its dp ranks take consecutive parts of it. Where dp does not divide B/m the
    first ranks take one sample more, and with fewer samples than ranks the last ranks take none.

    Args:
        step: optimizer step, 0 is the first.
        microbatch: micro-step k of 0 .. num_microbatches - 1.
        global_batch: B, in samples.
        num_microbatches: m, divides B.
        dp_size: number of data-parallel ranks.
        dp_rank: index of the rank among them.
    """
    assert global_batch % num_microbatches == 0, (
        f"num_microbatches={num_microbatches} must divide global_batch={global_batch}"
    )
    assert 0 <= microbatch < num_microbatches, f"micro-step {microbatch} is outside 0..{num_microbatches - 1}"
    assert step >= 0, f"step {step} is negative"
    micro_size = global_batch // num_microbatches
    part = even_part(micro_size, dp_size, dp_rank)
    first = step * global_batch + microbatch * micro_size
    return range(first + part.start, first + part.stop)


def even_part(count: int, num_parts: int, index: int) -> range:
    """Part `index` of 0 .. count - 1 cut into consecutive parts; the first parts take one more."""
    assert 0 <= index < num_parts, f"part {index} is outside 0..{num_parts - 1}"
    size, extra = divmod(count, num_parts)
    start = index * size + min(index, extra)
    return range(start, start + size + (index < extra))
