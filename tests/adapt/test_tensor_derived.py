"""Derived layouts on models: equal to the tables where there is one, sizes in code rewritten, and what is refused."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from meshwright.adapt.shape_calls import forwards_with_sizes, local_calls
from meshwright.adapt.tensor_parallel import split_model
from meshwright.adapt.tensor_roles import find_roles
from meshwright.capture.capture import capture
from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group
from meshwright.errors import PlanError
from meshwright.graph.task_graph import TaskGraph
from meshwright.models import GPT, GPTConfig
from meshwright.partitioning.derive_tensor import derive_layout
from meshwright.partitioning.tensor_regions import ShapeCall, Size
from meshwright.training.layouts import Example, deriver
from tests.verification.handmade import Nano, loss_of_logits, make_gpt2, make_hf_llama
from tests.verification.models import Rows, Tokens

DERIVED = {"*": "derived"}
GPT_SIZES = {"num_layers": 2, "dim": 24, "num_heads": 6, "ffn_dim": 50, "vocab_size": 101, "max_seq_len": 40}
BUILDS = {
    "nano": Nano,
    "gpt2": make_gpt2,
    "llama": make_hf_llama,
    "qwen3": lambda: make_hf_llama("Qwen3"),
    "gpt": lambda: GPT(GPTConfig(**GPT_SIZES)),
}


@cache
def graph_of(kind: str) -> TaskGraph:
    example = Example(loss_of_logits, Tokens(101, 7), 2, "fp32")
    return capture(BUILDS[kind](), example.loss, example.batch())


def split(kind: str, size: int, index: int = 0, roles=DERIVED, values=None):
    """One rank's part and its layout; the ranks need not talk, and the graph is read once for all tests."""
    model = BUILDS[kind]()
    if values is not None:
        model.load_state_dict(values, strict=False)
    group = Group("tp", tuple(range(size)), index, None, CommLog(index, size))
    return model, split_model(model, group, None, roles, partial(derive_layout, graph_of(kind)))[0]


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.parity), "qwen3"])
def test_what_the_graph_of_llama_tells_is_the_table(kind, tp):
    """Two key/value heads: split over 2 ranks, on all of 3 and of 4. Qwen3's norms of heads get sums of gradients.

    pitfall: norms of queries and keys are not summed over ranks, and replicas drift.
    """
    _, table = split(kind, tp, tp - 1, roles=None)
    _, found = split(kind, tp, tp - 1)
    # Regions are found in another order than names.
    found, table = (
        dataclasses.replace(x, warnings=sorted(x.warnings), forwards=sorted(x.forwards))
        for x in (found, table)
    )
    assert found == table


@pytest.mark.parity
def test_what_the_graph_of_our_gpt_tells_is_the_table():
    (_, table), (_, found) = (split("gpt", 4, 1, roles) for roles in (None, DERIVED))
    assert (found.cuts, found.outputs, found.calls) == (table.cuts, table.outputs, table.calls)


@pytest.mark.parametrize(("kind", "dim"), [("nano", 0), ("gpt2", 1)])
def test_each_third_of_a_fused_projection_is_cut(kind, dim):
    """The parts of all ranks, put together, are the whole matrix; ties stay."""
    whole = {name: p.detach().clone() for name, p in BUILDS[kind]().named_parameters()}
    rebuilt = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    for index in range(4):
        model, layout = split(kind, 4, index, values=whole)
        (fused,) = [name for name in layout.cuts if name.endswith("h.0.attn.c_attn.weight")]
        assert layout.cuts[fused].parts == 3
        assert layout.cuts[fused].sizes == (8, 8, 4, 4)
        assert model.get_parameter(fused).shape[dim] == 3 * layout.cuts[fused].sizes[index]
        table = model.wte if kind == "nano" else model.transformer.wte
        assert model.lm_head.weight is table.weight
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1)
            for there, first, last in layout.runs(name, parameter.shape, 0, flat.numel()):
                rebuilt[name].view(-1)[there : there + last - first] = flat[first:last]
    assert all(torch.equal(rebuilt[name], value) for name, value in whole.items())
    assert layout.calls == {"all_reduce": 2 * 2 * 2 + 1 + 1, "all_gather": 1}
    assert (
        "W201 tp=4 does not divide 6 heads of attn: split 2 2 1 1, 33% slower there than even"
        in layout.warnings
    )
    assert layout.warnings[-1].startswith("W211 ")
    assert "wpe stays whole" in layout.warnings[-1]


# A model of transformers brings a plan of its own.


def test_the_plan_of_a_model_of_transformers_gives_roles():
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 1, "num_attention_heads": 4}
    roles = find_roles(PhiForCausalLM(PhiConfig(vocab_size=101, pad_token_id=0, **sizes)))
    assert roles == {
        "model.embed_tokens": "vocabulary",
        "model.layers.0.self_attn.q_proj": "query",
        "model.layers.0.self_attn.k_proj": "key",
        "model.layers.0.self_attn.v_proj": "value",
        "model.layers.0.self_attn.dense": "output",
        "model.layers.0.mlp.fc1": "column",
        "model.layers.0.mlp.fc2": "row",
        "lm_head": "gathered",
    }


