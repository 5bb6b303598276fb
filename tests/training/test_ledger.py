"""What a rank holds, predicted from shapes and measured on real ranks; and what does not fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.adapt.context_parallel import in_context
from meshwright.capture.capture import capture
from meshwright.comm.mesh import Mesh
from meshwright.comm.ops import DataGroups
from meshwright.errors import DoesNotFitError, PlanError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.layout.recompute import parse_recompute
from meshwright.models import GPT, GPTConfig, Llama, LlamaConfig, language_model_loss
from meshwright.partitioning.checkpointing import cost_of, forwards_of
from meshwright.presets import find_model, matmul_flops_per_token
from meshwright.training.activations import (
    Subject,
    budget_schedules,
    count_activations,
    executed_flops,
    layer_costs,
)
from meshwright.training.assemble import context_scope, shard_model
from meshwright.training.flops import counting_flops
from meshwright.training.ledger import (
    ActivationMeter,
    Ledger,
    check_fits,
    measured_state,
    possible_changes,
    predict_ledger,
    recompute_share,
)
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.sequences import over_sequences
from meshwright.training.slices import on_slice
from meshwright.training.state import TrainState
from meshwright.training.step import train_step

BATCH, SEQ, VOCAB = 4, 16, 61


def make_gpt(dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    sizes = {"num_layers": 4, "dim": 32, "num_heads": 2, "ffn_dim": 96}
    return GPT(GPTConfig(vocab_size=VOCAB, max_seq_len=SEQ, dropout=dropout, **sizes))


def make_subject(
    recompute: str = "none", *, world_size: int = 1, zero: int = 0, precision: str = "fp32"
) -> Subject:
    request = PlanRequest(
        policy=zero, recompute=parse_recompute(recompute), precision=precision, micro_batch=BATCH
    )
    plan = make_plan(request, world_size=world_size, global_batch=BATCH * world_size)
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % VOCAB
    return Subject(make_gpt(), language_model_loss, {"tokens": tokens, "labels": tokens}, plan)


def _measured(mesh, subject: Subject) -> tuple[Ledger, dict[str, int]]:
    group, spec = mesh.group("dp"), OptimizerSpec()
    ledger = predict_ledger(subject, spec, schedules=budget_schedules(subject), index=group.index)
    engine = shard_model(
        subject.model,
        subject.plan,
        DataGroups.of(group),
        device=torch.device("cpu"),
        initialiser=None,
        dropout="native",
        schedules=budget_schedules(subject),
    )
    ledger = ledger.without_gathered() if engine.gathers_in_place else ledger
    state = TrainState(engine, ShardedOptimizer(spec, engine.shards))
    meter = ActivationMeter(subject.model)
    for step in range(2):
        if step == 1:
            state.randomness = lambda _step, _microbatch: meter.around(nullcontext())
        train_step(
            state, lambda _: subject.batch, loss=subject.loss, num_microbatches=1, lr=1e-3, clip_norm=None
        )
    assert meter.held is not None
    held = measured_state(engine, state.optimizer, offload=False)
    return ledger, {**held, **meter.held}


@pytest.mark.parametrize(
    ("zero", "precision", "recompute"),
    [(0, "fp32", "none"), (3, "fp32", "every:2"), (1, "bf16", "full"), (2, "fp32", "budget:200 KiB")],
)
def test_predicted_is_measured(ranks, zero: int, precision: str, recompute: str) -> None:
    subject = make_subject(recompute, world_size=2, zero=zero, precision=precision)
    subject = replace(subject, model=make_gpt(dropout=0.0))
    for ledger, measured in ranks.run(_measured, 2, subject):
        for name, value in ledger.predicted.items():
            assert measured[name] == pytest.approx(value, rel=0.02, abs=64), (name, ledger.line())
        assert ledger.predicted["logits"] > 0 or recompute != "none"


def make_llama() -> Llama:
    torch.manual_seed(0)
    sizes = {"num_layers": 4, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96}
    return Llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=SEQ, **sizes))


def _measured_on_slices(mesh, subject: Subject) -> tuple[Ledger, dict[str, int]]:
    plan = subject.plan
    mesh = Mesh(plan.mesh, mesh.world, log=mesh.log, device=torch.device("cpu"))
    groups, spec = mesh.data_groups(), OptimizerSpec()
    ledger = predict_ledger(on_slice(subject), spec, index=groups.all.index)
    engine = shard_model(subject.model, plan, groups, device=mesh.device, initialiser=None, dropout="native")
    ledger = ledger.without_gathered() if engine.gathers_in_place else ledger
    state = TrainState(engine, ShardedOptimizer(spec, engine.shards))
    scope = context_scope(plan, groups)
    assert scope is not None
    loss, meter = over_sequences(subject.loss, scope), ActivationMeter(subject.model)
    for step in range(2):
        around = meter.around if step else lambda inner: inner
        state.randomness = in_context(scope, lambda _step, _microbatch, around=around: around(nullcontext()))
        train_step(state, lambda _: subject.batch, loss=loss, num_microbatches=1, lr=1e-3, clip_norm=None)
    assert meter.held is not None
    return ledger, {**measured_state(engine, state.optimizer, offload=False), **meter.held}


@pytest.mark.parametrize(
    ("make", "kind", "zero", "recompute"),
    [
        pytest.param(make_gpt, "ring", 3, "full", marks=pytest.mark.parity),
        (make_llama, "ring", 1, "none"),
        pytest.param(make_gpt, "ulysses", 0, "none", marks=pytest.mark.parity),
        pytest.param(make_llama, "allgather", 2, "full", marks=pytest.mark.parity),
    ],
)
def test_a_slice_of_each_sequence_is_predicted(ranks, make, kind: str, zero: int, recompute: str) -> None:
    request = PlanRequest(
        policy=zero,
        recompute=parse_recompute(recompute),
        precision="fp32",
        micro_batch=BATCH,
        cp=2,
        cp_kind=kind,
    )
    subject = make_subject()
    plan = make_plan(request, world_size=2, global_batch=BATCH)
    model = make(0.0) if make is make_gpt else make()
    subject = replace(subject, model=model, plan=plan)
    for ledger, measured in ranks.run(_measured_on_slices, 2, subject):
        assert ledger.predicted["activations"] > 0
        for name, value in ledger.predicted.items():
            assert measured[name] == pytest.approx(value, rel=0.05, abs=64), (name, ledger.line(), measured)
    whole = predict_ledger(subject, OptimizerSpec())
    assert ledger.predicted["logits"] <= 0.6 * whole.predicted["logits"]


def test_recomputation_keeps_less_and_executes_more() -> None:
    kept = {
        word: count_activations(make_subject(word)).kept for word in ("none", "every:2", "full", "constant")
    }
    assert kept["none"] > kept["full"] > kept["every:2"] > kept["constant"]
    shares = {word: recompute_share(make_subject(word)) for word in ("none", "full", "constant")}
    assert shares["none"] == 1.0
    # Each block's forward is a third of its share of the model's FLOPs, less what its last product need not repeat.
    assert 1.2 < shares["full"] < 4 / 3
    assert shares["constant"] > shares["full"] + 0.3


def test_three_counts_of_flops_agree() -> None:
    """By formula, from the captured graph, from shapes, and executed by a real run."""
    subject = replace(make_subject(), model=make_gpt(dropout=0.0))
    preset = find_model("gpt-nano").with_changes(
        num_layers=4, dim=32, num_heads=2, ffn_dim=96, vocab_size=VOCAB, max_seq_len=SEQ
    )
    formula = BATCH * SEQ * matmul_flops_per_token(preset, SEQ, causal=False)
    with counting_flops() as counter:
        subject.loss(subject.model, subject.batch)[0].backward()
    by_shape = executed_flops(subject)
    assert by_shape == counter.get_total_flops()
    graph = capture(subject.model, subject.loss, subject.batch)
    assert graph.flops()(BATCH, SEQ) + graph.backward_flops()(BATCH, SEQ) == by_shape
    # A kernel's backward makes the scores again: 2.5 x its forward where the formula has 2.
    attention = 4 * 2 * 2 * BATCH * SEQ * SEQ * 32
    assert by_shape == pytest.approx(formula + attention * 0.5, rel=0.01)


def test_layer_costs_and_the_schedule_of_a_budget() -> None:
    subject = make_subject("budget:300 KiB")
    names = [f"blocks.{i}" for i in range(4)]
    layers, input_bytes = layer_costs(subject, names)
    assert len(set(layers)) == 1
    assert input_bytes == layers[0].output == BATCH * SEQ * 32 * 4
    assert layers[0].backward == pytest.approx(2 * layers[0].forward, rel=0.35)
    (schedule,) = budget_schedules(subject).values()
    assert cost_of(schedule, layers, input_bytes=input_bytes).peak <= 300 << 10
    assert max(forwards_of(schedule)) > 1
    (roomy,) = budget_schedules(make_subject("budget:1 GiB")).values()
    assert forwards_of(roomy) == (1, 1, 1, 1)


def test_a_budget_that_is_too_small_names_the_least() -> None:
    with pytest.raises(
        PlanError, match=r"blocks.0 .. blocks.3 need .* MiB when only one input is kept"
    ) as caught:
        budget_schedules(make_subject("budget:1 KiB"))
    assert caught.value.code == "E243"


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    subject, spec = make_subject(world_size=4), OptimizerSpec()
    ledger = predict_ledger(subject, spec)
    check_fits(ledger, ledger.predicted_peak, lambda: possible_changes(subject, spec))
    check_fits(ledger, None, lambda: possible_changes(subject, spec))
    with pytest.raises(DoesNotFitError) as caught:
        check_fits(ledger, int(ledger.predicted_peak * 0.85), lambda: possible_changes(subject, spec))
    assert caught.value.code == "E301"
    assert caught.value.exit_code == 3
    text = caught.value.message
    assert "Changes that fit, fastest first: " in text
    assert "plan.zero=3" in text
    assert text.index("plan.micro_batch=2") < text.index('plan.recompute="full"')
    with pytest.raises(DoesNotFitError, match="No single change fits"):
        check_fits(ledger, 1, lambda: possible_changes(subject, spec))


class Asks(nn.Module):
    """Its control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if bool(y.sum() > 0) else -y


def asking(recompute: str = "none") -> Subject:
    return replace(
        make_subject(recompute),
        model=nn.Sequential(Asks()),
        loss=lambda model, batch: (F.relu(model(batch)).sum(), len(batch)),
        batch=torch.zeros(BATCH, 3),
    )


def test_a_budget_needs_a_model_that_shapes_can_follow() -> None:
    with pytest.raises(
        PlanError, match=r"counts blocks by shapes alone, which cannot follow Sequential: aten"
    ) as caught:
        budget_schedules(asking("budget:1 MiB"))
    assert caught.value.code == "E243"


def test_a_model_that_shapes_cannot_follow_is_said_to_be_unknown() -> None:
    subject = asking()
    ledger = predict_ledger(subject, OptimizerSpec())
    assert "activations" not in ledger.predicted
    assert ledger.unknown
    assert "activations unknown: " in ledger.line()
    assert ledger.to_json()["predicted"]["activations"] is None
