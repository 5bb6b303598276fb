"""The end of every lesson: the same training on ranks and on one process, compared number by number.

A small float64 GPT trains for three clipped AdamW steps. Samples have unequally many valid tokens, so a rank that
divides by its own count instead of the global one is found at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.adapt.context_parallel import ContextScope
from meshwright.adapt.tensor_parallel import split_model
from meshwright.comm.mesh import Mesh
from meshwright.comm.ops import DataGroups
from meshwright.data.index_law import rank_range
from meshwright.layout.policy import find_policy
from meshwright.layout.recompute import parse_recompute
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh import MeshSpec
from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.initial import initialise
from meshwright.models.loss import IGNORED_LABEL, language_model_loss
from meshwright.recompute.install import install as install_recompute
from meshwright.sharding.engine import ShardingEngine
from meshwright.testing.ranks import RankPool
from meshwright.testing.reference import run_reference
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, make_optimizer, parameter_groups
from meshwright.training.sequences import over_sequences
from meshwright.training.state import TrainState
from meshwright.training.step import Loss, no_samples, train_step

GLOBAL_BATCH, NUM_STEPS, SEQ_LEN, VOCAB_SIZE, CLIP_NORM = 12, 3, 8, 31, 0.05
TOLERANCE = 1e-12
_SPEC = OptimizerSpec("adamw", lr=0.01, weight_decay=0.1, eps=1e-6)


@dataclass(frozen=True)
class Parity:
    """How far ranks and one process are apart: the worst relative error over losses, norms and parameters."""

    description: str
    num_compared: int
    worst: float

    def line(self) -> str:
        """One line for people."""
        return f"  ✓ {self.description} = 1 process: {self.num_compared} numbers and tensors, worst {self.worst:.1e}"


def check_parity(  # noqa: PLR0913 - one number for each axis
    pool: RankPool,
    policy: str,
    *,
    num_ranks: int,
    num_microbatches: int = 1,
    num_servers: int = 0,
    recompute: str = "none",
    num_tensor_ranks: int = 1,
    num_context_ranks: int = 1,
) -> Parity:
    """Train on `num_ranks` ranks and on this process alone; assert that they agree to 1e-12.

    `num_servers` of the ranks, the last ones, are parameter servers; `num_tensor_ranks` of them hold a copy together,
    `num_context_ranks` parts of the same sequences. Ranks compute again what `recompute` says.
    """
    shape = num_microbatches, num_servers, num_tensor_ranks, num_context_ranks
    ranks = pool.run(_train_on_rank, num_ranks, policy, shape, recompute)
    losses, norms, parameters = _train_alone(num_microbatches)
    errors = []
    for rank in ranks:
        pairs = zip(rank["losses"] + rank["norms"], losses + norms, strict=True)
        errors += [abs(value - expected) / abs(expected) for value, expected in pairs]
    for name, expected in parameters.items():
        whole = torch.full_like(expected.flatten(), torch.nan)  # a piece that no rank holds stays nan
        for rank in ranks:
            for start, stop, values in rank["pieces"].get(name, ()):
                whole[start:stop] = values
        errors.append(float((whole - expected.flatten()).norm() / expected.norm()))
    worst = max(errors)
    assert all(error <= TOLERANCE for error in errors), (
        f"{policy} on {num_ranks} ranks differs by {worst:.3g}"
    )
    policy = policy if num_tensor_ranks == 1 else f"tp{num_tensor_ranks}_{policy}"
    policy = policy if num_context_ranks == 1 else f"cp{num_context_ranks}_{policy}"
    described = f"{policy} on {num_ranks} rank{'s' if num_ranks > 1 else ''}, accumulate {num_microbatches}"
    described += "" if recompute == "none" else f", recompute {recompute}"
    return Parity(described, len(errors), worst)


def _train_on_rank(
    mesh: Any, policy: str, shape: tuple[int, int, int, int], recompute: str
) -> dict[str, Any]:
    num_microbatches, *factors = shape
    groups, model = groups_of(mesh, *factors), small_gpt()
    split = None if groups.tensor is None else split_model(model, groups.tensor, None)[0]
    layout = split or TensorLayout(1, 0)
    engine = ShardingEngine(
        model, policy=find_policy(policy), groups=groups, device=mesh.device, tensor_layout=split
    )
    install_recompute(engine.model, parse_recompute(recompute), weights=engine.gatherer)
    state = TrainState(engine, ShardedOptimizer(_SPEC, engine.shards))
    results = [
        train_step(
            state,
            partial(
                samples,
                step,
                num_microbatches=num_microbatches,
                dp_size=groups.num_readers,
                dp_rank=groups.reader_index,
            ),
            loss=no_samples if groups.is_server else _loss_of(groups),
            num_microbatches=num_microbatches,
            lr=_SPEC.lr,
            clip_norm=CLIP_NORM,
        )
        for step in range(NUM_STEPS)
    ]
    pieces: dict[str, list[tuple[int, int, Tensor]]] = {}
    for shard in engine.shards:
        flat, first = shard.parameter.detach().flatten().clone(), shard.piece.start
        local = model.get_parameter(shard.name).shape
        for there, start, stop in layout.runs(shard.name, local, first, shard.piece.stop):
            piece = (there, there + stop - start, flat[start - first : stop - first])
            pieces.setdefault(shard.name, []).append(piece)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "pieces": pieces,
    }


def _train_alone(num_microbatches: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = small_gpt()
    parameters = list(model.parameters())
    rows = parameter_groups(_SPEC, [tuple(parameter.shape) for parameter in parameters])
    groups: list[dict[str, object]] = [
        {"params": [parameters[i] for i in members], "weight_decay": decay} for members, decay in rows
    ]
    steps = [
        [samples(step, k, num_microbatches=num_microbatches) for k in range(num_microbatches)]
        for step in range(NUM_STEPS)
    ]
    trace = run_reference(
        model, language_model_loss, steps, optimizer=make_optimizer(_SPEC, groups), clip_norm=CLIP_NORM
    )
    return trace.losses, trace.norms, trace.parameters


def small_gpt() -> nn.Module:
    """A GPT of two layers in float64, the same at each call."""
    config = GPTConfig(
        num_layers=2, dim=16, num_heads=2, ffn_dim=40, vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN
    )
    model = GPT(config)
    initialise(model, 1)
    with torch.no_grad():  # zero biases would have no relative error
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def _loss_of(groups: DataGroups) -> Loss:
    if groups.context is None:
        return language_model_loss
    return over_sequences(language_model_loss, ContextScope(groups.context, "ring"))


def groups_of(
    mesh: Any, num_servers: int, num_tensor_ranks: int = 1, num_context_ranks: int = 1
) -> DataGroups:
    """The ranks of `mesh`, the last `num_servers` as parameter servers, or copies and sequences on several ranks."""
    if num_tensor_ranks * num_context_ranks > 1:
        each = num_tensor_ranks * num_context_ranks
        spec = MeshSpec.of(dp_shard=mesh.world.size // each, cp=num_context_ranks, tp=num_tensor_ranks)
        return Mesh(spec, mesh.world, log=mesh.log, device=mesh.device).data_groups()
    if not num_servers:
        return mesh.data_groups()
    workers = MeshSpec.of(dp_shard=mesh.world.size - num_servers)
    sync = "parameter_server"
    return Mesh(
        workers, mesh.world, log=mesh.log, device=mesh.device, sync=sync, servers=num_servers
    ).data_groups()


def samples(
    step: int, microbatch: int, *, num_microbatches: int, dp_size: int = 1, dp_rank: int = 0
) -> dict[str, Tensor]:
    """This rank's part of a micro-batch: `tokens` and `labels` (samples, SEQ_LEN)."""
    positions = rank_range(
        step,
        microbatch,
        global_batch=GLOBAL_BATCH,
        num_microbatches=num_microbatches,
        dp_size=dp_size,
        dp_rank=dp_rank,
    )
    rows = [sample(position) for position in positions]
    return {key: torch.stack([row[key] for row in rows]) for key in ("tokens", "labels")}


def sample(position: int) -> dict[str, Tensor]:
    """One sequence, `tokens` and `labels` (SEQ_LEN,); how many labels are ignored depends on its position."""
    tokens = torch.randint(
        VOCAB_SIZE, (SEQ_LEN + 1,), generator=torch.Generator().manual_seed(1000 + position)
    )
    labels = tokens[1:].clone()
    labels[: position % SEQ_LEN] = IGNORED_LABEL
    return {"tokens": tokens[:-1], "labels": labels}
