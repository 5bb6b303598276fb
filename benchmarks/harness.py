"""Races of training steps on CPU ranks: all candidates in the same processes, timed in turn, order rotating.

A barrier before each timing, the slowest rank counts, the median over rounds is reported with CPU time per rank and
bytes over the loopback interface. Ratios are only formed inside one race. Every candidate also reports its loss after
the same number of steps: a speed-up that changes the numbers would show.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.initial import initialise
from meshwright.models.mlp import MLP, MLPConfig


@dataclass(frozen=True)
class Workload:
    """A model and the samples of one rank and step."""

    name: str
    about: str
    samples: int
    seq_len: int
    config: Any

    def model(self) -> torch.nn.Module:
        kind = GPT if isinstance(self.config, GPTConfig) else MLP
        model = kind(self.config)
        initialise(model, 0)
        return model

    def batch(self, rank: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + rank)
        if isinstance(self.config, GPTConfig):
            shape = (self.samples, self.seq_len)
            tokens = torch.randint(0, self.config.vocab_size, shape, generator=generator)
            return {"tokens": tokens, "labels": torch.roll(tokens, -1, 1)}
        inputs = torch.randn(self.samples, self.config.input_dim, generator=generator)
        labels = torch.randint(0, self.config.num_classes, (self.samples,), generator=generator)
        return {"inputs": inputs, "labels": labels}


def _gpt(layers: int, dim: int, heads: int, vocab: int, seq: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers,
        dim=dim,
        num_heads=heads,
        ffn_dim=4 * dim,
        vocab_size=vocab,
        max_seq_len=seq,
        tied_embedding=False,
    )


WORKLOADS = {
    "a": Workload(
        "a", "GPT 10 x 256, vocab 4096, 10 M, 8 x 128 tokens a rank", 8, 128, _gpt(10, 256, 8, 4096, 128)
    ),
    "b": Workload(
        "b", "GPT 12 x 768, vocab 8192, 98 M, 2 x 256 tokens a rank", 2, 256, _gpt(12, 768, 12, 8192, 256)
    ),
    "c": Workload(
        "c",
        "MLP 4 x 2048², 16.8 M, 16 samples a rank (communication bound)",
        16,
        0,
        MLPConfig(num_layers=4, dim=2048, input_dim=2048, num_classes=16),
    ),
}


@dataclass
class Timing:
    """Figures of one candidate over all rounds, in milliseconds and megabytes."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loopback: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.wall)


def launch(function: Callable[..., Any], world_size: int, *args: Any, pin: bool) -> Any:
    """Run `function(rank, world_size, *args)` on fresh processes, one thread each; returns rank 0's result."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, port, pin, sender, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        raise SystemExit("a rank failed; its traceback is above") from None
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    return result


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    pin: bool,
    sender: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    if pin:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    result = function(rank, world_size, *args)
    dist.barrier()
    if rank == 0:
        sender.send(result)
    dist.destroy_process_group()


def race(
    candidates: dict[str, Callable[[], float]], *, rounds: int, inner: int, warmup: int = 3
) -> dict[str, Timing]:
    """Time `inner` steps of each candidate in each round, one after another; every rank calls this."""
    names = list(candidates)
    for name in names:
        for _ in range(warmup):
            candidates[name]()
    timings = {name: Timing() for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            _time(candidates[name], timings[name], inner)
    return timings


def _time(step: Callable[[], float], timing: Timing, inner: int) -> None:
    gc.collect()
    gc.disable()
    dist.barrier()
    sent, cpu, start = loopback_bytes(), cpu_seconds(), time.perf_counter()
    for _ in range(inner):
        step()
    wall = torch.tensor([(time.perf_counter() - start) / inner])
    cpu = (cpu_seconds() - cpu) / inner
    dist.barrier()
    sent = loopback_bytes() - sent
    gc.enable()
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    timing.wall.append(float(wall) * 1e3)
    timing.cpu.append(cpu * 1e3)
    timing.loopback.append(sent / inner / 1e6)


def loopback_bytes() -> int:
    with open("/proc/net/dev") as lines:
        for line in lines:
            if line.strip().startswith("lo:"):
                return int(line.split(":")[1].split()[8])
    return 0


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_peak_mb(*, reset: bool = False) -> float:
    """Peak resident memory of this process since the last reset, MB of 10^6 bytes."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0
