"""Recording and cutting: what is refused and why, and what a cut says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.models.hf_loss import causal_lm_loss
from meshwright.pipeline.build import plan_pipeline
from meshwright.pipeline.cut import Cut, balanced_cut, make_stages, named_cut, uneven_warning
from meshwright.pipeline.prune import holders_of, prune
from meshwright.pipeline.record import Twin
from meshwright.pipeline.stage import Holder, StageRun
from tests.pipeline.models import EncoderDecoder, Images, Pairs, UNet, pair_loss, pixel_loss
from tests.verification.models import Tokens

CPU = torch.device("cpu")


def batch_of(data, count: int = 2):
    return torch.utils.data.default_collate([data[i] for i in range(count)])


def tape_of(model: nn.Module, loss, batch):
    return Twin(model, CPU).record(loss, batch, training=True)


def make_gpt(num_layers: int = 4) -> GPT:
    sizes = {"dim": 24, "num_heads": 6, "ffn_dim": 50, "vocab_size": 101, "max_seq_len": 9, "dropout": 0.1}
    with torch.device("meta"):
        return GPT(GPTConfig(num_layers=num_layers, **sizes))


@pytest.fixture(scope="module")
def gpt_tape():
    return tape_of(make_gpt(), language_model_loss, batch_of(Tokens(101, 7)))


def test_a_model_of_any_size_is_recorded_without_memory(gpt_tape):
    names = [call.anchor for call in gpt_tape.calls if call.module]
    blocks = [f"blocks.{i}" for i in range(4)]
    assert names == [
        "token_embedding",
        "position_embedding",
        "embedding_dropout",
        *blocks,
        "final_norm",
        "head",
    ]
    assert gpt_tape.num_attentions == 4
    # Of the embedding, and in a block of attention and two residuals.
    assert [call.draws for call in gpt_tape.calls if call.draws] == [1, 3, 3, 3, 3]


def test_stages_begin_where_they_cost_least(gpt_tape):
    cut, costs = balanced_cut(gpt_tape, 2, model="GPT")
    assert cut == Cut(("blocks.2",))
    assert Cut.from_json(cut.to_json()) == cut
    first, second = make_stages(gpt_tape, cut)
    assert len(first.sends) == 1
    assert first.sends == second.receives
    assert (first.draws_before, second.draws_before) == (0, 7)
    assert "W202 GPT does not divide evenly over 2 pipeline stages" in str(uneven_warning(costs, "GPT"))
    assert uneven_warning([1.0, 1.0], "GPT") is None
    assert uneven_warning([1.0, 1.0], "GPT", num_ranks=[1, 3]) is None
    _, unlike = balanced_cut(gpt_tape, 2, model="GPT", num_ranks=[1, 3])
    assert 3 * unlike[1] > costs[1]  # three ranks get more of the model than half
    assert max(unlike) < max(costs)
    assert 3 * unlike[1] + unlike[0] == pytest.approx(sum(costs))


def test_what_needs_the_batch_alone_is_made_by_every_stage_that_uses_it():
    tape = tape_of(EncoderDecoder(101), pair_loss, batch_of(Pairs(101, 7)))
    stages = make_stages(tape, Cut(("encoder.1", "decoder.0", "decoder.1")))
    ne = [i for i, call in enumerate(tape.calls) if getattr(call.function, "__name__", "") == "ne"]
    assert all(ne[0] in stage.calls for stage in stages)
    shapes = [sorted(tape.values[n].shape for n in stage.receives) for stage in stages]
    # Behind the encoder its result goes along, for the layers of the decoder; the last one has got all it needs of it.
    gate, state = (2, 1, 16), (2, 7, 16)
    assert shapes == [[], [gate, state], [gate, state, state], [gate, state]]
    model = EncoderDecoder(101)
    holders = holders_of(tape, stages, model)
    assert holders["shared.weight"] == (0, 1, 3)  # the target is embedded before the decoder begins
    assert holders["encoder.1.mix.weight"] == (1,)
    prune(model, {name for name, places in holders.items() if 1 in places})
    assert [name for name, _ in model.named_parameters()][1:] == [
        f"encoder.1.{name}" for name in ("norm.weight", "norm.bias", "mix.weight", "mix.bias")
    ]


def _make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _make_gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=4))


SIZES = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parity
@pytest.mark.parametrize("make", [_make_llama, _make_gemma])
def test_models_whose_rotary_angles_are_made_once_are_cut(make):
    """pitfall: tracers split models with rotary embeddings and Gemma 2 at most with wrong arguments."""
    with torch.device("meta"):
        model = make()
    tape = tape_of(model, causal_lm_loss, {"input_ids": torch.randint(31, (2, 7))})
    cut, _ = balanced_cut(tape, 2, model="model")
    first, second = make_stages(tape, cut)
    # Cosines and sines are made once, on the first stage, and no gradient of them comes back.
    travels = {tape.values[n].shape: tape.values[n].needs_grad for n in second.receives}
    assert travels == {(1, 7, 8): False, (2, 7, 32): True}
    assert {tape.calls[i].anchor for i in second.calls} >= {"model.layers.2", "model.norm", "lm_head"}
    assert not set(first.calls) & {i for i in second.calls if tape.calls[i].module}


def test_memory_that_is_changed_in_place_stays_on_one_stage():
    tape_of(UNet(), pixel_loss, batch_of(Images())).joined()  # what changes memory is inside of modules
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
    tape = tape_of(model, lambda m, b: (m(b).sum(), 2), torch.randn(2, 6))
    with pytest.raises(PlanError, match=r"E260.*no stage can begin at '1': module '1' changes in place"):
        named_cut(tape, ["1"], model="Sequential")
    assert named_cut(tape, ["2"], model="Sequential") == Cut(("2",))


def test_sequences_are_cut_of_models_with_attention_alone():
    """A stage may be without, a model may not."""
    plan = make_plan(PlanRequest(pp=2, cp=2), world_size=4, global_batch=4)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with pytest.raises(PlanError, match=r"E254 plan.cp = 2: no attention was seen in the forward"):
        plan_pipeline(model, lambda m, b: (m(b).sum(), 2), torch.randn(2, 6), plan, device=CPU)


def test_a_batch_that_is_changed_in_place_is_refused():
    def loss(model, batch):
        return model(batch.mul_(2)).sum(), 2

    tape = tape_of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), loss, torch.randn(2, 6))
    with pytest.raises(PlanError, match=r"E262.*changes a tensor of the batch in place"):
        balanced_cut(tape, 2, model="Sequential")


def test_more_stages_than_parts(gpt_tape):
    with pytest.raises(PlanError, match=r"E202 10 pipeline stages exceed the 9 parts .* Valid: 1\.\.9"):
        balanced_cut(gpt_tape, 10, model="GPT")


def test_stages_that_the_model_has_not(gpt_tape):
    with pytest.raises(PlanError, match=r"E260.*calls no module 'blocks.9'; .*Did you mean 'blocks.\d'"):
        named_cut(gpt_tape, ["blocks.9"], model="GPT")
    with pytest.raises(PlanError, match=r"E260.*'blocks.1' runs before or with the stage before it"):
        named_cut(gpt_tape, ["blocks.2", "blocks.1"], model="GPT")
    request = PlanRequest(pp=2, stages=("blocks.1", "blocks.2"))
    with pytest.raises(
        PlanError, match=r"E260 plan.stages names 2 modules, and plan.pp = 2 with 1 chunks has 2"
    ):
        make_plan(request, world_size=2, global_batch=4)
    with pytest.raises(PlanError, match=r"E260.*is for a pipeline, and plan.pp = 1"):
        make_plan(PlanRequest(stages=("blocks.1",)), world_size=1, global_batch=4)


def test_what_is_not_built_with_pipelines():
    with pytest.raises(PlanError, match=r'E265 plan.sync = "parameter_server" with plan.pp = 2 is not built'):
        make_plan(PlanRequest(pp=2, sync="parameter_server", servers=1), world_size=3, global_batch=4)


class Branching(nn.Module):
    """Asks for a value between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if x.sum() > 0 else x


