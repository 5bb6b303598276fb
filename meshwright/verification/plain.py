"""A plain PyTorch loop on this process, which shares no code with the engine; its samples may run in another order.

Owns the loop and what it hands on: gradients divided by the global count and before clipping, parameters and buffers
after every step (parameters before the first too), optimizer state after the last, outputs of modules in every
micro-step, losses and norms. Must not know ranks. Dropout masks are those of the product, as data is: which element is
dropped is a part of what is computed. [Note: clip] The limit of the norm is lowered to half the first step's norm, so
that clipping acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.adapt import batch_norm
from meshwright.adapt.dropout import stateless
from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group
from meshwright.comm.rng import MicroStep
from meshwright.data.order import sample_ids
from meshwright.errors import NumericsError
from meshwright.sharding.units import hidden_matrices
from meshwright.training.sections import OptimizerConfig, momentum_of
from meshwright.verification.job import Uses, VerifyJob
from meshwright.verification.masters import Masters
from meshwright.verification.observe import ModuleObserver, Rows
from meshwright.verification.plain_muon import PlainMuon
from meshwright.verification.subject import batch_of, make_subject, materialise
from meshwright.verification.tensors import Key
from meshwright.verification.uses import UseObserver

# As torch.nn.utils.clip_grad_norm_.
_CLIP_EPSILON = 1e-6

# Samples of one micro-step -> the parts in which they run; positions may be in descending order.
Order = Callable[[range], list[Sequence[int]]]


def as_given(micro_step: range) -> list[Sequence[int]]:
    """The whole micro-step at once, in order."""
    return [micro_step]


def reversed_halves(micro_step: range) -> list[Sequence[int]]:
    """The second half, then the first, each backwards."""
    cut = len(micro_step) // 2
    return [part[::-1] for part in (micro_step[cut:], micro_step[:cut]) if len(part)]


def swapped_halves(micro_step: range) -> list[Sequence[int]]:
    """The second half, then the first."""
    cut = len(micro_step) // 2
    return [part for part in (micro_step[cut:], micro_step[:cut]) if len(part)]


def reversed_whole(micro_step: range) -> list[Sequence[int]]:
    """The whole micro-step at once, backwards."""
    return [micro_step[::-1]]


def one_by_one(micro_step: range) -> list[Sequence[int]]:
    """Each sample by itself, the last first."""
    return [micro_step[place : place + 1] for place in reversed(range(len(micro_step)))]


class Put(Protocol):
    """Where a run's tensors go."""

    def __call__(self, key: Key, tensor: Tensor, *, order: int, start: int, rows: Rows) -> None:
        """Take a tensor, or its samples from row `start` on."""


@dataclass(frozen=True)
class Stream:
    """Which samples each micro-step holds: the law written out, without ranks."""

    job: VerifyJob
    num_samples: int

    def places(self) -> Iterator[tuple[int, int]]:
        """(step, micro-step), both from 0."""
        for step in range(self.job.steps):
            for microbatch in range(self.job.plan.num_microbatches):
                yield step, microbatch

    def ids(self, step: int, microbatch: int) -> list[int]:
        """Dataset indices of a micro-step."""
        plan = self.job.plan
        size = plan.global_batch // plan.num_microbatches
        position = step * plan.global_batch + microbatch * size
        seed = self.job.config.train.seed
        return sample_ids(position, size, num_samples=self.num_samples, seed=seed).tolist()


