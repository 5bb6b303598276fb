"""One parity case: the same training on n Gloo ranks with the engine and on one process with plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.adapt import linear
from meshwright.comm.mesh import Mesh
from meshwright.data.index_law import rank_range
from meshwright.layout.policy import find_policy
from meshwright.mesh import MeshSpec
from meshwright.sharding.engine import ShardingEngine
from meshwright.testing.reference import Trace, run_reference
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer, parameter_groups
from meshwright.training.state import TrainState
from meshwright.training.step import no_samples, train_step
from tests.parity import models

GLOBAL_BATCH, NUM_STEPS, CLIP = 12, 5, 0.05
LR = 0.01
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True)
class Case:
    model: str
    policy: str
    world: int
    accumulate: int
    optimizer: str
    dtype: str = "float64"
    servers: int = 0  # of the world

    def __str__(self) -> str:
        servers = f"-{self.servers}servers" if self.servers else ""
        return (
            f"{self.model}-{self.policy}-{self.world}ranks{servers}-acc{self.accumulate}-{self.optimizer}-"
            f"{self.dtype}"
        )

    @property
    def spec(self) -> OptimizerSpec:
        momentum = 0.9 if self.optimizer == "sgd" else 0.0
        return OptimizerSpec(self.optimizer, lr=LR, weight_decay=0.1, momentum=momentum, eps=1e-6)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float64": torch.float64, "float32": torch.float32}[self.dtype]


def with_servers(mesh: Any, servers: int) -> Mesh:
    """The ranks of a local mesh, the last of them as parameter servers."""
    workers = MeshSpec.of(dp_shard=mesh.world.size - servers)
    sync = "parameter_server" if servers else "native"
    return Mesh(workers, mesh.world, log=mesh.log, device=mesh.device, sync=sync, servers=servers)


def candidate(mesh: Any, case: Case) -> dict[str, Any]:
    """What one rank holds after training: losses, norms, and its pieces of gradients and parameters."""
    mesh = with_servers(mesh, case.servers)
    groups = mesh.data_groups()
    model = models.build(case.model, case.torch_dtype)
    values = {name: p.detach().clone().flatten() for name, p in model.named_parameters()}
    if case.model in ("gpt", "mlp"):  # as the trainer does: built without memory, drawn shard by shard
        with torch.device("meta"):
            model = models.skeleton(case.model).to(case.torch_dtype)
    # Tiny buckets, so that small models have several.
    engine = ShardingEngine(
        model,
        policy=find_policy(case.policy, bucket_bytes=4096),
        groups=groups,
        device=torch.device("cpu"),
        initialiser=lambda name, start, stop, _dtype: values[name][start:stop],
    )
    linear.install(model, engine.gradients)
    state = TrainState(engine, ShardedOptimizer(case.spec, engine.shards))
    losses, norms, gradients = [], [], []
    for step in range(NUM_STEPS):

        def micro_batch(k: int, step: int = step) -> Any:
            if groups.is_server:
                return None
            ids = rank_range(
                step,
                k,
                global_batch=GLOBAL_BATCH,
                num_microbatches=case.accumulate,
                dp_size=groups.num_workers,
                dp_rank=mesh.rank,
            )
            return models.samples(case.model, ids.start, len(ids), case.torch_dtype)

        result = train_step(
            state,
            micro_batch,
            loss=no_samples if groups.is_server else models.loss_of(case.model),
            num_microbatches=case.accumulate,
            lr=LR,
            clip_norm=CLIP,
        )
        assert result.applied
        losses.append(result.loss)
        norms.append(result.grad_norm)
        gradients.append(
            [
                (
                    s.name,
                    s.piece.start,
                    s.piece.stop,
                    s.gradient.flatten().clone(),
                    s.parameter.grad is not None,
                )
                for s in engine.shards
            ]
        )
    pieces = [
        (s.name, s.piece.start, s.piece.stop, s.parameter.detach().flatten().clone()) for s in engine.shards
    ]
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": pieces}


def reference(case: Case) -> Trace:
    torch.set_num_threads(1)  # as on the ranks: other kernels round differently
    model = models.build(case.model, case.torch_dtype)
    named = list(model.named_parameters())
    groups = [
        {"params": [named[i][1] for i in members], "weight_decay": decay}
        for members, decay in parameter_groups(case.spec, [tuple(p.shape) for _, p in named])
    ]
    kinds = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=LR, betas=case.spec.betas, eps=case.spec.eps),
        "adam": lambda: torch.optim.Adam(groups, lr=LR, betas=case.spec.betas, eps=case.spec.eps),
        "sgd": lambda: torch.optim.SGD(groups, lr=LR, momentum=case.spec.momentum),
    }
    size = GLOBAL_BATCH // case.accumulate
    steps = [
        [
            models.samples(case.model, step * GLOBAL_BATCH + k * size, size, case.torch_dtype)
            for k in range(case.accumulate)
        ]
        for step in range(NUM_STEPS)
    ]
    return run_reference(
        model, models.loss_of(case.model), steps, optimizer=kinds[case.optimizer](), clip_norm=CLIP
    )


@dataclass
class Comparison:
    """What was compared, and how far apart it was relative to its bound's scale."""

    compared: int = 0
    judged_absolutely: int = 0
    worst: float = 0.0
    worst_tensor: str = ""


