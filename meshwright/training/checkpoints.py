"""Checkpoints of a run under way: when one is due, on which one all ranks go on, and what a user is told.

Owns the agreement of ranks about checkpoints. All of it is in the main thread; the writing thread uses no group. Must
not know how tensors are found (`saving.py`) or lie in files (`checkpoint/`).
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint import folder
from meshwright.checkpoint.compare import check_same_model
from meshwright.checkpoint.folder import ResumeFrom
from meshwright.checkpoint.manifest import Manifest, RunFacts
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.writer import Place, SaveReport, Writer
from meshwright.comm.ops import DataGroups
from meshwright.errors import CheckpointError
from meshwright.layout.plan import TrainPlan
from meshwright.training.metrics import gather_numbers
from meshwright.training.saving import (
    expected_tensors,
    items_to_save,
    load_generators,
    load_items,
    load_numbers,
)
from meshwright.training.sections import SaveConfig
from meshwright.training.state import TrainState

_ATTEMPT_BITS = 48  # exact in the float64 that carries it


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run goes on."""

    path: Path
    manifest: Manifest


class Checkpoints:
    """Saves and resumes one rank's run; every rank makes the same calls.

    Args:
        root: folder of this run's checkpoints.
        state: what is saved.
        settings: the section `save` of a run file.
        facts: the run's facts at the time of a save.
        say: prints a line for people on rank 0.
        groups: of an asynchronous run, whose state is of a rank alone; None: the state's.
    """

    def __init__(
        self,
        root: Path,
        state: TrainState,
        *,
        settings: SaveConfig,
        facts: Callable[[], RunFacts],
        say: Callable[[str], None],
        groups: DataGroups | None = None,
    ) -> None:
        self._root = root
        self._state = state
        self._settings = settings
        self._facts = facts
        self._say = say
        self._groups = groups
        self._group = (groups or state.engine.groups).everyone
        self._is_first = self._group.index == 0
        self._writer: Writer | None = None
        self._saved_step = -1
        self.newest: Path | None = None

    # Going on.

    def resume(self, request: ResumeFrom, *, optimizer: str, numbers: dict[str, Any]) -> Resumed | None:
        """Load the newest valid checkpoint at a place, the same on every rank; None where there is none.

        Args:
            request: where to look.
            optimizer: name of the update rule that is to go on.
            numbers: sizes that keys of `model` set, for the text of E501.

        Raises:
            CheckpointError: E501 another model, E502 the one that was asked for is damaged, E503 there is none,
                E505 state that this run cannot take.
        """
        if self._is_first and request.place.resolve() in (self._root.resolve(), self._root.resolve().parent):
            folder.clean(self._root)
        found = self._choose(request)
        if found is None:
            return None
        path, manifest = found.path, found.manifest
        shapes = {name: shape for _, name, shape in expected_tensors(self._state.engine)}
        check_same_model(path, manifest, shapes, numbers=numbers)
        saved = manifest.run.optimizer
        if saved and saved != optimizer:
            raise CheckpointError(
                "E505",
                f"{path} holds optimizer state of {saved}, the run has train.optimizer.name = {optimizer!r}. Go on "
                f"with {saved}, or start anew from the weights: meshwright ckpt export, then meshwright ckpt import.",
            )
        with CheckpointReader(path, manifest) as reader:
            load_items(self._state, reader, self._groups)
            load_numbers(self._state, manifest.run)
            exact = load_generators(self._state.engine, reader)
        if manifest.run.dropout == "native" and not exact:
            self._say(
                f'W501 train.dropout = "native": generator states are of {manifest.world_size} ranks, and '
                f"{self._group.size} go on; their masks begin anew from the seed"
            )
        self._saved_step, self.newest = self._state.step, path
        return found

    def _choose(self, request: ResumeFrom) -> Resumed | None:
        exact = request.is_exact
        listed = folder.find_checkpoints(request.place)
        for number in range(int(self._of_first(len(listed)))):
            # Rank 0's list counts: another host may see a rename later.
            step = int(self._of_first(folder.step_of(listed[number]) if number < len(listed) else -1))
            path = next((path for path in listed if folder.step_of(path) == step), request.place)
            manifest, error = self._checked(path)
            if manifest is not None:
                return Resumed(path, manifest)
            if exact:
                raise error
            self._say(f"resume {error}")
        if request.required:
            seen = f"none of {len(listed)} there is valid" if listed else "there is none"
            raise CheckpointError(
                "E503",
                f"no valid checkpoint in {str(request.place)!r}: {seen}. Give a run folder, or one checkpoint of "
                f"it (ckpt/step-NNNNNNNN); runs write them where save.every is set.",
            )
        return None

    def _checked(self, path: Path) -> tuple[Manifest | None, CheckpointError]:
        """The manifest if every rank finds its share of the files whole; else the same error on every rank."""
        group, manifest = self._group, None
        error: CheckpointError | None
        try:
            manifest = folder.read_manifest(path)
            error = self._damage(path, manifest, group.index)
        except CheckpointError as caught:
            error = caught
        bad = gather_numbers(float(error is not None), group, self._state.engine.device)
        if not any(bad):
            assert manifest is not None, f"{path} was found whole without a manifest"
            return manifest, CheckpointError("E502", "")
        if error is None and manifest is not None:
            error = self._damage(path, manifest, bad.index(1.0))
        if error is None:
            error = CheckpointError("E502", f"{path} cannot be read by rank {bad.index(1.0)}")
        return None, error

    def _damage(self, path: Path, manifest: Manifest, index: int) -> CheckpointError | None:
        count = self._group.size
        return folder.check_files(path, manifest, index=index, count=count, progress=self._progress)

    def _of_first(self, value: float) -> float:
        """Rank 0's value on every rank."""
        return gather_numbers(value, self._group, self._state.engine.device)[0]

    def _progress(self) -> None:
        self._group.log.progress("checkpoint")

    # Saving.

    def start(self) -> None:
        """Before the first step of a run that saves: put the folder in order and agree on a word for this run."""
        if self._settings.every is None:
            return
        if self._is_first:
            folder.clean(self._root)
            aside = folder.set_aside(self._root, after=self._state.step)
            for path in aside:
                self._say(f"save   {path.name}: of an earlier run beyond step {self._state.step}, set aside")
        attempt = int(self._of_first(float(secrets.randbits(_ATTEMPT_BITS)) if self._is_first else 0.0))
        place = Place(
            folder=self._root,
            rank=self._group.index,
            world_size=self._group.size,
            attempt=f"{attempt:x}",
            keep=self._settings.keep,
        )
        expected = expected_tensors(self._state.engine)
        self._writer = Writer(place, self._settings.background, expected, progress=self._progress)
        self._clock = _Clock(time.perf_counter(), self._state.step)

    def after_step(self, *, last: bool) -> float | None:
        """Save if it is time; the seconds for which training stood still, None where nothing was saved.

        Raises:
            SaveError: E504 when this save, or one in the background, could not be written.
        """
        if self._writer is None:
            return None
        self._tell(self._writer.poll())
        if not self._is_due(last=last) or self._state.step == self._saved_step:
            return None
        self._group.log.progress("checkpoint")
        self._tell(self._writer.save(items_to_save(self._state, self._groups), self._facts()))
        self._saved_step = self._state.step
        return self._writer.stall_seconds

    def finish(self) -> None:
        """Wait for what is still being written; raises E504 as `after_step`."""
        if self._writer is not None:
            self._tell(self._writer.finish())

    def _is_due(self, *, last: bool) -> bool:
        every = self._settings.every
        assert every is not None, "a run that does not save asks for no save"
        if last or every.unit == "end":
            return last
        if every.unit == "steps":
            return self._state.step % int(every.amount) == 0
        return self._clock.is_due(self._state.step, every.amount, agree=self._slowest)

    def _slowest(self, seconds: float) -> float:
        return max(gather_numbers(seconds, self._group, self._state.engine.device))

    def _tell(self, report: SaveReport | None) -> None:
        if report is None:
            return
        self.newest = report.path
        self._say(
            f"save   {report.path}   {report.nbytes / 2**20:.1f} MiB on {self._group.size} ranks, training stood "
            f"still {report.stall_seconds:.3f} s of {report.seconds:.3f} s"
        )


