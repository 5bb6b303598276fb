"""One rank of the run under test: the product's own path, and its pieces measured against the reference.

Owns the order of what is done: build (`build.py`), inject, train, measure. Each rank compares what it holds, its
boxes of parameters and its samples of activations, with the reference's file; only numbers leave the rank, and nothing
is gathered. Must not judge. Runs on CPU processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.adapt.cut_logits import CutLogits
from meshwright.comm.log import CommLog, ring_path
from meshwright.comm.mesh import Mesh, World, connect, disconnect
from meshwright.comm.ops import DataGroups, Group, alone
from meshwright.comm.watchdog import Watchdog
from meshwright.layout.tensor_layout import TensorLayout, TokenRange
from meshwright.sharding.engine import ShardParameter
from meshwright.training.clip import clip_coefficient
from meshwright.training.loss_scale import LossScale
from meshwright.training.precision import MASTER_DTYPES
from meshwright.training.step import StepResult, first_count, train_step
from meshwright.training.tree import cast_batch
from meshwright.verification.build import build_rank, widen
from meshwright.verification.contributions import Contributions
from meshwright.verification.declared import call_name, declared_steps
from meshwright.verification.handover import load_rank, save_rank
from meshwright.verification.job import Handover, RankReport, Reference, Samples, VerifyJob
from meshwright.verification.observe import ModuleObserver
from meshwright.verification.sources import GradientSamples
from meshwright.verification.store import Chunk, Comparer, Positions
from meshwright.verification.subject import WatchedData, make_subject, peak_memory, tensor_digest
from meshwright.verification.tensors import Key, Recorded

_WATCHDOG_SECONDS = 120.0


def run_candidate(
    job: VerifyJob,
    reference: Reference,
    path: Path,
    *,
    world: World,
    run_dir: Path,
    save: Handover | None = None,
    load: Handover | None = None,
) -> RankReport:
    """Train as one rank of `world` and measure against the reference in the file `path`.

    Args:
        job: what is trained.
        reference: what it is held against.
        path: the reference's tensors.
        world: who this process is.
        run_dir: folder for logs and rings.
        save: where a checkpoint is left on the way.
        load: the checkpoint from which it starts; None: from the beginning.

    Raises:
        MeshwrightError: as training raises.
    """
    device = torch.device("cpu")
    log = CommLog(world.rank, world.size, ring_path(run_dir / "events", world.rank))
    connect(world, device=device, timeout_seconds=2 * _WATCHDOG_SECONDS)
    try:
        with Watchdog(log, limit_seconds=_WATCHDOG_SECONDS, folder=run_dir, world_size=world.size):
            mesh = Mesh.of_plan(job.plan, world, log=log, device=device)
            with closing(mesh):
                return measure_rank(job, reference, path, groups=mesh.data_groups(), save=save, load=load)
    finally:
        disconnect()


def measure_rank(
    job: VerifyJob,
    reference: Reference,
    path: Path,
    *,
    groups: DataGroups,
    save: Handover | None = None,
    load: Handover | None = None,
) -> RankReport:
    """What `run_candidate` does, on ranks that are connected already."""
    return _Candidate(job, reference, path, groups=groups).run(save, load)


class _Candidate:
    """Trains one rank and collects its report."""

    def __init__(self, job: VerifyJob, reference: Reference, path: Path, *, groups: DataGroups) -> None:
        self._job = job
        self._reference = reference
        self._groups = groups
        self._group = groups.all
        self._model = groups.tensor or alone("tp", groups.all)
        self._context = groups.context or alone("cp", groups.all)
        task = make_subject(job)
        self._data = WatchedData(task.train_data)
        self._rank = build_rank(job, task, groups, clip_norm=reference.clip_norm)
        self._names = dict(task.model.named_parameters())  # those of its stages
        self._executor = self._rank.executor
        self._rank.batches.dataset = self._data
        self._rank.engine.model.train()
        if job.inject is not None:  # before the observer, whose hooks must see what a fault does to an output
            job.inject(self._rank)
        if self._executor is not None:
            self._executor.watch = self._watched
        if reference.asks_for_float32:
            widen(self._rank.state, self._executor)
        self._layout = self._rank.engine.tensor_layout or TensorLayout(1, 0)
        self._observer = ModuleObserver(self._rank.engine.model)
        self._comparer = Comparer(
            path, reference.recorded, tolerances=dict(reference.tolerances), rank=self._rank.rank
        )
        self._samples: dict[tuple[int, int], Samples] = {}
        self._digests: dict[Key, int] = {}
        self._copy_digests: dict[Key, int] = {}
        self._issued: list[dict[str, int]] = []
        deferral = None if self._executor is None else self._executor.deferral
        self._contributions = Contributions(self._names, deferral)
        self._gradient_samples: dict[tuple[int, str], GradientSamples] = {}
        self._broken_ties: dict[tuple[str, ...], int] = {}
        self._attention_calls: list[Counter[str]] = []
        self._microbatch = 0

    def run(self, save: Handover | None, load: Handover | None) -> RankReport:
        """Train all steps, or up to one that is not finite."""
        first = 0 if load is None else load.step
        if self._reference.loss_scale is not None:
            state = self._rank.state
            state.loss_scale = LossScale(self._reference.loss_scale)
            state.expected_count = first_count(
                state.engine,
                self._micro_batch(1, 0),
                loss=self._rank.loss,
                num_microbatches=self._rank.num_microbatches,
            )
        if load is not None:
            load_rank(self._rank, load)
        self._compare_state(first)
        if save is not None and save.step == first:
            save_rank(self._rank, save)
        for step in range(first + 1, self._job.steps + 1):
            result = self._step(step)
            if not result.applied:
                break
            self._compare_gradients(step, result)
            self._compare_state(step)
            for name, buffer in self._buffers():
                self._comparer.compare(("buffers", step, -1, name), buffer)
            if save is not None and save.step == step:
                save_rank(self._rank, save)
        else:
            self._compare_optimizer(self._job.steps)
        return RankReport(
            rank=self._rank.rank,
            stats=tuple(self._comparer.stats),
            samples=self._samples,
            digests=self._digests,
            copy_digests=self._copy_digests,
            issued=tuple(self._issued),
            declared=declared_steps(
                self._rank,
                self._groups,
                self._reference.uses,
                self._attention_calls,
                num_microbatches=self._job.plan.num_microbatches,
            ),
            broken_ties=self._broken_ties,
            peak_memory_bytes=peak_memory(),
            gradient_samples=self._gradient_samples,
            transport=next(
                (group.transport.name for group in self._communicating() if group.transport), "none"
            ),
            copy=self._copy(),
            place=self._groups.pipeline.place if self._groups.has_teams and self._groups.pipeline else 0,
            uncalled=frozenset() if self._executor is None else self._executor.opened,
        )

    def _communicating(self) -> list[Group]:
        along = self._groups.pipeline
        return [self._group, self._model, *([] if along is None else [along.all])]

    def _copy(self) -> tuple[int, ...]:
        """The ranks that read the same samples: those of a copy of the model, each over the parts of a sequence."""
        spec, names = self._job.plan.mesh, ("pp", "cp", "tp")
        rank = self._rank.rank
        if spec.teams:  # none reads the same as another; see `RankReport.place`
            return (rank,)
        return (rank,) if rank >= spec.world_size else spec.peers(rank, names)

    def _watched(self, microbatch: int, before: Mapping[str, int]) -> AbstractContextManager[None]:
        """Around the forward of a stage."""
        self._microbatch = microbatch
        return self._observer.forward(self._compare_activation, before)

    def _step(self, step: int) -> StepResult:
        log = self._group.log
        log.reset_counters()
        if self._rank.context is not None:
            self._rank.context.declared.clear()
        self._contributions.clear()
        result = train_step(
            self._rank.state,
            lambda microbatch: self._micro_batch(step, microbatch),
            loss=self._observed_loss,
            num_microbatches=self._rank.num_microbatches,
            lr=self._job.config.train.optimizer.lr,
            clip_norm=self._rank.clip_norm,
        )
        if self._rank.context is not None:
            self._attention_calls.append(Counter(self._rank.context.declared))
        self._issued.append({call_name(op, axis): count for (op, axis), count in log.calls.items()})
        for check, value in (("loss", result.loss), ("grad_norm", result.grad_norm)):
            scalar = torch.tensor(value, dtype=torch.float64)
            self._comparer.compare((check, step, -1, check), scalar)
            self._digests[check, step, -1, check] = tensor_digest(scalar)
        return result

    def _micro_batch(self, step: int, microbatch: int) -> Any:
        self._step_number, self._microbatch = step, microbatch
        self._data.take()
        if self._groups.is_server:
            return None
        batch = self._rank.batches.micro_batch(step - 1, microbatch)
        self._samples[step, microbatch] = self._data.take()
        return cast_batch(batch, MASTER_DTYPES[self._job.plan.precision])

    def _observed_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        with self._observer.forward(self._compare_activation):
            return self._rank.loss(model, batch)

    def _compare_activation(self, name: str, tensor: Tensor) -> None:
        key = ("activations", self._step_number, self._microbatch, name)
        item = self._comparer.knows(key)
        module = name.partition(" ")[0]
        if item is None:  # in it samples have no rows of their own
            return
        tokens = self._layout.region.cut_tokens
        cut = self._layout.chunks_of(module, item.shape, tensor.shape, batch_dim=item.batch_dim)
        if isinstance(tensor, CutLogits):
            cut, tensor = (len(item.shape) - 1, tuple(tensor.sizes)), tensor.local
        if tokens is not None and (tensor.dim() <= tokens[0] or tensor.shape[tokens[0]] != tokens[1][1]):
            tokens = None
        if tokens is not None and cut is not None and cut[0] == tokens[0]:
            cut = None
        start = 0
        if item.batch_dim is not None:
            geometry = self._rank.batches.geometry
            part = geometry.rank_range(self._step_number - 1, self._microbatch)
            micro_size = geometry.global_batch // geometry.num_microbatches
            start = part.start % micro_size * item.rows_per_sample
            num_rows = tensor.shape[item.batch_dim]
            if tokens is not None and tokens[0] == item.batch_dim:
                _, (first, _, num_rows) = tokens
                start += first
            if num_rows != len(part) * item.rows_per_sample:
                self._comparer.report(key, f"shape {tuple(tensor.shape)} for {len(part)} samples")
                return
        positions = self._positions(item, tensor, tokens)
        repeated = self._layout.repeated_in(module, item.shape, tensor.shape)
        if repeated is not None:  # each key/value head once, wherever it is
            dim, width, heads, num_heads = repeated
            for head in dict.fromkeys(heads):
                ours = tensor.narrow(dim, heads.index(head) * width, width)
                chunk = Chunk((width,) * num_heads, head, dim)
                self._comparer.compare(key, ours, start=start, chunk=chunk, positions=positions)
            return
        if cut is None:
            self._comparer.compare(key, tensor, start=start, positions=positions)
            return
        dim, sizes = cut
        # Of several parts side by side, each has its own place in the whole.
        places = range(self._layout.index, len(sizes), self._layout.size)
        pieces = tensor.split([sizes[place] for place in places], dim)
        for place, piece in zip(places, pieces, strict=True):
            chunk = Chunk(sizes, place, dim)
            self._comparer.compare(key, piece, start=start, chunk=chunk, positions=positions)

    def _positions(self, item: Recorded, tensor: Tensor, tokens: TokenRange | None) -> Positions | None:
        """Which positions of whole sequences an output has; None where it has no sequence, or the whole of it.

        `tokens`: what tensor-parallel ranks have of what this rank's context has.
        """
        sizes = list(tensor.shape)
        if tokens is not None:
            sizes[tokens[0]] = tokens[1][2]
        found = self._in_context(item, sizes)
        if tokens is None or tokens[0] == item.batch_dim:
            return found
        dim, (first, ours, total) = tokens
        if found is None:
            found = Positions(dim, tuple(range(total)), total, 0, 1)
        index = found.index * self._layout.size + self._layout.index
        places = found.places[first : first + ours]
        return Positions(dim, places, found.length, index, found.num_parts * self._layout.size)

    def _in_context(self, item: Recorded, sizes: Sequence[int]) -> Positions | None:
        context = self._rank.context
        cut = None if context is None else context.region.cut
        if cut is None:
            return None
        for dim, (whole, ours) in enumerate(zip(item.shape, sizes, strict=False)):
            if dim != item.batch_dim and whole == cut.length and ours == cut.local_length:
                runs = cut.runs(self._context.index)
                places = [place for start, stop in runs for place in range(start, stop)]
                return Positions(dim, tuple(places), cut.length, self._context.index, self._context.size)
        return None

    def _compare_piece(
        self, key: Key, shard: tuple[str, int], piece: Tensor, *, divisor: float = 1.0
    ) -> None:
        """Hold a flat piece of this rank's part of a parameter, from an element on, against the whole."""
        name, start = shard
        flat, local = piece.reshape(-1), self._names[name].shape
        for place, first, last in self._layout.runs(name, local, start, start + flat.numel()):
            self._comparer.compare(key, flat[first - start : last - start], start=place, divisor=divisor)

    def _compare_gradients(self, step: int, result: StepResult) -> None:
        """Gradients before clipping: what the shards hold was multiplied by the clip coefficient."""
        divisor = clip_coefficient(result.grad_norm, self._reference.clip_norm)
        for name in self._names if self._model.size == 1 else ():
            part = self._contributions.elements(name, result.scale / divisor)
            self._gradient_samples[step, name] = GradientSamples(part, {}, {})
        for shard in self._rank.engine.shards:
            key = ("gradients", step, -1, shard.name)
            has_gradient = shard.parameter.grad is not None
            if has_gradient == (self._comparer.knows(key) is None):
                whose = "the candidate" if has_gradient else "the reference"
                self._comparer.report(key, f"only {whose} has a gradient")
            elif has_gradient:
                self._compare_piece(key, (shard.name, shard.piece.start), shard.gradient, divisor=divisor)
                if self._model.size == 1 and self._comparer.stats[-1].num_wrong:
                    self._sample_sum(key, shard, divisor)

    def _sample_sum(self, key: Key, shard: ShardParameter, divisor: float) -> None:
        """Keep some elements of a gradient that is wrong: they may say whose part of it is."""
        part = self._gradient_samples[key[1], shard.name].part
        piece, flat = shard.piece, shard.gradient.reshape(-1)
        places = [place for place in part if piece.start <= place < piece.stop]
        summed = {place: float(flat[place - piece.start]) / divisor for place in places}
        expected = self._comparer.elements(key, places)
        self._gradient_samples[key[1], shard.name] = GradientSamples(part, summed, expected)

    def _compare_optimizer(self, step: int) -> None:
        optimizer = self._rank.state.optimizer.torch_optimizer
        states = {} if optimizer is None else optimizer.state  # a rank may own nothing
        for shard in self._rank.engine.shards:
            for part, value in states.get(shard.parameter, {}).items():
                if isinstance(value, Tensor):
                    key = ("optimizer", step, -1, f"{shard.name} {part}")
                    if value.dim():
                        self._compare_piece(key, (shard.name, shard.piece.start), value)
                    else:
                        self._comparer.compare(key, value)
                    self._digest_part(key, shard, value)

    def _compare_state(self, step: int) -> None:
        """What a step leaves, and what the first one finds: parameters, replicas and ties."""
        for name, start, piece in self._parameter_pieces():
            self._compare_piece(("parameters", step, -1, name), (name, start), piece)
        self._digest_replicas(step)
        for names in self._reference.ties:
            if not self._is_tied(names):
                self._broken_ties.setdefault(names, step)

    def _parameter_pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        """(name, first flat element, values) of everything this rank owns, frozen parameters included."""
        engine = self._rank.engine
        bucketed = set()
        for memory in engine.memories:
            bucketed.update(memory.parameters)
            for piece in memory.pieces():
                yield (
                    piece.name,
                    piece.start,
                    memory.master_shard[piece.offset : piece.offset + piece.stop - piece.start],
                )
        for name, parameter in self._names.items():
            if parameter not in bucketed:
                yield name, 0, parameter

    def _digest_part(self, key: Key, shard: ShardParameter, value: Tensor) -> None:
        """A checksum of what goes with this rank's part of a parameter, where other ranks hold a copy of it."""
        if not self._job.plan.policy.shards_optimizer:
            self._digest(key, shard.name, value)
        elif self._rank.engine.groups.replicate.size > 1:
            part = f"{key[3]} [{shard.piece.start}:{shard.piece.stop}){self._whose(shard.name)}"
            self._copy_digests[key[0], key[1], key[2], part] = tensor_digest(value)

    def _whose(self, name: str) -> str:
        """Of which rank of a copy of the model a part is that the others have not."""
        return f" of tp {self._layout.index}" if name in self._layout.cuts else ""

    def _digest(self, key: Key, name: str, value: Tensor) -> None:
        """A checksum of what every rank has whole, or of a part of parameter `name` that ranks at our tp index have."""
        whose = self._whose(name)
        if whose or self._executor is not None:
            self._copy_digests[(*key[:3], key[3] + whose)] = tensor_digest(value)
        else:
            self._digests[key] = tensor_digest(value)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """What follows the samples: on ranks that have some."""
        return iter(()) if self._groups.is_server else self._rank.engine.model.named_buffers()

    def _digest_replicas(self, step: int) -> None:
        """Checksums of what every rank holds whole after a step, and of parts that copies of the model share.

        Of parameters a server holds its own as they are now.
        """
        engine = self._rank.engine
        stale = {p for memory in engine.memories if memory.transient for p in memory.parameters}
        if self._groups.is_server:
            stale = {self._names[p.name] for unit in engine.units for b in unit.buckets for p in b.parameters}
            stale -= {self._names[shard.name] for shard in engine.shards}
        some = self._groups.num_servers or self._executor is not None
        digests = self._copy_digests if some else self._digests
        for name, parameter in self._names.items():
            if parameter not in stale:
                if name in self._layout.cuts:
                    self._digest(("parameters", step, -1, name), name, parameter)
                else:
                    digests["parameters", step, -1, name] = tensor_digest(parameter)
        for name, buffer in self._buffers():
            digests["buffers", step, -1, name] = tensor_digest(buffer)
        for shard in engine.shards:
            if step:  # before there are none
                self._digest_part(("gradients", step, -1, shard.name), shard, shard.gradient)
            if engine.policy.shards_optimizer:
                self._digest_part(("parameters", step, -1, shard.name), shard, shard.parameter)

    def _is_tied(self, names: tuple[str, ...]) -> bool:
        """Whether these names are still one tensor: one Parameter in one memory."""
        named = dict(self._rank.engine.model.named_parameters(remove_duplicate=False))
        held = [named.get(name) for name in names]  # all None on a rank without a stage that uses them
        return all(parameter is held[0] for parameter in held)
