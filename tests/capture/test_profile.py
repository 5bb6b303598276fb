"""Blocks measured here: each different one once, cached, and scaled onto parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from meshwright.capture import profile
from meshwright.capture.capture import capture
from meshwright.capture.profile import measured_seconds
from meshwright.errors import PlanError
from meshwright.partitioning.graph_costs import GraphCosts, Roofline

BATCH = {"x": torch.zeros(2, 8)}


def layer(width=8):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.LayerNorm(8))


@pytest.fixture(scope="module")
def graph():
    model = nn.Sequential(*(layer() for _ in range(4)), layer(64))
    return capture(model, lambda net, batch: (net(batch["x"]) ** 2).mean(), BATCH, name="net")


def test_each_different_block_once_and_then_from_the_cache(graph, tmp_path, monkeypatch):
    measured = []
    once = profile._measure
    monkeypatch.setattr(
        profile, "_measure", lambda g, stretch, sizes: measured.append(stretch) or once(g, stretch, sizes)
    )
    seconds = measured_seconds(graph, tmp_path)(4)
    of_layers = [stretch for stretch in measured if stretch.stop - stretch.first >= 4]
    assert len(measured) % 3 == 0  # at three numbers of samples
    assert len({stretch.digest for stretch in measured}) == len(measured) // 3
    assert len({(stretch.first, stretch.stop) for stretch in of_layers}) == 1, (
        "equal layers are measured once"
    )
    # every task lies in one stretch, in order
    assert [i for row in seconds for i in range(row.first, row.stop)] == list(range(len(graph.tasks)))
    assert all(row.forward > 0 for row in seconds)
    assert sum(row.backward for row in seconds) > 0
    count = len(measured)
    assert measured_seconds(graph, tmp_path)(4) == seconds
    assert len(measured) == count
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        measured_seconds(graph, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 2 * count, "other threads, other seconds"


def test_parts_sum_to_what_was_measured(graph, tmp_path):
    measured = measured_seconds(graph, tmp_path)
    costs = GraphCosts(graph, Roofline(1e9, 1e9), measured=measured)
    plain = GraphCosts(graph, Roofline(1e9, 1e9)).parts(4)
    parts, rows = costs.parts(4), measured(4)
    assert sum(parts.forward) == pytest.approx(sum(row.forward for row in rows))
    assert parts.kept == plain.kept
    first = [n for n, part in enumerate(costs.atomic.parts) if rows[0].first <= part.task < rows[0].stop]
    assert sum(parts.forward[n] for n in first) == pytest.approx(rows[0].forward)


def test_what_cannot_be_measured(graph, tmp_path):
    with pytest.raises(PlanError, match="E275 net was read by onnx: it cannot be run"):
        measured_seconds(dataclasses.replace(graph, source="onnx"), tmp_path)
    # a product of shapes that do not meet
    wrong = tuple(dataclasses.replace(v, shape=v.shape[:1]) if v.kind == "input" else v for v in graph.values)
    with pytest.raises(PlanError, match=r"E275 net: .* cannot be run alone to be measured"):
        measured_seconds(dataclasses.replace(graph, values=wrong), tmp_path)