class PlainRun:
    """One training on this process; `put` gets its tensors, `order` says in which order samples run.

    `scope` is entered around every forward and backward; `scale` multiplies the loss sum before backward, and is
    divided out of gradients.
    """

    def __init__(
        self,
        job: VerifyJob,
        *,
        put: Put,
        order: Order,
        rows: dict[str, Rows],
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
        scale: float = 1.0,
    ) -> None:
        self._job = job
        self._scope = scope
        self._put = put
        self._order = order
        self._rows = rows
        self._scale = scale
        task = make_subject(job)
        self._loss, self._data = task.loss, task.train_data
        self._stream = Stream(job, len(task.train_data))
        self._model = materialise(task).train()
        self._masters = Masters(self._model, job.plan.precision)
        self._observer = ModuleObserver(self._model)
        self._uses = UseObserver(self._model)
        # Over one rank this is torch's own, but for running statistics: recomputation does not move them again.
        batch_norm.install(self._model, Group("dp", (0,), 0, None, CommLog()))
        self._optimizer = plain_optimizer(
            self._masters.parameters, job.config.train.optimizer, hidden=hidden_matrices(self._model)
        )
        self.clip_norm = job.config.train.clip_norm
        self.losses: list[float] = []
        self.uncompared: set[str] = set()

    @property
    def uses(self) -> tuple[Uses, ...]:
        """What every forward and backward so far used, in order."""
        return tuple(self._uses.seen)

    def nudge(self, seed: int) -> None:
        """Move every weight by about one rounding error, up or down at random."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._masters.parameters.values():
                signs = torch.randint(2, parameter.shape, generator=generator).to(parameter.dtype) * 2 - 1
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
            self._masters.publish()

    def train(self, clip_norm: float | None = None) -> None:
        """All steps. `clip_norm` is the limit; None chooses it (see [Note: clip])."""
        chooses = clip_norm is None and self.clip_norm is not None
        self.clip_norm = self.clip_norm if chooses else clip_norm
        for name, parameter in self._masters.parameters.items():
            self._tensor("parameters", 0, name, parameter, order=0)
        for step in range(self._job.steps):
            self._optimizer.zero_grad(set_to_none=True)
            loss_sum, count = self._accumulate(step)
            if not math.isfinite(loss_sum) or not count:
                raise NumericsError(
                    "E601",
                    f"the reference's loss of step {step + 1} is {loss_sum:g} over {count:g} elements on one "
                    f"process; there is nothing to compare with. Look at the data and the learning rate.",
                )
            norm = self._normalise(step, count)
            if not math.isfinite(norm):
                raise NumericsError(
                    "E601",
                    f"the reference's gradient of step {step + 1} is not finite on one process (loss "
                    f"{loss_sum / count:g}); there is nothing to compare with. Look at the data and the learning rate.",
                )
            if chooses and step == 0 and norm > 0:
                assert self.clip_norm is not None, "a limit is lowered only where there is one"
                self.clip_norm = min(self.clip_norm, norm / 2)
            self._scalar("loss", step, loss_sum / count)
            self._scalar("grad_norm", step, norm)
            self.losses.append(loss_sum / count)
            self._clip(norm)
            self._optimizer.step()
            self._masters.publish()
            self._put_state(step + 1)

    def _accumulate(self, step: int) -> tuple[float, float]:
        loss_sum, count = 0.0, 0.0
        for microbatch in range(self._job.plan.num_microbatches):
            ids = self._stream.ids(step, microbatch)
            for positions in self._order(range(len(ids))):
                chosen = [ids[position] for position in positions]
                batch = batch_of(self._data, chosen, precision=self._job.plan.precision)
                sink = self._activation_sink(step, microbatch, positions)
                randomness = self._randomness(step, microbatch, positions)
                with self._uses.micro_step(), self._scope(), randomness:
                    with self._observer.forward(sink):
                        part, part_count = self._loss(self._model, batch)
                    if part.requires_grad:
                        (part if self._scale == 1.0 else part * self._scale).backward()
                        self._masters.collect()
                loss_sum, count = loss_sum + float(part.detach()), count + float(part_count)
        return loss_sum, count

    def _randomness(
        self, step: int, microbatch: int, positions: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Dropout masks of these samples' places in the batch: they are a part of what is computed."""
        if self._job.config.train.dropout != "stateless":
            return nullcontext()
        plan = self._job.plan
        size = plan.global_batch // plan.num_microbatches
        first = microbatch * size + min(positions)
        return stateless(MicroStep(self._job.config.train.seed, step, first, len(positions), size))

    def _activation_sink(
        self, step: int, microbatch: int, positions: Sequence[int]
    ) -> Callable[[str, Tensor], None]:
        num_seen = 0
        backwards = positions[0] > positions[-1]

        def sink(name: str, tensor: Tensor) -> None:
            nonlocal num_seen
            num_seen += 1
            rows = self._rows.get(name)
            if rows is None or not rows.fits(tensor.shape, len(positions)):
                self.uncompared.add(name)
                return
            start = 0
            if rows.dim is not None:
                start = min(positions) * rows.per_sample
                tensor = _backwards(tensor, rows, len(positions)) if backwards else tensor
            self._put(
                ("activations", step + 1, microbatch, name), tensor, order=num_seen, start=start, rows=rows
            )

        return sink

    def _normalise(self, step: int, count: float) -> float:
        """Divide gradients by the count (and by the loss scale), hand them on, and return their norm."""
        square, last = 0.0, len(self._observer.order)
        for name, parameter in self._masters.parameters.items():
            if parameter.grad is None:
                continue
            parameter.grad.div_(count * self._scale)
            square += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
            self._tensor(
                "gradients", step + 1, name, parameter.grad, order=last - self._place(name)
            )  # backward order
        return square**0.5

    def _clip(self, norm: float) -> None:
        if self.clip_norm is None:
            return
        factor = min(1.0, self.clip_norm / (norm + _CLIP_EPSILON))
        for parameter in self._masters.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _put_state(self, step: int) -> None:
        """Parameters and buffers after each step, optimizer state after the last."""
        for name, parameter in self._masters.parameters.items():
            place = self._place(name)
            self._tensor("parameters", step, name, parameter, order=place)
            state = self._optimizer.state.get(parameter, {}) if step == self._job.steps else {}
            for part, value in state.items():
                if isinstance(value, Tensor):
                    self._tensor("optimizer", step, f"{name} {part}", value, order=place)
        for name, buffer in self._model.named_buffers():
            self._tensor("buffers", step, name, buffer, order=self._place(name))

    def _place(self, name: str) -> int:
        return self._observer.order.get(name.rpartition(".")[0], 0)

    def _scalar(self, check: str, step: int, value: float) -> None:
        self._tensor(check, step + 1, check, torch.tensor(value, dtype=torch.float64), order=0)

    def _tensor(self, check: str, step: int, name: str, value: Tensor, *, order: int) -> None:
        self._put((check, step, -1, name), value.detach(), order=order, start=0, rows=Rows(None))


