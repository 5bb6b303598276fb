"""Ports on the loopback interface: a free one, or who holds the one that was asked for.

Knows nothing of workers. Simplification: a port is probed and released, so another process may take it before
rank 0 does; then rank 0 reports E403.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from meshwright.errors import WorkerError

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


def choose_port(wanted: str | None) -> int:
    """`wanted` (the user's MASTER_PORT) if it is free, any free port if None.

    Raises:
        WorkerError: E403 when `wanted` is no port or is taken; the text names the process that holds it.
    """
    if wanted is None:
        return _free_port()
    if not wanted.isdigit() or not 0 < int(wanted) < 65536:
        raise WorkerError(
            "E403",
            f"MASTER_PORT={wanted} is not a port; use 1..65535, or unset it: local runs pick a free port.",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, int(wanted)))
        except OSError as error:
            raise WorkerError(
                "E403",
                f"port {wanted} {_describe_holder(int(wanted), error)}. Local runs pick a free port; this one was "
                f"set by MASTER_PORT={wanted} in your environment: unset it.",
            ) from error
    return int(wanted)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _describe_holder(port: int, error: OSError) -> str:
    pid = find_holder(port)
    if pid is None:
        return f"cannot be used ({error.strerror}); /proc does not say by whom it is held"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return f"is used by pid {pid} ({command[:80]})"


def find_holder(port: int) -> int | None:
    """Process that listens on `port` of this machine; None when /proc does not tell."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    if not inodes:
        return None
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(link) in inodes for link in folder.iterdir()):
                return int(folder.parent.name)
        except OSError:
            continue  # ended meanwhile, or another user's
    return None


def _listening(table: str, port: int) -> list[str]:
    """Inodes of the sockets that listen on `port`."""
    try:
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]