def test_a_plan_with_a_style_that_has_no_role_is_none():
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other.tp_plan = {"0": "packed_colwise", "1": "rowwise"}
    assert find_roles(other) is None


# Bad input.


class Branches(nn.Module):
    """What torch.export cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.relu() if bool(x.sum() > 0) else x)


class Normed(nn.Module):
    """A softmax between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).softmax(-1))


def of_rows(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


@pytest.mark.parametrize(
    ("build", "size", "code", "text"),
    [
        (
            Branches,
            2,
            "E290",
            "no layout is known for Branches, and its graph, which would tell one, cannot be read",
        ),
        (
            Normed,
            2,
            "E291",
            "no layers of Normed can be split over ranks. Whole: first (outputs: softmax in the loss or",
        ),
    ],
)
def test_models_of_which_no_layout_can_be_derived_are_refused(build, size, code, text):
    model = build()
    group = Group("tp", tuple(range(size)), 0, None, CommLog(0, size))
    derive = deriver(model, Example(of_rows, Rows(), 2, "fp32"))
    with pytest.raises(PlanError) as caught:
        split_model(model, group, None, {}, derive)
    assert caught.value.code == code
    assert text in caught.value.message
    assert "plan.layout" in caught.value.message


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(PlanError) as caught:
        split("nano", 7)
    assert caught.value.code == "E201"
    assert "tp=7 exceeds the 6 heads of attn. Valid tp: 1..6" in caught.value.message


def test_derived_is_for_a_whole_model():
    with pytest.raises(PlanError, match='the role "derived" is for a whole model') as caught:
        find_roles(Nano(), {"h.0.*": "derived", "lm_head": "gathered"})
    assert caught.value.code == "E227"


# Sizes that code names.

B, T = Size(None, False), Size(None, False)


class Sizes(nn.Module):
    """Makes each kind of call with the sizes of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> list[Tensor]:
        batch, length, _ = x.shape
        q, k, _ = x.split(24, dim=2)
        return [
            q.view(batch, length, 6, 4),
            k.reshape(batch, length, 6, -1),
            q.unflatten(-1, (6, 4)),
            q.view(batch, length, 6, 4)[:, :, :1].expand(batch, length, 6, 4),
            torch.zeros(batch, 6, length),
            torch.full((batch, 6, length), 1.0),
            q.new_zeros(batch, 6, length),
            q.view(-1, q.shape[-1]),
            self.inner(x.new_zeros(2, 5, 24)),
        ]


class Inner(nn.Module):
    """Of another module's code nothing is known here, and nothing is changed."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, 5, 6, 4)


KNOWN = (
    ShapeCall("", "split", (B, T, Size(72, True)), (Size(24, True),) * 3, True),
    ShapeCall("", "view", (B, T, Size(24, True)), (B, T, Size(6, True), Size(4, False)), True),
    ShapeCall("", "view", (B, T, Size(24, True)), (Size(None, False), Size(24, True)), False),
    ShapeCall(
        "", "expand", (B, T, Size(1, False), Size(4, False)), (B, T, Size(6, True), Size(4, False)), True
    ),
    ShapeCall("", "make", (), (B, Size(6, True), T), True),
)


def with_sizes(module: nn.Module, ours: int) -> nn.Module:
    modules = dict(module.named_modules())
    for name, forward in forwards_with_sizes(modules, local_calls(KNOWN, 6, ours), {}).items():
        vars(modules[name])["forward"] = forward
    return module


@pytest.mark.parametrize("ours", [1, 2, 4])
def test_sizes_of_the_whole_become_those_of_a_part(ours):
    x = torch.randn(2, 5, 12 * ours)
    found = with_sizes(Sizes(), ours)(x)
    part = x[..., : 4 * ours]
    assert torch.equal(found[0], part.unflatten(-1, (ours, 4)))
    assert [tuple(y.shape) for y in found] == [
        *[(2, 5, ours, 4)] * 4,
        *[(2, ours, 5)] * 3,
        (10, 4 * ours),
        (2, 5, 6, 4),
    ]


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, 3, -1, 8)


def test_a_call_that_the_graph_had_not_is_refused_where_it_would_be_wrong_silently():
    with pytest.raises(PlanError) as caught:
        with_sizes(Other(), 2)(torch.randn(2, 6, 8))
    assert caught.value.code == "E292"
    assert (
        "the root module calls view with (2, 3, -1, 8) on a tensor of shape (2, 6, 8)" in caught.value.message
    )
    with pytest.raises(RuntimeError, match="invalid"):
        with_sizes(Inner(), 2)(torch.randn(2, 5, 9))
