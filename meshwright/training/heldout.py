"""The loss on held-out data over all ranks, and the control that it comes from the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.comm.ops import DataGroups
from meshwright.data.batches import MapStyle, heldout_batches
from meshwright.data.control import LastLabelOnly
from meshwright.layout.plan import TrainPlan
from meshwright.sharding.engine import ShardingEngine
from meshwright.training.precision import MASTER_DTYPES
from meshwright.training.step import Loss, evaluate
from meshwright.training.tree import cast_batch


@dataclass(frozen=True, eq=False)
class HeldOut:
    """How a run looks at data that it does not train on.

    Attributes:
        engine: of the model.
        plan: its micro-batch and precision.
        groups: workers take samples; servers take none.
        loss: (model, batch) -> (sum, count).
        num_samples: of the data, at most.
    """

    engine: ShardingEngine
    plan: TrainPlan
    groups: DataGroups
    loss: Loss
    num_samples: int

    def loss_on(self, dataset: MapStyle) -> float:
        """Mean loss over all ranks."""
        if self.groups.is_server:
            return evaluate(self.engine, (), loss=self.loss, group=self.groups.all)
        batches = heldout_batches(
            dataset,
            self.num_samples,
            batch_size=self.plan.micro_batch,
            dp_size=self.groups.num_readers,
            dp_rank=self.groups.reader_index,
            most_ranks=self.plan.mesh.dp if self.groups.has_teams else None,
        )
        dtype = MASTER_DTYPES[self.plan.precision]
        moved = (cast_batch(batch, dtype, self.engine.device) for batch in batches)
        return evaluate(self.engine, moved, loss=self.loss, group=self.groups.all)

    def shuffled_context(self, dataset: MapStyle) -> Mapping[str, float]:
        """Loss of the last token of sequences, from the context as it is (`ordered`) and `shuffled`."""
        return {
            name: self.loss_on(LastLabelOnly(dataset, shuffled=name == "shuffled"))
            for name in ("ordered", "shuffled")
        }
