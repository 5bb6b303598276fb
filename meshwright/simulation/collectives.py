"""Seconds of collectives and messages on a cluster: by size, by ranks, by where the ranks lie.

A group has `ranks` members, `stride` apart in rank order; ranks of one node are neighbours. Inside a node all links
work at once; between nodes all groups of a node share its network cards, so a group that has r ranks in a node has
r shares of them. Time is a floor that grows with the number of steps, plus bytes over the slowest level.
Source of the floors: measured all-reduces of 1 MiB on 2 to 8 A100 (44 to 92 microseconds); between nodes SimAI's
table of reached fractions by size and number of nodes: a ring's floor grows by 5.5 microseconds a rank. An all-reduce
may go by trees instead, whose floor grows with the logarithm of the nodes; gathers and reductions to parts have rings.
"""

from __future__ import annotations

from math import log2

from meshwright.presets.calibration import Calibration
from meshwright.simulation.job import Cluster

_NODE_FLOOR_SECONDS = 17e-6
_NODE_STEP_SECONDS = 4.5e-6
_RING_STEP_SECONDS = 5.5e-6
_TREE_STEP_SECONDS = 20e-6


def ranks_in_node(cluster: Cluster, *, ranks: int, stride: int) -> int:
    """Members of a group that share a node."""
    return max(1, min(ranks, cluster.devices_per_node // max(1, stride)))


def bus_bytes_per_second(cluster: Cluster, fit: Calibration, *, ranks: int, stride: int) -> float:
    """Bytes a second that pass any one member of a group, at large sizes."""
    machine = cluster.machine
    link = machine.links.get("node") or machine.links.get("network")
    inside_rate = link.bandwidth_bytes_per_second * fit.node if link else cluster.nic_bytes_per_second
    inside = ranks_in_node(cluster, ranks=ranks, stride=stride)
    if inside >= ranks:
        return inside_rate
    share = cluster.nic_bytes_per_second / cluster.devices_per_node * inside
    rate = share * fit.network
    if cluster.pod_devices and ranks * stride > cluster.pod_devices:
        rate /= cluster.oversubscription
    return min(inside_rate, rate)


def collective_seconds(
    cluster: Cluster, fit: Calibration, num_bytes: float, *, ranks: int, stride: int = 1, passes: int = 1
) -> float:
    """Seconds of a gather or a reduction to parts of `num_bytes` in all; an all-reduce has two passes."""
    if ranks == 1 or num_bytes == 0:
        return 0.0
    inside = ranks_in_node(cluster, ranks=ranks, stride=stride)
    floor = _NODE_FLOOR_SECONDS + _NODE_STEP_SECONDS * (inside - 1)
    if inside < ranks:
        ring = _RING_STEP_SECONDS * (ranks - 1)
        floor += min(ring, _TREE_STEP_SECONDS * log2(ranks / inside + 1)) if passes == 2 else ring
    rate = bus_bytes_per_second(cluster, fit, ranks=ranks, stride=stride)
    return passes * (floor + num_bytes * (ranks - 1) / ranks / rate)


def message_seconds(cluster: Cluster, fit: Calibration, num_bytes: float, *, stride: int) -> float:
    """Seconds of a message to the rank `stride` away, while all ranks of the node send one."""
    machine = cluster.machine
    if stride < cluster.devices_per_node:
        link = machine.links.get("node") or machine.links["network"]
        return _NODE_FLOOR_SECONDS + num_bytes / (link.bandwidth_bytes_per_second * fit.node)
    share = cluster.nic_bytes_per_second / cluster.devices_per_node
    return _NODE_FLOOR_SECONDS + _RING_STEP_SECONDS + num_bytes / (share * fit.network)
