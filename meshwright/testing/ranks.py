"""Run a function on n real Gloo ranks, fast: a pool of processes that already imported torch.

Workers come from a forkserver with torch preloaded, live across calls, and join a new process group a call
(a fresh key prefix in one store). A call that fails or hangs kills its ranks; the next call replaces them.
The forkserver never computes: forking a process that has run a multi-threaded product hangs its children.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from meshwright.launching.local import PRELOAD
from meshwright.layout.plan import TransportName

# A process has one forkserver: what this pool loads into it is all that workers of `run_local` start with too.
_PRELOAD = (*PRELOAD, "meshwright.training.step", "meshwright.testing.reference")


@dataclass
class _Rank:
    process: Any
    pipe: Connection


class RankPool:
    """Warm ranks for a whole test suite.

    `pool.run(function, n, *args)` calls `function(mesh, *args)` on n ranks, where `mesh` is a one-axis
    (dp_shard) `Mesh` over Gloo or `transport`, and returns the n results in rank order.
    """

    def __init__(self) -> None:
        method = "forkserver" if sys.platform.startswith("linux") else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(list(_PRELOAD))
        self._ranks: dict[int, _Rank] = {}
        self._num_calls = 0
        self._store: Any = None

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        transport: TransportName = "gloo",
    ) -> list[Any]:
        """Results of `function(mesh, *args)` by rank.

        Raises:
            RankError: one text with every failed rank's traceback, if any rank raised, died or hung.
        """
        self._num_calls += 1
        self._ensure_store()
        for rank in range(world_size):
            self._ensure(rank)
        key = f"call{self._num_calls}"
        message = cloudpickle.dumps((function, world_size, args, key, timeout, transport))
        for rank in range(world_size):
            self._ranks[rank].pipe.send_bytes(message)
        end = time.monotonic() + timeout
        answers = [self._answer(rank, end, timeout) for rank in range(world_size)]
        failures = [f"[rank {rank}] {value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            for rank in range(world_size):
                self._kill(rank)
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """End all ranks."""
        for rank in list(self._ranks):
            self._kill(rank)

    def _ensure_store(self) -> None:
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _ensure(self, rank: int) -> None:
        if rank in self._ranks and self._ranks[rank].process.is_alive():
            return
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, there, self._store.port), daemon=True)
        process.start()
        there.close()
        self._ranks[rank] = _Rank(process, here)

    def _answer(self, rank: int, end: float, timeout: float) -> tuple[bool, Any]:
        pipe = self._ranks[rank].pipe
        try:
            if not pipe.poll(max(0.0, end - time.monotonic())):
                return False, f"no answer in {timeout} s"
            return cloudpickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._ranks[rank].process.join(5)
            return False, f"died with exit code {self._ranks[rank].process.exitcode}"

    def _kill(self, rank: int) -> None:
        worker = self._ranks.pop(rank)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


class RankError(AssertionError):
    """A rank of a `RankPool` call raised, died or hung."""


def _serve(rank: int, pipe: Connection, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # the collection after each call need not walk what imports made: 0.1 s
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    while True:
        with contextlib.suppress(EOFError, ConnectionResetError):
            answer = _call(rank, store, pipe.recv_bytes())
            pipe.send_bytes(cloudpickle.dumps(answer))
            continue
        return


def _call(rank: int, store: Any, message: bytes) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    function, world_size, args, key, timeout, transport = cloudpickle.loads(message)
    torch.manual_seed(0)
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(key, store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        try:
            with contextlib.closing(local_mesh(rank, world_size, transport=transport)) as mesh:
                return True, function(mesh, *args)
        finally:
            if world_size > 1:
                dist.destroy_process_group()
            # A group lives as long as an engine refers to it, and its threads wake a hundred times a second: without
            # this a long suite slows down with every call (engines and their hooks are cycles).
            gc.collect()
    except BaseException:
        return False, traceback.format_exc()


def local_mesh(
    rank: int = 0, world_size: int = 1, *, ring: Path | None = None, transport: TransportName = "gloo"
) -> Any:
    """A mesh with one axis (dp_shard) over CPU ranks that are already connected."""
    import torch

    from meshwright.comm.log import CommLog
    from meshwright.comm.mesh import Mesh, World
    from meshwright.mesh import MeshSpec

    log = CommLog(rank, world_size, ring)
    world = World(rank=rank, size=world_size)
    spec, device = MeshSpec.of(dp_shard=world_size), torch.device("cpu")
    return Mesh(spec, world, log=log, device=device, transport=transport)
