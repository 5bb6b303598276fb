"""A whole model becomes a rank's part of it: shapes, first values, ties, refusals, and dropout on parts."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.adapt.dropout import stateless
from meshwright.adapt.tensor_parallel import split_model
from meshwright.adapt.tensor_roles import find_roles
from meshwright.comm.log import CommLog
from meshwright.comm.ops import Group
from meshwright.comm.rng import MicroStep
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import CutRegion
from meshwright.models import GPT, GPTConfig, Llama, LlamaConfig


def group_of(size: int, index: int = 0) -> Group:
    """Ranks that need not talk."""
    return Group("tp", tuple(range(size)), index, None, CommLog(index, size))


def make_gpt(num_heads: int = 6, **changes: int) -> GPT:
    sizes = {"num_layers": 1, "dim": 4 * num_heads, "ffn_dim": 50, "vocab_size": 101, "max_seq_len": 7}
    return GPT(GPTConfig(num_heads=num_heads, **{**sizes, **changes}))


def test_parts_of_all_ranks_are_the_whole_and_ties_stay():
    whole = {name: p.detach().clone() for name, p in make_gpt().named_parameters()}
    rebuilt = {name: torch.zeros_like(value) for name, value in whole.items()}
    for index in range(4):
        model = make_gpt()
        model.load_state_dict(whole, strict=False)
        names = list(dict(model.named_parameters()))
        layout, _ = split_model(model, group_of(4, index), None)
        assert list(dict(model.named_parameters())) == names
        assert model.head.weight is model.token_embedding.weight
        assert model.token_embedding.weight.shape == (26 if index == 0 else 25, 24)
        assert model.blocks[0].attention.query.weight.shape == ((8, 24) if index < 2 else (4, 24))
        assert model.blocks[0].feed_forward.down.weight.shape == (24, 13 if index < 2 else 12)
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1)
            assert layout.logical_shape(name, parameter.shape) == whole[name].shape
            for there, first, last in layout.runs(name, parameter.shape, 0, flat.numel()):
                rebuilt[name].view(-1)[there : there + last - first] = flat[first:last]
        assert layout.warnings == (
            "W201 tp=4 does not divide 101 rows of token_embedding: split 26 25 25 25, 3% slower there than even",
            "W201 tp=4 does not divide 101 outputs of head: split 26 25 25 25, 3% slower there than even",
            "W201 tp=4 does not divide 6 heads of attention: split 2 2 1 1, 33% slower there than even",
            "W201 tp=4 does not divide 50 channels of feed_forward: split 13 13 12 12, 4% slower there than even",
        )
    assert all(torch.equal(rebuilt[name], value) for name, value in whole.items())


def test_first_values_are_elements_of_the_whole():
    """A model without memory is drawn part by part, by the indices of whole parameters."""
    asked: dict[str, list[int]] = {}

    def numbers(name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        asked.setdefault(name, []).extend(range(start, stop))
        return torch.arange(start, stop, dtype=dtype)

    with torch.device("meta"):
        model = make_gpt()
    _, draw = split_model(model, group_of(3, 1), numbers)
    down = model.blocks[0].feed_forward.down.weight
    assert down.is_meta
    assert down.shape == (24, 17)
    values = draw("blocks.0.feed_forward.down.weight", 0, down.numel(), torch.float64).view(24, 17)
    assert torch.equal(values, torch.arange(24 * 50, dtype=torch.float64).view(24, 50)[:, 17:34])
    assert len(asked["blocks.0.feed_forward.down.weight"]) == down.numel()


def test_fewer_key_value_heads_than_ranks_are_on_all_of_them():
    """pitfall: key/value heads that ranks do not divide end in an error of shapes in forward."""
    sizes = {"num_layers": 1, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}
    model = Llama(LlamaConfig(max_seq_len=7, **sizes))
    layout, _ = split_model(model, group_of(4, 2), None)
    attention = model.blocks[0].attention
    assert attention.query.weight.shape == (8, 32)
    assert attention.key.weight.shape == (16, 32)
    assert layout.repeated["blocks.0.attention.key"].heads == (1,)
    assert (
        "W203 tp=4 exceeds 2 key/value heads of attention: every rank holds all of them" in layout.warnings[0]
    )
    # One sum a pair each way, one of the embedding, three of the head, and two of replicated key and value weights.
    assert layout.calls == {"all_reduce": 4 + 1 + 1 + 2, "all_gather": 1}


@pytest.mark.parametrize(
    ("changes", "size", "text"),
    [
        ({"num_heads": 3}, 4, "tp=4 exceeds the 3 heads of blocks.0.attention. Valid tp: 1..3"),
        ({"ffn_dim": 3}, 4, "tp=4 exceeds the 3 channels of feed_forward"),
        ({"vocab_size": 5}, 6, "tp=6 exceeds the 5 rows of token_embedding"),
    ],
)
def test_more_ranks_than_parts_are_refused(changes, size, text):
    with pytest.raises(PlanError) as caught:
        split_model(make_gpt(**changes), group_of(size), None)
    assert caught.value.code == "E201"
    assert text in caught.value.message


class Halved(nn.Module):
    """A feed-forward of which only the first half has a name of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {"feed_forward": nn.ModuleDict({"up": nn.Linear(4, 8), "out": nn.Linear(8, 4)})}
        )


