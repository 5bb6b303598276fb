"""The optimizer over shards: torch's own fused update, in one multi-tensor call over this rank's pieces.

Owns which pieces form which parameter group and which are left out of a step. The update rule is torch's; there is
no communication inside it. Weight decay applies to matrices and not to vectors (norms, biases), by the shape of the
*logical* parameter: a shard of a matrix is one-dimensional too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch

from meshwright.errors import CheckpointError
from meshwright.sharding.engine import ShardParameter
from meshwright.training.cut_matrices import CutMatrices
from meshwright.training.muon import LrAdjust, Muon
from meshwright.training.optimizer_kinds import OPTIMIZER_KINDS as OPTIMIZER_KINDS
from meshwright.training.optimizer_kinds import check_optimizer
from meshwright.training.sections import OptimizerConfig, momentum_of


@dataclass(frozen=True)
class OptimizerSpec:
    """The update rule and its numbers, without torch objects.

    Attributes:
        name: `adamw`, `adam`, `sgd` or `muon`.
        lr: peak learning rate.
        weight_decay: decoupled for adamw and muon; added to the gradient for adam and sgd.
        betas: decay of the moments (adamw, adam, and what muon leaves to adamw).
        eps: added to the root of the second moment (the same).
        momentum: of sgd and muon.
        adamw_lr: peak learning rate of what muon leaves to adamw: embeddings, heads, vectors.
        lr_adjust: how muon's learning rate follows the shape of a matrix; see `muon.shape_factor`.
    """

    name: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    adamw_lr: float = 3e-4
    lr_adjust: LrAdjust = "original"


def spec_of(config: OptimizerConfig) -> OptimizerSpec:
    """The update rule that a configuration describes."""
    return OptimizerSpec(
        config.name,
        config.lr,
        config.weight_decay,
        config.betas,
        config.eps,
        momentum_of(config),
        config.adamw_lr,
        config.lr_adjust,
    )


def parameter_groups(spec: OptimizerSpec, shapes: Sequence[tuple[int, ...]]) -> list[tuple[list[int], float]]:
    """Indices of parameters of `shapes` and their weight decay: matrices decay, vectors do not."""
    matrices = [i for i, shape in enumerate(shapes) if len(shape) >= 2]
    vectors = [i for i, shape in enumerate(shapes) if len(shape) < 2]
    groups = [(matrices, spec.weight_decay), (vectors, 0.0)]
    return [(members, decay) for members, decay in groups if members]


def make_optimizer(spec: OptimizerSpec, parameters: Sequence[dict[str, object]]) -> torch.optim.Optimizer:
    """torch's fused optimizer of `spec` over parameter groups."""
    groups = list(parameters)
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    if spec.name == "adam":
        return torch.optim.Adam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    assert spec.name == "sgd", f"unknown optimizer {spec.name!r}"
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, fused=True)


def make_muon(spec: OptimizerSpec, shards: Sequence[ShardParameter], cut: CutMatrices | None = None) -> Muon:
    """Muon over the hidden matrices of `shards`, AdamW over the rest.

    Raises:
        PlanError: E204 where this rank holds parts of matrices.
    """
    hidden = [shard for shard in shards if shard.is_hidden]
    check_optimizer("Muon", holds_whole=all(shard.parameter.shape == shard.shape for shard in hidden))
    rest = [shard for shard in shards if not shard.is_hidden]
    ratio = spec.adamw_lr / spec.lr
    others = [
        {
            "params": [rest[i].parameter for i in members],
            "weight_decay": decay,
            "lr": spec.adamw_lr,
            "lr_ratio": ratio,
        }
        for members, decay in parameter_groups(spec, [shard.shape for shard in rest])
    ]
    matrices = (
        [{"params": [shard.parameter for shard in hidden], "weight_decay": spec.weight_decay}]
        if hidden
        else []
    )
    return Muon(
        matrices,
        others,
        lr=spec.lr,
        momentum=spec.momentum,
        adjust=spec.lr_adjust,
        betas=spec.betas,
        eps=spec.eps,
        cut=cut,
    )


class ShardedOptimizer:
    """One optimizer step over this rank's pieces of the parameters that some rank used.

    A parameter that got no gradient anywhere is left out, as torch leaves out `grad is None`: no decay, no
    momentum, no step count. A rank may own no piece at all. `cut`: hidden matrices of which the pieces are parts (tp).
    """

    def __init__(
        self, spec: OptimizerSpec, shards: Sequence[ShardParameter], cut: CutMatrices | None = None
    ) -> None:
        self.name = spec.name
        self.shards = list(shards)
        self.torch_optimizer: torch.optim.Optimizer | None = None
        self._adopted: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}
        if self.shards and spec.name == "muon":
            self.torch_optimizer = make_muon(spec, self.shards, cut)
        elif self.shards:
            groups = [
                {"params": [self.shards[i].parameter for i in members], "weight_decay": decay}
                for members, decay in parameter_groups(spec, [shard.shape for shard in self.shards])
            ]
            self.torch_optimizer = make_optimizer(spec, groups)

    def step(
        self, *, lr: float, used: Set[str], parts: Iterable[Sequence[ShardParameter]] | None = None
    ) -> None:
        """Update every piece of the parameters named in `used` from its gradient.

        Args:
            lr: learning rate.
            used: names.
            parts: the pieces in the order in which they can be updated; None: all at once.
        """
        if self.torch_optimizer is None:
            return
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        num_shown = 0
        for part in [self.shards] if parts is None else parts:
            self._show_gradients(part, used)
            self.torch_optimizer.step()
            num_shown = len(part)
        if num_shown < len(self.shards):
            self._show_gradients(self.shards, used)

    def _show_gradients(self, shards: Sequence[ShardParameter], used: Set[str]) -> None:
        """Let torch see gradients of `shards` only: it leaves out what has none."""
        if len(shards) < len(self.shards):
            for shard in self.shards:
                shard.parameter.grad = None
        for shard in shards:
            shard.parameter.grad = shard.gradient if shard.name in used else None

    def adopt(self, optimizer: torch.optim.Optimizer, shards: Sequence[ShardParameter]) -> None:
        """Find the state of `shards` in a user's own optimizer, which makes its updates itself."""
        self._adopted |= {shard.parameter: optimizer for shard in shards}

    def state_of(self, shard: ShardParameter) -> dict[str, torch.Tensor]:
        """State of one piece by slot: as large as the piece, or one number (0-dim) for the whole parameter.

        Raises:
            CheckpointError: E505 for state that is no tensor.
        """
        optimizer = self._adopted.get(shard.parameter, self.torch_optimizer)
        if optimizer is None:
            return {}
        state = {
            slot: value
            for slot, value in optimizer.state.get(shard.parameter, {}).items()
            if value is not None
        }
        for slot, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    "E505",
                    f"optimizer state {slot!r} of {shard.name!r} is a {type(value).__name__}; only tensors can be "
                    f"saved and cut anew. Keep it as a 0-dim tensor, as torch's optimizers do.",
                )
        return state

    def load_state(self, shard: ShardParameter, state: dict[str, torch.Tensor]) -> None:
        """Put back what `state_of` gave, here or on another mesh."""
        optimizer = self._adopted.get(shard.parameter, self.torch_optimizer)
        assert optimizer is not None, f"{shard.name} has no optimizer"
        optimizer.state[shard.parameter] = state

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank, step counts included."""
        if self.torch_optimizer is None:
            return 0
        states = self.torch_optimizer.state.values()
        return sum(
            value.numel() * value.element_size()
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
