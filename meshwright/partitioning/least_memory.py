"""Whether any stages fit in memory, and by how much the best ones do not.

Owns one bottleneck search: the least, over all plans, of the largest excess of a stage over its device's memory.
Costs of time play no part.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.partitioning.stage_costs import Problem, StageCosts


def least_excess(problem: Problem) -> float:
    """Bytes by which the device that lacks most exceeds its memory, in the plan where that is least.

    Negative where a plan fits; infinite where no plan has a legal number of stages and devices.
    """
    costs, size, devices = StageCosts(problem), problem.num_blocks + 1, problem.num_devices
    refused = np.isin(np.arange(size), list(problem.forbidden))
    # best[used][start]: blocks from `start` on stand on the last `used` devices
    best = np.full((devices + 1, size), math.inf)
    best[0, -1] = -math.inf
    later = np.triu(np.ones((size, size)), 1) == 0
    answer = math.inf
    for num_after in range(problem.stages[1]):
        grown = np.full_like(best, math.inf)
        for replicas in problem.replica_counts:
            memory = costs.memory(replicas, num_after)
            for used in range(devices - replicas + 1):
                left = devices - used
                group = problem.group_of[left - 1]
                if problem.group_of[left - replicas] != group or best[used].min() == math.inf:
                    continue
                refused_here = later | np.isinf(memory)
                held = np.where(refused_here, 0.0, memory)
                excess = np.where(refused_here, math.inf, held - problem.groups[group].memory_bytes)
                found = np.where(refused, math.inf, np.maximum(excess, best[used][None, :]).min(axis=1))
                grown[used + replicas] = np.minimum(grown[used + replicas], found)
        best = grown
        if num_after + 1 >= problem.stages[0]:
            answer = min(answer, float(best[devices, 0]))
    return answer