def compare(case: Case, ranks: list[dict[str, Any]], trace: Trace) -> Comparison:
    """Assert that every rank computed what the reference did; returns what was compared."""
    bound, result = TOLERANCE[case.dtype], Comparison()
    for rank in ranks:
        for step, (loss, norm) in enumerate(zip(rank["losses"], rank["norms"], strict=True)):
            _scalar(f"loss {step}", loss, trace.losses[step], bound, result)
            _scalar(f"norm {step}", norm, trace.norms[step], bound, result)
    for step, expected in enumerate(trace.gradients):
        present = {name: grad for name, grad in expected.items() if grad is not None}
        for rank in ranks:
            for name, _start, _stop, _values, used in rank["gradients"][step]:
                assert used == (name in present), f"{case}: step {step} {name} used={used}"
        pieces = [[piece[:4] for piece in rank["gradients"][step] if piece[4]] for rank in ranks]
        _tensors(f"gradient {step}", pieces, present, bound, result)
    trained = {name for rank in ranks for name, *_ in rank["parameters"]}
    expected = {name: value for name, value in trace.parameters.items() if name in trained}
    _tensors("parameter", [rank["parameters"] for rank in ranks], expected, bound, result)
    return result


def _scalar(what: str, value: float, expected: float, bound: float, result: Comparison) -> None:
    error = abs(value - expected) / abs(expected)
    _judge(what, error, bound, result)


def _judge(what: str, error: float, bound: float, result: Comparison) -> None:
    result.compared += 1
    if not error <= result.worst:
        result.worst, result.worst_tensor = error, what
    assert error <= bound, f"{what}: relative error {error:.3g} > {bound:g}"


def _tensors(
    what: str,
    ranks: list[list[tuple[str, int, int, Tensor]]],
    expected: dict[str, Tensor],
    bound: float,
    result: Comparison,
) -> None:
    """Every element of every tensor must be covered, and agree on each rank that holds it."""
    modules: dict[str, float] = {}
    for name, value in expected.items():
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0.0) + float(value.double().square().sum())
    whole = sum(modules.values()) ** 0.5
    covered = {name: torch.zeros(value.numel(), dtype=torch.bool) for name, value in expected.items()}
    squares = dict.fromkeys(expected, 0.0)
    for pieces in ranks:
        for name, start, stop, values in pieces:
            error = float((values - expected[name].flatten()[start:stop]).double().square().sum())
            # A rank that holds all of a tensor is a replica and is judged alone; pieces add up.
            whole_tensor = stop - start == expected[name].numel()
            squares[name] = max(squares[name], error) if whole_tensor else squares[name] + error
            covered[name][start:stop] = True
    for name, value in expected.items():
        assert bool(covered[name].all()), f"{what} {name}: no rank holds some elements"
        own, module = float(value.double().norm()), modules[name.rpartition(".")[0]] ** 0.5
        scale = max(own, module, torch.finfo(value.dtype).eps * whole)
        result.judged_absolutely += own < 1e-9 * scale
        _judge(f"{what} {name}", squares[name] ** 0.5 / scale, bound, result)
