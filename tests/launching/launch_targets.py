"""What the tests' workers run: twenty reductions over dp, with one fault."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch

from meshwright.comm import mesh as meshes
from meshwright.comm import ops
from meshwright.comm.log import CommLog
from meshwright.comm.watchdog import Watchdog
from meshwright.errors import ConfigError
from meshwright.launching import WorkerContext
from meshwright.launching.worker import enable_dumps
from meshwright.mesh import MeshSpec
from meshwright.testing.faults.network import FAULTS, FaultRule, commit, faulty_group

NUM_STEPS = 20
LIMIT_SECONDS = 2.0


def reduce_many(rule: FaultRule | None, world: meshes.World, context: WorkerContext) -> float:
    """Twenty all-reduces through the product's own operations; the last sum."""
    device = torch.device("cpu")
    log = CommLog(world.rank, world.size, context.ring)
    meshes.connect(world, device=device, timeout_seconds=60)
    mesh = meshes.Mesh(MeshSpec.of(dp_shard=world.size), world, log=log, device=device)
    group = mesh.group("dp")
    of_network = rule is not None and FAULTS[rule.fault].of_network
    if of_network:
        group = faulty_group(group, rule)
    watchdog = Watchdog(log, limit_seconds=LIMIT_SECONDS, folder=context.run_dir, world_size=world.size)
    with watchdog:
        for step in range(NUM_STEPS):
            log.progress("data", step)
            tensor = torch.full((100,), float(step))
            if rule is not None and not of_network:
                tensor = commit(rule, tensor, rank=world.rank, operation=step)
            if tensor is not None:
                ops.all_reduce(tensor, group, cause=f"reduce bucket {step}").wait()
    meshes.disconnect()
    return 0.0 if tensor is None else float(tensor[0])


def fine(world: meshes.World, context: WorkerContext) -> tuple[int, int, str, str]:
    """What a worker sees of its place."""
    print(f"printed by rank {world.rank}")
    os.system("echo printed by a child")
    if context.error_fd is not None:
        os.write(context.error_fd, b"to the user\n")
    return world.rank, torch.get_num_threads(), os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]


def user_error(world: meshes.World, _context: WorkerContext) -> None:
    """Every rank finds the same mistake of the user."""
    raise ConfigError("E103", f"token id 300 is not below 256 (rank {world.rank})")


def leave(world: meshes.World, _context: WorkerContext) -> None:
    """Rank 1 exits without a word."""
    if world.rank == 1:
        os._exit(7)
    time.sleep(3600)


def unpicklable(_world: meshes.World, _context: WorkerContext) -> object:
    """A result that cannot travel."""
    return lambda: None


def worker_main(run_dir: str, fault: str) -> None:
    """A worker of torchrun or SLURM; rank 1 has the fault in its first attempt."""
    world = meshes.current_world()
    context = WorkerContext(world.rank, Path(run_dir))
    enable_dumps(context.files, world.rank)
    rule = None if fault == "none" or world.attempt else FaultRule(fault, rank=1, operation=5)
    total = reduce_many(rule, world, context)
    (Path(run_dir) / f"done{world.rank}").write_text(f"{total:g} of attempt {world.attempt}")


def faulty(fault: str, rank: int, operation: int) -> partial[float]:
    """A target with one fault."""
    return partial(reduce_many, FaultRule(fault, rank=rank, operation=operation))


if __name__ == "__main__":
    worker_main(*sys.argv[1:])
