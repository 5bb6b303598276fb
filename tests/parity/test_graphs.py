"""The zoo of `graphs.py`: captured unmodified, costs against measurements, run node by node; ONNX exports made anew."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.capture import capture
from meshwright.graph.onnx_file import read_onnx
from tests.capture.checking import assert_runs_as_module
from tests.capture.test_onnx import CASES
from tests.parity.graphs import LARGE, SMALL, measure_large, measure_small

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", SMALL)
def test_costs_are_those_of_a_run_at_other_sizes(name):
    found = measure_small(name)
    assert found.flops == pytest.approx(1, abs=0.01)
    assert found.backward == pytest.approx(1, abs=0.01)
    assert found.saved == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("name", SMALL)
def test_a_graph_runs_as_its_module(name):
    make, loss, batches = SMALL[name]
    torch.manual_seed(0)
    # transformers' experts have no float64.
    model = make().train().to(torch.float32 if name == "Mixtral" else torch.float64)
    dtype = next(model.parameters()).dtype
    graph = capture(model, loss, _cast(batches(3, 24), dtype))
    assert_runs_as_module(graph, model, loss, _cast(batches(2, 17), dtype))


@pytest.mark.parametrize("name", LARGE)
def test_a_model_of_any_size_needs_no_memory(name):
    assert measure_large(name).flops == pytest.approx(1, abs=0.01)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20  # KiB


class Outputs(nn.Module):
    """The model as files have it: inputs to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if type(self.model).__name__ == "LlamaForCausalLM":
            return self.model(input_ids=x, use_cache=False).logits
        return self.model(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_export_of_today_has_the_same_costs(name, tmp_path):
    pytest.importorskip("onnxscript")
    make, loss, batch = CASES[name]
    model = make()
    graph = capture(model, loss, batch)
    dims = {0: "batch", 1: "sequence"} if graph.sequence else {0: "batch"}
    x = next(value for key, value in batch.items() if key != "labels")
    program = torch.onnx.export(
        Outputs(model).eval(), (x,), dynamo=True, dynamic_shapes=(dims,), verbose=False
    )
    path = tmp_path / "model.onnx"
    program.save(path)
    assert read_onnx(path).flops() == graph.flops()


def _cast(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
