"""A graph against its module: loss, gradients, buffers, FLOPs and what autograd keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.kernels import flop_formulas
from meshwright.capture.run import run_graph
from meshwright.graph.json_file import from_json, to_json
from meshwright.graph.task_graph import TaskGraph

Loss = Callable[[Any, Any], Any]


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def assert_runs_as_module(graph: TaskGraph, model: nn.Module, loss: Loss, batch: Any) -> None:
    """Node by node from JSON: the same loss, gradients and buffers, bit for bit, with the same dropout."""
    graph = from_json(to_json(graph))
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    wanted = first(loss(model, batch))
    wanted.backward()
    torch.manual_seed(5)
    got = run_graph(graph, twin, batch)[0]
    got.backward()
    assert torch.equal(got, wanted)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert b.grad is not None
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-13, atol=1e-15, msg=name)
    for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b), name
    model.zero_grad()


def counted(model: nn.Module, loss: Loss, batch: Any) -> tuple[int, int]:
    """FLOPs of forward and backward by torch's counter, over a real run."""
    with FlopCounterMode(display=False, custom_mapping=dict(flop_formulas())) as counter:
        result = first(loss(model, batch))
        forward = counter.get_total_flops()
        result.backward()
    model.zero_grad()
    return forward, counter.get_total_flops() - forward


def kept_by_autograd(model: nn.Module, loss: Loss, batch: Any) -> int:
    """Bytes of all storages that a real forward saves, but for those of parameters and buffers."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        loss(model, batch)
    return sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in own)
