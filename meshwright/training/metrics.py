"""Numbers of a run: one JSON object a step (always), TensorBoard (asked for), and the figures of the end.

JSON lines are the source of truth; everything else is drawn from the same records.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from meshwright.comm import ops
from meshwright.comm.ops import Group
from meshwright.training.flops import FlopsPerSample, Peak


@dataclass(frozen=True)
class StepRecord:
    """One line of `metrics.jsonl`.

    Attributes:
        step: counted from 1.
        loss: mean over everything the loss counted.
        grad_norm: before clipping; None where the step was skipped because fp16 gradients overflowed.
        lr: learning rate of the step.
        tokens: counted elements since the start of the run.
        seconds: wall time of the step on rank 0.
        tokens_per_second: over all ranks.
        mfu: model FLOPs (full attention) / peak; None where the peak is unknown.
        hfu: executed FLOPs (recomputation included) / peak; None where the peak is unknown.
        eval_loss: held-out loss after this step; None where none was computed.
        save_stall_seconds: for which a checkpoint after this step stopped training; None where none was begun.
        loss_scale: of the next step (fp16); None in other precisions.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    hfu: float | None
    eval_loss: float | None = None
    save_stall_seconds: float | None = None
    loss_scale: float | None = None


class Meter:
    """Turns step times into throughput and utilisation.

    Args:
        flops: of one sample.
        peak: of one device, or None.
        world_size: number of devices.
        global_batch: samples a step.
        executed: executed FLOPs, recomputation included, over the model's; None where unknown.
    """

    def __init__(
        self,
        flops: FlopsPerSample,
        peak: Peak | None,
        *,
        world_size: int,
        global_batch: int,
        executed: float | None = 1.0,
    ) -> None:
        self._executed = executed
        self._flops_per_step = flops.full * global_batch
        self._flops_per_step_causal = flops.causal * global_batch
        self._peak = peak
        self._world_size = world_size

    def utilisation(self, seconds: float, *, causal: bool = False) -> float | None:
        """MFU of a step of `seconds`: time of the model's FLOPs at peak / time of the step.

        None where the peak or the model's FLOPs are unknown, where no step was made, and where the result exceeds 1:
        then the peak is wrong (a CPU's was measured while other programs ran), and a number would lie.
        """
        if self._peak is None or not self._flops_per_step or not seconds:
            return None
        flops = self._flops_per_step_causal if causal else self._flops_per_step
        share = flops / (seconds * self._peak.flops_per_second * self._world_size)
        return share if share <= 1.0 else None

    def executed_share(self, seconds: float) -> float | None:
        """HFU of a step of `seconds`: as MFU, of the FLOPs that ran, recomputation included."""
        useful = self.utilisation(seconds)
        if useful is None or self._executed is None:
            return None
        share = useful * self._executed
        return share if share <= 1.0 else None


class MetricsWriter:
    """`metrics.jsonl` in the run folder, and TensorBoard events beside it when asked for.

    Args:
        run_dir: the run folder.
        tensorboard: whether to write events.
        after_step: of a resumed run: lines up to this step stay, later ones are of the branch it has left.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool, after_step: int = 0) -> None:
        path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= after_step] if after_step else []
        self._file: TextIO = path.open("w", buffering=1)
        self._file.writelines(kept)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "events"))

    def write(self, record: dict[str, Any]) -> None:
        """Write one line of numbers of your own, with `step` among them."""
        print(json.dumps(record), file=self._file)
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def step(self, record: StepRecord) -> None:
        """Write one step."""
        print(json.dumps(asdict(record)), file=self._file)
        if self._board is None:
            return
        for name in ("loss", "grad_norm", "lr", "tokens_per_second", "eval_loss", "loss_scale"):
            value = getattr(record, name)
            if value is not None:
                self._board.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[str]:
    """Whole lines of a file that may not exist; a crash may have cut the last one."""
    text = path.read_text() if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory this rank has held: allocated on its GPU, or resident in its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gather_numbers(value: float, group: Group, device: torch.device) -> list[float]:
    """One number of every rank of the group, in rank order."""
    out = torch.zeros(group.size, dtype=torch.float64, device=device)
    ops.all_gather(
        out, torch.tensor([value], dtype=torch.float64, device=device), group, cause="numbers"
    ).wait()
    return out.tolist()


def median_step_seconds(seconds: Sequence[float]) -> float:
    """Median over steps, the first left out where there are others (it warms up)."""
    steady = seconds[1:] or seconds
    return statistics.median(steady) if steady else 0.0