def _backwards(tensor: Tensor, rows: Rows, num_samples: int) -> Tensor:
    """Samples of an output in the opposite order; the rows of one sample keep theirs."""
    assert rows.dim is not None, "an output without samples has no order of samples"
    apart = tensor.unflatten(rows.dim, (num_samples, rows.per_sample))
    return apart.flip(rows.dim).flatten(rows.dim, rows.dim + 1)


def plain_optimizer(
    parameters: Mapping[str, nn.Parameter], chosen: OptimizerConfig, *, hidden: Set[str] = frozenset()
) -> torch.optim.Optimizer:
    """torch's optimizer, parameter by parameter; matrices decay and vectors do not. `hidden`: what Muon updates."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if chosen.name == "muon":
        return _plain_muon(trained, chosen, hidden)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained.values() if p.dim() >= 2], "weight_decay": chosen.weight_decay},
        {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if chosen.name == "sgd":
        return torch.optim.SGD(groups, lr=chosen.lr, momentum=momentum_of(chosen), foreach=False)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[chosen.name]
    return kind(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, foreach=False)


def _plain_muon(trained: Mapping[str, nn.Parameter], chosen: OptimizerConfig, hidden: Set[str]) -> PlainMuon:
    rest = [p for name, p in trained.items() if name not in hidden]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": chosen.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=chosen.adamw_lr, betas=chosen.betas, eps=chosen.eps, foreach=False)
    return PlainMuon(
        [p for name, p in trained.items() if name in hidden],
        adamw,
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        momentum=momentum_of(chosen),
        adjust=chosen.lr_adjust,
    )