class Leaking(Branching):
    """Hands a tensor on by an attribute of a block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.blocks[0].kept


class _Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        return super().forward(x)


class Caching(Branching):
    """Hands an object from block to block."""

    def forward(self, x: Tensor) -> Tensor:
        cache = _Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class _Cache:
    """May hold tensors."""

    items = ()


class _Takes(nn.Linear):
    def forward(self, x: Tensor, cache: _Cache) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "block", "text"),
    [
        (Branching, nn.Linear, r"E261.*after module 'blocks.0', .* asks for a value of a tensor"),
        (Leaking, _Keeps, r"E262.*left a module by another way than its result"),
        (Caching, _Takes, r"E263.*module 'blocks.0' gets a _Cache, .* use_cache=False"),
    ],
)
def test_values_that_cannot_be_followed(model, block, text):
    made = model()
    made.blocks = nn.ModuleList(block(6, 6) for _ in range(2))
    with pytest.raises(PlanError, match=text):
        tape_of(made, lambda m, b: (m(b).sum(), 2), torch.randn(2, 6))


def test_a_micro_batch_that_runs_other_modules():
    class Varying(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)) if len(x) > 2 else self.blocks[0](x)

    def loss(model, batch):
        return model(batch).sum(), len(batch)

    twin = Twin(Varying(), CPU)
    cut, _ = balanced_cut(twin.record(loss, torch.randn(4, 6), training=True), 2, model="Varying")
    with pytest.raises(PlanError, match=r"E264.*a stage begins at 'blocks.1', .* it does not run"):
        make_stages(twin.record(loss, torch.randn(2, 6), training=True), cut)
    model = Varying()
    prune(model, {"blocks.0.weight"})
    with pytest.raises(PlanError, match=r"E264.*uses 'blocks.1.weight' on a stage that does not have it"):
        Holder(model).tensor("blocks.1.weight")


def test_a_module_whose_result_is_another_than_foreseen():
    class Moody(nn.Linear):
        grows = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.cat([y, y]) if self.grows else y

    model = nn.Sequential(Moody(6, 6), nn.Linear(6, 6))
    tape = tape_of(model, lambda m, b: (m(b).sum(), 2), torch.randn(2, 6))
    stage = make_stages(tape, Cut(("1",)))[0]
    model[0].grows = True
    with pytest.raises(
        PlanError, match=r"E266.*module '0' returned \(4, 6\) of torch.float32 instead of \(2, 6\)"
    ):
        StageRun(tape, stage, {0: torch.randn(2, 6)}, {}).forward(Holder(model))
