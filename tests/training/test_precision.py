"""Which models can run in 16 bits, what of them is cast, and what is refused by name."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshwright.adapt.precision import cast_floating, install
from meshwright.errors import PlanError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.training.precision import cast_parameters, check_runs, to_master, warnings_of

SAMPLES = [{"x": torch.randn(4), "y": torch.randn(3)} for _ in range(3)]


def squared_error(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    error = model(batch["x"]) - batch["y"]
    assert error.dtype == torch.float32, "targets keep their type, and so does the loss"
    return error.pow(2).sum(), len(error)


class Model(nn.Module):
    """One layer and `operation` on what comes out of it."""

    def __init__(self, operation: Any = lambda x: x) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.layer.weight.dtype
        return self.head(self.operation(self.norm(self.layer(x))))


class WithTable(Model):
    """A float32 buffer meets activations."""

    def __init__(self, cast: bool) -> None:
        super().__init__(self._add)
        self.cast = cast
        self.register_buffer("table", torch.randn(4), persistent=False)

    def _add(self, x: Tensor) -> Tensor:
        return x + (self.table.to(x.dtype) if self.cast else self.table)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_plain_module_runs_and_stays_as_it_is(precision: Any) -> None:
    for model in (to_master(Model(), precision), to_master(WithTable(cast=True), precision)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        check_runs(model, squared_error, SAMPLES, precision=precision)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_cast_parameters() -> None:
    model = Model()
    cast_parameters(model, "bf16")
    dtypes = {name: value.dtype for name, value in model.state_dict().items() if value.is_floating_point()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {
        "layer.weight",
        "layer.bias",
        "head.weight",
        "head.bias",
    }
    assert model(torch.randn(2, 4)).dtype == torch.float32


def test_a_missing_kernel_is_named() -> None:
    model = to_master(Model(lambda x: torch.cdist(x, x) @ x), "bf16")
    with pytest.raises(PlanError, match=r"E212 the model runs in float32 .*cdist.*x\.float\(\)"):
        check_runs(model, squared_error, SAMPLES, precision="bf16")
    check_runs(model, squared_error, SAMPLES, precision="fp32")


def test_what_fails_in_float32_too_is_no_matter_of_precision() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("a bug of the user's")

    check_runs(Model(fails), squared_error, SAMPLES, precision="bf16")
    check_runs(Model(), squared_error, SAMPLES[:1], precision="bf16")  # batch statistics of one sample


def test_a_buffer_that_meets_activations_is_named() -> None:
    model = to_master(WithTable(cast=False), "fp16")
    with pytest.raises(PlanError, match=r"E212 .*same dtype.*Buffers stay float32 \('table' and 2 more"):
        check_runs(model, squared_error, SAMPLES, precision="fp16")


@pytest.mark.parametrize(
    ("dtype", "precision", "text"),
    [
        (torch.float64, "bf16", "E212 parameter 'weight' is float64, .* masters are float32"),
        (torch.complex64, "fp16", "E212 parameter 'weight' is complex64: .* imaginary"),
        (torch.complex64, "fp32", "E212 parameter 'weight' is complex64: .* imaginary"),
    ],
)
def test_parameters_that_would_lose_digits(dtype: torch.dtype, precision: Any, text: str) -> None:
    model = nn.Linear(2, 2, dtype=dtype)
    with pytest.raises(PlanError, match=text):
        to_master(model, precision)


def test_float64_is_cast_where_everything_is_float32() -> None:
    assert to_master(nn.Linear(2, 2, dtype=torch.float64), "fp32").weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("request_", "codes"),
    [
        (PlanRequest(precision="fp16"), ["W207"]),
        (PlanRequest(precision="bf16", offload="optimizer"), ["W208"]),
        (PlanRequest(precision="bf16"), []),
    ],
)
def test_what_brings_nothing_on_a_cpu(request_: PlanRequest, codes: list[str]) -> None:
    plan = make_plan(request_, world_size=2, global_batch=4)
    texts = warnings_of(plan, torch.device("cpu"))
    assert [text.split()[0] for text in texts] == codes
    assert warnings_of(plan, torch.device("cuda")) == []


@pytest.mark.parametrize(("precision", "codes"), [("bf16", ["W209"]), ("fp32", []), ("fp64", [])])
def test_16_bits_depend_on_tp_and_it_is_said(precision: Any, codes: list[str]) -> None:
    plan = make_plan(PlanRequest(precision=precision, tp=2), world_size=4, global_batch=4)
    texts = warnings_of(plan, torch.device("cuda"))
    assert [text.split()[0] for text in texts] == codes
    assert all("plan.tp = 2 in bf16: every rank rounds its partial products" in text for text in texts)


class Pair(NamedTuple):
    """Two of anything."""

    first: Any
    second: Any


@dataclass
class Output:
    """As models of libraries return."""

    logits: Any
    loss: Any = None


class Named(OrderedDict):
    """A dict of its own class with an attribute."""

    note = "kept"


def test_containers_keep_their_class() -> None:
    low, ids = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)
    named = Named(x=low, ids=ids)
    value = [Pair(low, "text"), (ids, None), {"a": {"b": low}}, Output(low), named]
    pair, same, nested, output, again = cast_floating(value, torch.bfloat16, torch.float32)
    assert isinstance(pair, Pair)
    assert pair.first.dtype == nested["a"]["b"].dtype == output.logits.dtype == torch.float32
    assert same is value[1]
    assert isinstance(output, Output)
    assert isinstance(again, Named)
    assert again["x"].dtype == torch.float32
    assert again["ids"] is ids
    assert named["x"] is low, "the caller's own container is not changed"


def test_install_is_undone() -> None:
    layer = nn.Linear(2, 2, dtype=torch.bfloat16)
    undo = install(layer, torch.bfloat16)
    assert layer(torch.ones(1, 2)).dtype == torch.float32
    undo()
    assert layer(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    install(layer.float(), torch.float32)()
    assert not layer._forward_pre_hooks
