"""Hosts on one machine: network namespaces with an interface, an address and ports of their own, joined by a cable.

They share the file system, as a cluster's hosts do. Making them needs root and the programs `ip` and, for a limited
cable, `tc`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface to its peer."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """What runs `words` there."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def run(self, *words: str) -> None:
        """Run a program there, to its end.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        _run(*self.command(*words))

    def pids(self) -> list[int]:
        """Processes there."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]


@contextmanager
def two_hosts(rate: str | None = None) -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable; whatever runs in them ends with them.

    Args:
        rate: what each sends at most, as `tc` writes it (`200mbit`); None for all that the machine can.

    Raises:
        OSError: the programs are not installed.
        subprocess.CalledProcessError: namespaces or limits are not allowed here; `stderr` says why.
    """
    number = os.getpid()
    first, second = (Host(f"meshwright{number}{n}", f"mw{number}{n}", f"10.213.7.{n + 1}") for n in range(2))
    made = []
    try:
        for host in (first, second):
            _run("ip", "netns", "add", host.namespace)
            made.append(host)
        _run("ip", "link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for host in made:
            _run("ip", "link", "set", host.interface, "netns", host.namespace)
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            host.run("ip", "link", "set", host.interface, "up")
            host.run("ip", "link", "set", "lo", "up")
            if rate is not None:
                limit = ("rate", rate, "burst", "256kb", "latency", "100ms")
                host.run("tc", "qdisc", "add", "dev", host.interface, "root", "tbf", *limit)
        yield first, second
    finally:
        for host in made:
            for pid in host.pids():
                os.kill(pid, signal.SIGKILL)
            _run("ip", "netns", "delete", host.namespace)  # the interface goes with it


def why_no_hosts(rate: str | None = None) -> str:
    """Why `two_hosts` cannot be made here; empty where it can."""
    try:
        with two_hosts(rate):
            return ""
    except OSError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
