"""One rank of a user's own script: connected, with models, optimizers, batches and metrics made for it.

Owns the life of the connection and what a script asks for by name. How a step runs is `own_loop.py`'s; which world and
folder it is, the launcher's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshwright.comm import ops
from meshwright.comm.log import CommLog
from meshwright.comm.mesh import Mesh, World, connect, disconnect, is_connected
from meshwright.comm.watchdog import RunFiles, Watchdog
from meshwright.data.batches import Batches, MapStyle, heldout_batches
from meshwright.data.index_law import BatchGeometry
from meshwright.errors import LoopError, PlanError
from meshwright.layout.plan import TrainPlan
from meshwright.training.config import RunConfig
from meshwright.training.console import Console
from meshwright.training.determinism import prepare
from meshwright.training.device import choose_device
from meshwright.training.job_checkpoints import JobCheckpoints, Position
from meshwright.training.metrics import MetricsWriter, gather_numbers
from meshwright.training.own_build import Site, build_model
from meshwright.training.own_loop import ShardedModel
from meshwright.training.own_optimizer import Choice, Groups, make_own_optimizer
from meshwright.training.own_stages import check_alike
from meshwright.training.own_step import LoopRules, StepBatch
from meshwright.training.plain_state import stream_state
from meshwright.training.planning import plan_of
from meshwright.training.precision import MASTER_DTYPES
from meshwright.training.step import evaluate
from meshwright.training.tree import cast_batch

# On which a bare scalar loss must be a mean.
_TRIAL_SAMPLES = 8


class Job:
    """This process as one rank of a job; a context manager.

    Args:
        config: the plan, the seed and the folder.
        world: who this process is.
        run_dir: where metrics go, the same on every rank.
        files: where ranks leave what is needed after a failure.
        console: where rank 0 prints; a console without a stream elsewhere.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        is_first: whether this is rank 0.
        device: where this rank computes.
        step: number of the step that `batches` is at, from 1 (without `batches`: calls of `log`); resumed, it goes on.
    """

    def __init__(
        self, config: RunConfig, world: World, *, run_dir: Path, files: RunFiles, console: Console
    ) -> None:
        self.config = config
        self.rank = world.rank
        self.world_size = world.size
        self.is_first = world.rank == 0
        self.run_dir = run_dir
        self._position = Position()
        self._world = world
        self._files = files
        self._console = console
        self._models: list[ShardedModel] = []
        self._writer: MetricsWriter | None = None
        self._has_batches = False
        self._stack = ExitStack()

    def __enter__(self) -> Job:
        """Connect to the other ranks.

        Raises:
            LoopError: E705 inside another job.
            PlanError: E200, E204, E207 for a plan that this world cannot run, E223 for parameter servers, E237 for
                places of a pipeline with unlike numbers of ranks.
            WorkerError: E403 when the port is taken or nobody answers.
        """
        if is_connected():
            raise LoopError(
                "E705",
                "this process has joined a process group already; one job at a time, and it connects by itself",
            )
        config, world = self.config, self._world
        if config.plan.processes not in (None, world.size):
            raise PlanError(
                "E200",
                f"plan.processes={config.plan.processes}, but {world.size} processes started. A script is started by "
                f"`meshwright train script.py -n {config.plan.processes}`; leave plan.processes out.",
            )
        if config.plan.mode == "auto":
            raise PlanError(
                "E278",
                'plan.mode = "auto" looks at the model before ranks are laid out, and a loop of your own shows it '
                "after. Train by a run file (meshwright train run.toml), or leave plan.mode out.",
            )
        if config.plan.sync == "parameter_server":
            raise PlanError(
                "E223",
                'plan.sync = "parameter_server" has ranks without samples, and your loop runs the model on every rank. '
                "Train by a run file (meshwright train run.toml), or set plan.sync=native, with plan.zero=1 for "
                "optimizer state on one rank each.",
            )
        check_alike(config.plan.stage_ranks)
        self.device = choose_device(config, world)
        self._plan = self._plan_for(world.size, None)
        log = CommLog(world.rank, world.size, self._files.ring(world.rank))
        limit = config.train.watchdog
        self._stack.callback(self._console.close)
        connect(world, device=self.device, timeout_seconds=2 * limit + 60)
        self._stack.callback(disconnect)
        watchdog = Watchdog(log, limit_seconds=limit, folder=self._files.root, world_size=world.size)
        self._stack.enter_context(watchdog)
        plan = self._plan
        mesh = Mesh.of_plan(plan, world, log=log, device=self.device)
        self._stack.callback(mesh.close)
        for text in mesh.warnings:
            self._console.line(text)
        self._groups = mesh.data_groups()
        rules = LoopRules(config.train.seed, config.train.dropout, config.train.clip_norm)
        self._site = Site(self._plan, mesh, rules)
        self._checkpoints = JobCheckpoints(self.run_dir, self._plan, self._position, say=self._console.line)
        prepare(seed=config.train.seed, deterministic=config.train.deterministic)
        return self

    @property
    def step(self) -> int:  # noqa: D102 - see Attributes
        return self._position.step

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._checkpoints.finish()
        for model in self._models:
            model.close()
        if self._writer is not None:
            self._writer.close()
        self._stack.close()

    def _plan_for(self, global_batch: int, micro_batch: int | None) -> TrainPlan:
        micro_batch = micro_batch or self.config.plan.micro_batch if global_batch != self.world_size else None
        plan = self.config.plan.model_copy(update={"micro_batch": micro_batch})
        train = self.config.train.model_copy(update={"global_batch": global_batch})
        config = self.config.model_copy(update={"plan": plan, "train": train})
        source = {"slurm": "SLURM_NTASKS", "environment": "WORLD_SIZE", "single": ""}[self._world.source]
        return plan_of(config, world_size=self.world_size, world_source=source)

    # Models and optimizers.

    def build(
        self,
        build: Callable[[], Any],
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        data: MapStyle | None = None,
    ) -> ShardedModel:
        """Build a module under the job's seed and shard it by the plan.

        Args:
            build: () -> nn.Module, the same on every rank. Parameters that it leaves on the meta device are reset
                module by module, so that no rank holds the whole model.
            loss: (model, batch) -> (sum, count), or a bare scalar that is a mean over samples; for `model.step`.
            With plan.pp a pair.
            data: with plan.pp, samples like those of training: where the model can be cut is seen on two of them.

        Raises:
            PlanError: E113 when ranks built different models, E206, E208 for what cannot be sharded or cut, E237 for
                what a model in stages lacks.
            ConfigError: E111 for a module on the meta device without `reset_parameters`.
        """
        model = build_model(
            build, self._site, loss=loss, data=data, siblings=self._models, say=self._console.line
        )
        self._models.append(model)
        return model

    def optimizer(
        self,
        model: ShardedModel,
        kind: type[torch.optim.Optimizer],
        *,
        only: Choice | None = None,
        groups: Groups | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """An optimizer of class `kind` over this rank's part of the parameters; torch's schedulers work on it.

        Its `step()` ends a step: the ranks agree, gradients are normalised and clipped, weights are updated and handed
        to all ranks, gradients are forgotten.

        Args:
            model: of `build`.
            kind: a class of torch.optim or one like them: `torch.optim.AdamW`.
            only: the parameters it trains, by a pattern (`generator.*`) or a function of the name; None: all.
            groups: options of some: [(pattern, options), ...], the first that fits; or a function name -> options.
            **options: of `kind`.

        Raises:
            PlanError: E204 for a rule that flat shards would change.
            LoopError: E706 for parameters that do not exist or have an optimizer already.
        """
        return make_own_optimizer(model, kind, options, only=only, groups=groups)

    # Data.

    def batches(
        self,
        dataset: MapStyle,
        *,
        global_batch: int,
        steps: int,
        micro_batch: int | None = None,
        shuffle: bool = True,
    ) -> Iterator[StepBatch]:
        """This rank's part of each step's batch; which samples a step holds depends on seed and step only.

        Args:
            dataset: map style, with items that torch's default collate stacks.
            global_batch: samples a step, over all ranks.
            steps: number of the last step, counted from the start of the job: after a resume, or in a second call,
                what is left of them comes.
            micro_batch: samples of one forward on one rank; None: plan.micro_batch, else all at once.
            shuffle: in an order drawn from the seed.

        Yields:
            The micro-batches of a step, for `model.step`, or one by one for `model.accumulate(len(batch))`.

        Raises:
            PlanError: E203 when the batch cannot be cut evenly.
            ConfigError: E105 for an empty dataset.
        """
        plan = self._plan_for(global_batch, micro_batch)
        position = self._position
        geometry = BatchGeometry(
            global_batch,
            plan.num_microbatches,
            self._groups.num_readers,
            self._groups.reader_index,
            first_sample=position.samples - position.step * global_batch,
        )
        reader = Batches(dataset, geometry, seed=self.config.train.seed, shuffle=shuffle)
        self._has_batches = True
        return self._read(reader, steps)

    def _read(self, reader: Batches, steps: int) -> Iterator[StepBatch]:
        geometry, position = reader.geometry, self._position
        for step in range(position.step, steps):
            position.step, position.samples = step + 1, geometry.start_of(step + 1)
            yield StepBatch(
                geometry, partial(self._micro_batch, reader, step), trial=partial(self._trial, reader)
            )

    def _trial(self, reader: Batches) -> Any:
        """Samples spread over the dataset: the first may not be like the others."""
        size = len(reader.dataset)
        indices = sorted({i * size // _TRIAL_SAMPLES for i in range(_TRIAL_SAMPLES)})
        return self.to_device(default_collate([reader.dataset[index] for index in indices]))

    def _micro_batch(self, reader: Batches, step: int, microbatch: int) -> Any:
        return self.to_device(reader.micro_batch(step, microbatch))

    def to_device(self, batch: Any) -> Any:
        """A batch of your own, nested, on this rank's device and with floating tensors in the plan's precision."""
        return cast_batch(batch, MASTER_DTYPES[self._plan.precision], self.device)

    # Checkpoints.

    def save(self, **user: Any) -> None:
        """Write a checkpoint into `ckpt` of the job's folder, after a step; every rank calls. It is written meanwhile.

        It holds the model, the optimizers with their settings, the position in the data, and what is given; it loads
        on any number of ranks and under any plan. The newest 3 are kept.

        Args:
            **user: of your own, as JSON can hold it: `scheduler=scheduler.state_dict()`.

        Raises:
            SaveError: E504 when this save, or the one before, could not be written.
            LoopError: E707 in the middle of a step, or where there is not one model.
        """
        self._checkpoints.save(self._models, user)

    def resume(self, place: str | Path | None = None) -> dict[str, Any] | None:
        """Go on from the newest valid checkpoint; after `build` and `optimizer`, before `batches`. Every rank calls.

        Args:
            place: a checkpoint, or a folder with some, which must exist; None: this job's own folder (give it `out=`),
                where there may be none yet.

        Returns:
            What `save` was given; None for a fresh start.

        Raises:
            CheckpointError: E501 another model, E502 damaged, E503 none there, E505 other optimizers.
            LoopError: E707 in the middle of a step, or where there is not one model.
        """
        where = None if place is None else Path(place)
        return self._checkpoints.resume(self._models, where, required=place is not None)

    def state_dict(self, model: ShardedModel) -> Iterator[tuple[str, Tensor | None]]:
        """As `model.state_dict()`, a tensor at a time: (name, tensor), None for the tensor on all ranks but the first.

        Every rank must iterate to the end.
        """
        return stream_state(model.state)

    # Numbers.

    def barrier(self) -> None:
        """Return once every rank has come here."""
        ops.barrier(self._groups.everyone, cause="barrier of the script")

    def mean(self, value: float | Tensor) -> float:
        """Mean over ranks of one number of each; every rank calls."""
        numbers = gather_numbers(_number(value), self._groups.all, self.device)
        return sum(numbers) / len(numbers)

    def evaluate(self, model: ShardedModel, dataset: MapStyle, *, samples: int = 512) -> float:
        """Mean loss over held-out samples, in evaluation mode; the same on every rank, and on every mesh.

        Args:
            model: built with a loss that returns (sum, count).
            dataset: held-out samples, map style.
            samples: how many, over all ranks.
        """
        readers, index = self._groups.num_readers, self._groups.reader_index
        batches = heldout_batches(dataset, samples, batch_size=64, dp_size=readers, dp_rank=index)
        moved = (self.to_device(batch) for batch in batches)
        return evaluate(model.state.engine, moved, loss=model.loss)

    def log(self, step: int | None = None, **values: float | Tensor) -> None:
        """Print a line and write one to `metrics.jsonl`, on rank 0; every rank may call.

        Args:
            step: its number; None: `job.step`.
            **values: numbers as rank 0 has them; see `mean`. loss, grad_norm, lr and tokens are added.
        """
        if not self._has_batches:
            self._position.step += 1
        if not self.is_first:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        record: dict[str, Any] = {"step": self.step if step is None else step, **self._known(), **numbers}
        if self._writer is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._writer = MetricsWriter(self.run_dir, tensorboard="tensorboard" in self.config.log.to)
        self._writer.write(record)
        shown = {name: record[name] for name in record if name not in ("time", "tokens")}
        self._console.line(" ".join(f"{name}={_short(value)}" for name, value in shown.items()))

    def _known(self) -> dict[str, Any]:
        """Of the newest model that has made a step."""
        stepped = [model for model in self._models if model.result is not None]
        if not stepped:
            return {"time": time.time()}
        model, result = stepped[-1], stepped[-1].result
        assert result is not None, "models without a result were left out"
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": float(model.optimizers[0].param_groups[0]["lr"]),
            "tokens": model.state.tokens,
            "time": time.time(),
        }


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
