"""Silent faults of parameter servers: a worker's push that a server loses, or counts twice."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.comm.transports.base import Work
from meshwright.comm.transports.exchange import ExchangeTransport
from meshwright.testing.faults.patching import Method, is_step, patch, then
from meshwright.testing.faults.silent import Place, SilentFault, Site
from meshwright.verification.rank import CandidateRank


def _servers(candidate: CandidateRank) -> list[Place]:
    """Everywhere, on servers that own something."""
    groups, buckets = candidate.engine.groups, [memory.bucket for memory in candidate.engine.memories]
    ranks = [
        rank
        for index, rank in enumerate(groups.all.ranks)
        if index >= groups.num_workers and any(bucket.shard_numel(index) for bucket in buckets)
    ]
    return [Place("", (), tuple(ranks))]


def _push_scaled(candidate: CandidateRank, site: Site, factor: float) -> None:
    """The site's server takes `factor` times what one worker pushes in the site's step."""
    groups = candidate.engine.groups
    transport = groups.all.transport
    if candidate.rank != site.rank:
        return
    assert isinstance(transport, ExchangeTransport), "pushes are messages of an exchange"
    worker = site.other % groups.num_workers

    def make(receive: Method) -> Method:
        def tapped(tensor: Tensor, index: int, tag: int) -> Any:
            work: Work = receive(tensor, index, tag)
            if index != worker or not is_step(candidate, site):
                return work
            return then(work, lambda: tensor.mul_(factor))

        return tapped

    patch(transport.inner, "receive", make)


def _push_dropped(candidate: CandidateRank, site: Site) -> None:
    _push_scaled(candidate, site, 0.0)


def _push_twice(candidate: CandidateRank, site: Site) -> None:
    _push_scaled(candidate, site, 2.0)


FAULTS = (
    SilentFault(
        name="push_dropped",
        theme="parameter server",
        description="a server leaves one worker's push out of a step's sum, as when a message is lost",
        source="apache/mxnet#5219",
        expected=("gradients",),
        inject=_push_dropped,
        needs=("servers",),
        places=_servers,
    ),
    SilentFault(
        name="push_twice",
        theme="parameter server",
        description="a server adds one worker's push of a step twice, as when a message is sent again",
        source="apache/mxnet#5219",
        expected=("gradients",),
        inject=_push_twice,
        needs=("servers",),
        places=_servers,
    ),
)