class _Clock:
    """Saves by time at steps on which all ranks agree, without asking them at every step.

    At agreed steps ranks compare how long it is since the last save, and from that take the next step to ask at.
    """

    def __init__(self, now: float, step: int) -> None:
        self._saved_at, self._saved_step = now, step
        self._ask_at = step + 1

    def is_due(self, step: int, every_seconds: float, *, agree: Callable[[float], float]) -> bool:
        """Whether to save after `step`; `agree` gives every rank the largest of all ranks' numbers."""
        if step < self._ask_at:
            return False
        elapsed = agree(time.perf_counter() - self._saved_at)
        if elapsed >= every_seconds:
            self._saved_at, self._saved_step = time.perf_counter(), step
            self._ask_at = step + 1
            return True
        seconds_a_step = elapsed / (step - self._saved_step)
        # Not past the time, should steps get slower: ask again when half of the rest is over.
        self._ask_at = step + max(1, math.floor((every_seconds - elapsed) / seconds_a_step / 2))
        return False


def resume_lines(found: Resumed, now: RunFacts, *, world_size: int, described: str) -> list[str]:
    """What a user is told of a resumed run: where it came from, what is kept and what has changed."""
    saved = found.manifest.run
    plan = f" ({TrainPlan.from_json(json.dumps(saved.plan)).describe()})" if saved.plan else ""
    lines = [
        f"resume {found.path}: step {saved.step:,}, saved on {found.manifest.world_size} ranks{plan} → "
        f"{world_size} ranks ({described})"
    ]
    kept = [f"next sample {saved.samples:,}", f"lr step {saved.step:,}"]
    changed = []
    for name, key in (("global batch", "global_batch"), ("accumulate", "num_microbatches")):
        before, after = saved.plan.get(key), now.plan.get(key)
        if before == after:
            kept.insert(0, f"{name} {after}")
        elif before is not None:
            changed.append(f"{name} {before} → {after}")
    changed += [
        f"{key} {saved.config.get(key)} → {value}"
        for key, value in now.config.items()
        if key in saved.config and saved.config[key] != value
    ]
    if saved.seed == now.seed:
        kept.append("rng" if saved.dropout == now.dropout == "stateless" else f"seed {now.seed}")
    return [*lines, f"kept   {' · '.join(kept)}     changed  {' · '.join(changed) or 'nothing else'}"]
