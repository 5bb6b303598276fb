import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.layout.check import PlanRequest, make_plan
from meshwright.testing.reference import run_reference as run_plain
from meshwright.training.config import load_config
from meshwright.verification.job import Functions, VerifyJob
from meshwright.verification.plain import (
    PlainRun,
    plain_optimizer,
    reversed_halves,
    reversed_whole,
    swapped_halves,
)
from meshwright.verification.reference import run_reference
from meshwright.verification.subject import batch_of, make_subject
from tests.verification.models import Net, Noisy, Rows, loss_of_labels


@pytest.fixture
def job():
    config = load_config(
        None, ["plan.precision=fp64", "train.optimizer.eps=1e-6", "train.clip_norm=0.4"]
    ).config
    plan = make_plan(PlanRequest(micro_batch=2, precision="fp64"), world_size=2, global_batch=8)
    return VerifyJob(config, plan, steps=2, functions=Functions(Net, loss_of_labels, Rows()))


def test_it_is_the_plain_loop(job, tmp_path):
    """Another loop, written elsewhere, gives the same losses, norms, gradients and parameters."""
    reference = run_reference(job, tmp_path / "file")
    task = make_subject(job)
    steps = [
        [
            batch_of(task.train_data, [index for index, _ in reference.samples[step, k]], precision="fp64")
            for k in range(2)
        ]
        for step in (1, 2)
    ]
    optimizer = plain_optimizer(dict(task.model.named_parameters()), job.config.train.optimizer)
    trace = run_plain(task.model, task.loss, steps, optimizer=optimizer, clip_norm=reference.clip_norm)
    assert reference.losses == pytest.approx(trace.losses, rel=1e-14)
    by_key = {item.key: item for item in reference.recorded}
    for name, value in trace.parameters.items():
        recorded = by_key["parameters", 2, -1, name].scale
        assert recorded.norm == pytest.approx(float(value.norm()), rel=1e-13)
        assert recorded.largest == pytest.approx(float(value.abs().max()), rel=1e-13)
    unclipped = by_key["grad_norm", 1, -1, "grad_norm"].scale.largest
    assert unclipped == pytest.approx(trace.norms[0], rel=1e-13)
    assert reference.clip_norm == pytest.approx(min(0.4, unclipped / 2))
    assert reference.ties == (("blocks.1.0.weight", "tied.weight"),)
    assert [name for name, _ in reference.uses[0].units.forwards] == ["blocks.0", "blocks.1"]
    assert reference.uses[0].units.backwards == (("blocks.1", True), ("blocks.0", True))
    without = {name for name, gradient in trace.gradients[0].items() if gradient is None}
    recorded_gradients = {item.name for item in reference.recorded if item.check == "gradients"}
    assert recorded_gradients == set(trace.parameters) - without


def test_backward_order_is_the_order_of_gradients(job, tmp_path):
    reference = run_reference(job, tmp_path / "file")
    first_step = [item for item in reference.recorded if (item.check, item.step) == ("gradients", 1)]
    modules = [item.name.rpartition(".")[0] for item in sorted(first_step, key=lambda item: item.order)]
    assert list(dict.fromkeys(modules)) == ["head", "blocks.1.0", "blocks.0.0", "embed"]


@pytest.mark.parametrize("order", [reversed_halves, reversed_whole, swapped_halves])
def test_another_order_is_the_same_training(job, order):
    """What noise is measured with covers every sample once, and its tensors are put back in order."""
    taken = {}
    run = PlainRun(
        job,
        put=lambda key, tensor, *, order, start, rows: taken.setdefault(key, []).append(
            (start, tensor.clone())
        ),
        order=order,
        rows={},
    )
    run.train(0.4)
    straight = {}
    PlainRun(
        job,
        put=lambda key, tensor, *, order, start, rows: straight.setdefault(key, tensor.clone()),
        order=lambda micro_step: [micro_step],
        rows={},
    ).train(0.4)
    assert taken.keys() == straight.keys()
    for key, tensor in straight.items():
        torch.testing.assert_close(taken[key][0][1], tensor, rtol=1e-11, atol=1e-13)


def test_orders_hold_every_sample_once():
    for order in (reversed_halves, reversed_whole, swapped_halves):
        for size in (1, 2, 5):
            assert sorted(i for part in order(range(size)) for i in part) == list(range(size))
    assert [list(part) for part in reversed_halves(range(5))] == [[4, 3, 2], [1, 0]]


@pytest.mark.parametrize(
    ("dropout", "ranks", "outcome"), [("native", 2, "E804"), ("native", 1, ""), ("stateless", 2, "")]
)
def test_native_dropout_on_several_ranks_is_refused(dropout, ranks, outcome, tmp_path):
    config = load_config(None, ["plan.precision=fp64", f"train.dropout={dropout}"]).config
    plan = make_plan(PlanRequest(micro_batch=4 // ranks, precision="fp64"), world_size=ranks, global_batch=4)
    job = VerifyJob(config, plan, 1, Functions(lambda: Noisy(normalises=False), loss_of_labels, Rows()))
    if not outcome:
        assert run_reference(job, tmp_path / "file").losses
        return
    with pytest.raises(ConfigError, match=f'{outcome} train.dropout = "native" on 2 ranks') as caught:
        run_reference(job, tmp_path / "file")
    assert "--processes 1" in str(caught.value)
    still = VerifyJob(config, plan, 1, Functions(Net, loss_of_labels, Rows()))  # nothing is drawn
    assert run_reference(still, tmp_path / "file").losses


class Chaotic(nn.Module):
    """Iterates a map that doubles every error; each step of it costs a digit in binary."""

    def __init__(self, iterations):
        super().__init__()
        self.iterations = iterations
        self.first = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x).sigmoid()
        for _ in range(self.iterations):
            x = 4 * x * (1 - x)
        return x


@pytest.mark.parametrize(
    ("iterations", "low", "high"), [(0, 1e-12, 1e-10), (24, 1e-9, 1e-2), (40, 1e-5, 1e12)]
)
def test_limits_follow_what_rounding_does(iterations, low, high, tmp_path):
    config = load_config(None, ["plan.precision=fp64", "train.optimizer.name=sgd"]).config
    plan = make_plan(PlanRequest(micro_batch=4, precision="fp64"), world_size=1, global_batch=4)
    functions = Functions(lambda: Chaotic(iterations), loss_of_labels, Rows())
    reference = run_reference(VerifyJob(config, plan, 1, functions), tmp_path / "file")
    assert low <= reference.tolerances["gradients"].norm <= high