class Whole(Halved):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_gpt().blocks[0]])
        self.blocks.append(self.inner)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "no layout is known for Sequential"),
        (Halved, "no layout is known for Halved"),
        (Whole, "'inner.feed_forward' has column of a layout and not its other parts"),
    ],
)
def test_a_model_without_a_whole_layout_is_refused(build, text):
    with pytest.raises(PlanError) as caught:
        split_model(build(), group_of(2), None)
    assert caught.value.code == "E226"
    assert text in caught.value.message


def test_an_attention_must_say_its_width_of_a_head():
    model = make_gpt()
    del model.blocks[0].attention.head_dim
    with pytest.raises(PlanError, match=r"'blocks\.0\.attention' has no attribute head_dim"):
        split_model(model, group_of(2), None)


def test_an_embedding_that_looks_at_whole_rows_is_refused():
    model = make_gpt()
    model.token_embedding.max_norm = 1.0
    with pytest.raises(PlanError, match="the embedding 'token_embedding' has max_norm"):
        split_model(model, group_of(2), None)


def test_a_number_of_heads_becomes_the_ranks_own():
    model = make_gpt()
    attention = model.blocks[0].attention
    del attention.head_dim
    attention.n_head = 6
    split_model(model, group_of(4, 3), None)
    assert attention.n_head == 1
    assert attention.query.weight.shape == (4, 24)


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        (
            {"*.wq": "query"},
            "'*.wq' matches no nn.Linear and no nn.Embedding of GPT. Some of its 9 layers: blocks.0",
        ),
        ({"*.up": "column", "blocks.0.*.up": "row"}, "both match 'blocks.0.feed_forward.up'"),
        ({"position_embedding": "column"}, "an nn.Embedding. An embedding has the role vocabulary"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(roles, text):
    with pytest.raises(PlanError) as caught:
        find_roles(make_gpt(), roles)
    assert caught.value.code == "E227"
    assert text in caught.value.message


def test_patterns_take_alternatives():
    roles = find_roles(make_gpt(), {"*.up|*.gate": "column", "*.down": "row"})
    assert roles == {"blocks.0.feed_forward.up": "column", "blocks.0.feed_forward.down": "row"}


def _loss(model: nn.Module) -> Tensor:
    tokens = torch.arange(14).view(2, 7) * 7 % 101
    return F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten().roll(1), reduction="sum")


def _frozen_and_evaluated(mesh) -> None:
    torch.manual_seed(2)
    whole = make_gpt(num_heads=3).double()
    part = copy.deepcopy(whole)
    layout, _ = split_model(part, mesh.group("dp"), None)
    for is_frozen in (False, True, False):
        with torch.no_grad():
            torch.testing.assert_close(_loss(part), _loss(whole))
        for model in (whole, part):
            model.zero_grad()
            for module in (model.token_embedding, model.position_embedding, model.blocks[0].attention_norm):
                module.requires_grad_(not is_frozen)
            _loss(model).backward()
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None
                continue
            mine, wanted = parameter.grad.flatten(), whole.get_parameter(name).grad.flatten()
            for there, first, last in layout.runs(name, parameter.shape, 0, mine.numel()):
                torch.testing.assert_close(
                    mine[first:last], wanted[there : there + last - first], rtol=1e-10, atol=1e-12, msg=name
                )


def test_what_needs_a_gradient_may_change_between_forwards(ranks):
    """pitfall: how a call is split is remembered from a call that needed no gradient."""
    ranks.run(_frozen_and_evaluated, 2)


# Dropout between a column and a row split.

PLACE = MicroStep(seed=3, step=1, first_row=4, num_rows=2, total_rows=8)


@pytest.mark.parametrize(("dim", "sizes"), [(1, (3, 2, 1)), (3, (4, 0, 3))])
def test_masks_of_parts_are_parts_of_the_mask(dim, sizes):
    shape = [2, 6, 5, 7]
    with stateless(PLACE):
        whole = torch.dropout(torch.ones(shape), 0.4, True)
    parts = []
    for index, size in enumerate(sizes):
        place = (sum(sizes[:index]), size, sum(sizes))
        other = (0, 10**6, 10**6)  # a number of heads or channels that fits nothing
        region = CutRegion(*((place, other) if dim == 1 else (other, place)))
        local = list(shape)
        local[dim] = size
        with stateless(PLACE, region=region):
            parts.append(torch.dropout(torch.ones(local), 0.4, True))
    assert torch.equal(torch.cat(parts, dim), whole)
    assert 0.2 < float((whole == 0).float().mean()) < 0.6


@pytest.mark.parametrize(("dim", "sizes"), [(0, (1, 1)), (1, (3, 2, 2))])
def test_masks_of_parts_of_the_tokens_are_parts_of_the_mask(dim, sizes):
    """pitfall: between the pairs, ranks drop tokens by the masks of another region or rank."""
    shape = [2, 7, 5]
    with stateless(PLACE):
        whole = torch.dropout(torch.ones(shape), 0.4, True)
    parts = []
    for index, size in enumerate(sizes):
        local = list(shape)
        local[dim] = size
        region = CutRegion(tokens=(dim, (sum(sizes[:index]), size, sum(sizes))))
        with stateless(PLACE, region=region):
            parts.append(torch.dropout(torch.ones(local), 0.4, True))
    assert torch.equal(torch.cat(parts, dim), whole)
    assert not torch.equal(parts[0], parts[1])


def test_a_part_of_unknown_place_is_refused():
    region = CutRegion(channels=(0, 4, 8))
    with stateless(PLACE, region=region), pytest.raises(PlanError) as caught:
        torch.dropout(torch.ones(2, 5), 0.4, True)
    assert caught.value.code == "E208"
    assert "is computed from a part of the heads or channels (plan.tp)" in caught.value.message
