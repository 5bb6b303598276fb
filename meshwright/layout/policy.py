"""Sharding policies: the rows of the bucket engine's table. Engine, tests and simulator read the same row.

| policy | before use | after use | gradient ready | last micro-batch | after step |
|---|---|---|---|---|---|
| ddp | - | - | accumulate | all_reduce | - |
| zero1 | - | - | accumulate | reduce_scatter | all_gather |
| zero2 | - | - | reduce_scatter | - | all_gather |
| zero3 | all_gather | free | reduce_scatter | - | - |
| parameter_server | - | - | accumulate | reduce to servers | broadcast from servers |

The last row is what `plan.sync = "parameter_server"` makes of ddp: whole ownership whose owners are the server ranks
only. Two things vary every other sharding row. `ownership = "whole"` puts `reduce` (to the owner) in the place of
reduce_scatter and `broadcast` (from the owner) in the place of all_gather. Where a mesh has several copies
(dp_replicate; zero3 is then called hsdp), the row holds within each copy, and gradient shards are summed over copies
after the last micro-batch.

Sources: DDP, VLDB 2020 (arXiv 2006.15704); ZeRO (arXiv 1910.02054); FSDP and hybrid sharding (arXiv 2304.11277).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.errors import PlanError

DEFAULT_BUCKET_BYTES = 25 << 20
Ownership = Literal["flat", "whole"]


@dataclass(frozen=True)
class ShardingPolicy:
    """When the bucket engine communicates, and what each rank keeps.

    Attributes:
        name: `ddp`, `zero1`, `zero2`, `zero3` or `parameter_server`.
        before_use: what a module's use of its weights asks for.
        after_use: what happens to gathered weights once the module has run.
        gradient_ready: `accumulate` adds to the full local gradient; `reduce_scatter` sums over the ranks at
            once and adds to the shard.
        last_microbatch: the reduction of accumulated gradients, once a step.
        after_step: how updated weights reach the ranks that do not own them.
        keep_last: keep one unit gathered between forward and backward (the root where it holds parameters, else
            the last block): 2U-1 gathers a micro-batch instead of 2U.
        bucket_bytes: target size of a bucket of `ddp`, `zero1`, `zero2`; zero3 makes one bucket a module.
        alignment_numel: elements to which every parameter's start is rounded up in a bucket (64 bytes of fp32:
            a vector register, and what tensor cores ask for).
        ownership: `flat` cuts shards anywhere; `whole` gives every parameter to one rank: its gradient is reduced to
            that owner, and its weights are broadcast from there.
    """

    name: str
    before_use: Literal["all_gather"] | None
    after_use: Literal["free"] | None
    gradient_ready: Literal["accumulate", "reduce_scatter"]
    last_microbatch: Literal["all_reduce", "reduce_scatter"] | None
    after_step: Literal["all_gather"] | None
    keep_last: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    alignment_numel: int = 16
    ownership: Ownership = "flat"

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank updates only its own part of the parameters."""
        return self.last_microbatch != "all_reduce"

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its own part of the gradients between micro-batches."""
        return self.gradient_ready == "reduce_scatter"

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps only its own part of the parameters between uses."""
        return self.before_use == "all_gather"


_ROWS = (
    # Smaller buckets leave less of the last all-reduce behind the end of the backward (docs/decisions/006).
    ShardingPolicy("ddp", None, None, "accumulate", "all_reduce", None, bucket_bytes=8 << 20),
    ShardingPolicy("zero1", None, None, "accumulate", "reduce_scatter", "all_gather"),
    ShardingPolicy("zero2", None, None, "reduce_scatter", None, "all_gather"),
    ShardingPolicy("zero3", "all_gather", "free", "reduce_scatter", None, None),
)
# What plan.zero may name.
POLICY_NAMES = tuple(row.name for row in _ROWS)
_SERVER_ROW = ShardingPolicy(
    "parameter_server", None, None, "accumulate", "reduce_scatter", "all_gather", ownership="whole"
)
_ALIASES = {"fsdp": "zero3", "zero0": "ddp"}


def find_policy(
    name: str | int, *, bucket_bytes: int | None = None, ownership: Ownership = "flat"
) -> ShardingPolicy:
    """The policy called `name` (`ddp`, `zero1` ...), or of ZeRO stage `name` (0..3).

    Servers own whole parameters, whatever `ownership` says.

    Raises:
        PlanError: E204 for an unknown name.
    """
    wanted = f"zero{name}" if isinstance(name, int) or name.isdigit() else name.lower()
    wanted = _ALIASES.get(wanted, wanted)
    for row in (*_ROWS, _SERVER_ROW):
        if row.name == wanted:
            chosen = row if row is _SERVER_ROW else replace(row, ownership=ownership)
            return chosen if bucket_bytes is None else replace(chosen, bucket_bytes=bucket_bytes)
    near = difflib.get_close_matches(wanted, POLICY_NAMES, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise PlanError("E204", f"unknown sharding policy {name!r}; known: {', '.join(POLICY_NAMES)}.{hint}")
