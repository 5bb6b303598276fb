"""The whole comparison through real processes: silent on what is right, loud on what is wrong."""

import itertools
import random
import tempfile
import time

import pytest
import torch
from torch import nn

import meshwright
from meshwright.errors import ConfigError, ConfigErrors, PlanError, WorkerError
from meshwright.models import GPT, GPTConfig, language_model_loss
from tests.parity.cover import as_cases, pairwise
from tests.verification import faults
from tests.verification.models import Net, Noisy, Peculiar, Rows, Tokens, loss_of_labels, two_losses


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Tiny models wait for threads longer than they compute."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def make_gpt():
    sizes = {"num_layers": 2, "dim": 24, "num_heads": 3, "ffn_dim": 53}
    return GPT(GPTConfig(vocab_size=31, max_seq_len=7, **sizes))


SUBJECTS = {
    "gpt": (make_gpt, language_model_loss, Tokens(31, 7)),
    "net": (Net, loss_of_labels, Rows()),
    "peculiar": (Peculiar, two_losses, Rows()),
    "dropout": (lambda: Noisy(normalises=False), loss_of_labels, Rows()),
    "batch_norm": (lambda: Noisy(normalises=True), loss_of_labels, Rows()),
}
FACTORS = {
    "subject": list(SUBJECTS),
    "zero": [0, 1, 2, 3],
    "processes": [1, 2, 3],
    "optimizer": ["adamw", "sgd"],
    "precision": ["fp64", "fp32", "bf16", "fp16"],
}


CASES = as_cases(pairwise(FACTORS), num_default=6)


@pytest.mark.parametrize("case", CASES)
def test_what_is_right_passes(case):
    build, loss, data = SUBJECTS[case["subject"]]
    result = meshwright.verify(
        build,
        loss,
        data,
        plan=f"zero={case['zero']},bucket_bytes=4096 bytes",
        processes=case["processes"],
        optimizer=case["optimizer"],
        precision=case["precision"],
        steps=2,
        resume=case["zero"] == 3,
    )
    assert result.ok, result.table()
    names = ["data", "loss", "activations", "gradients", "grad_norm", "parameters", "replicas"]
    names += ["resume"] * (case["zero"] == 3)
    assert all(result.check(name).compared > 0 for name in names)
    limit = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}[case["precision"]]
    assert max(check.worst_relative for check in result.checks) < limit
    assert result.check("ties").compared == (case["subject"] in ("gpt", "net"))
    # The buffers of a batch normalisation follow the global micro-step.
    assert result.check("buffers").compared == {"net": 2, "batch_norm": 6}.get(case["subject"], 0)


@pytest.mark.parametrize(
    ("plan", "processes"),
    [
        ("sync=ring,zero=3", 3),
        ("sync=tree,zero=2,ownership=whole", 2),
        ("sync=parameter_server,servers=2", 4),
        pytest.param("sync=parameter_server", 2, marks=pytest.mark.parity),
        pytest.param("sync=parameter_server,offload=optimizer", 3, marks=pytest.mark.parity),
        pytest.param("sync=ring,zero=1,hsdp=2", 4, marks=pytest.mark.parity),
        pytest.param("sync=tree", 3, marks=pytest.mark.parity),
        pytest.param("sync=hierarchical", 3, marks=pytest.mark.parity),
    ],
)
def test_algorithms_of_the_exchange_compute_the_same(plan, processes):
    plan = f"{plan},bucket_bytes=4096 bytes"
    result = meshwright.verify(
        make_gpt, language_model_loss, Tokens(31, 7), plan=plan, processes=processes, steps=2
    )
    assert result.ok, result.table()
    assert result.check("counts").compared > 0
    name = plan.split(",")[0].removeprefix("sync=")
    assert (f"sync {name}" if name != "parameter_server" else "parameter server") in result.candidate


@pytest.mark.parity
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16"}, {"optimizer": "muon"}, {}])
def test_what_is_right_passes_with_parameter_servers(subject, options):
    build, loss, data = SUBJECTS[subject]
    plan = "sync=parameter_server,bucket_bytes=4096 bytes"
    result = meshwright.verify(build, loss, data, plan=plan, processes=3, steps=2, **options)
    assert result.ok, result.table()
    assert result.check("resume").compared > 0


def failing(inject, **options):
    build, loss, data = SUBJECTS["net"]
    result = meshwright.verify(build, loss, data, processes=2, inject=inject, **options)
    assert not result.ok, result.table()
    return result


def forget_the_step(rank):
    state_of = rank.state.optimizer.state_of

    def one_behind(shard):
        state = state_of(shard)
        return {slot: value - 1 if slot == "step" else value for slot, value in state.items()}

    rank.state.optimizer.state_of = one_behind


def test_what_a_checkpoint_loses_is_found():
    result = failing(forget_the_step, plan="zero=1")
    assert [check.name for check in result.checks if not check.ok] == ["resume"]
    wrong = result.first_wrong
    assert (wrong.check, wrong.step) == ("parameters", 3)
    table = result.table()
    assert "what was saved, or what was loaded, is not" in table
    assert result.to_json()["checks"][-1]["name"] == "resume"


def one_element_sites():
    """Random sites of each kind, with a fixed seed."""
    draw = random.Random(5)
    names = {
        "gradients": ["embed.weight", "blocks.0.0.bias", "blocks.1.0.weight", "head.weight"],
        "parameters": ["embed.bias", "blocks.0.0.weight", "head.weight"],
        "activations": ["embed", "blocks.1", "tied", "head"],
    }
    for check, zero in itertools.product(names, (0, 3)):
        yield check, draw.choice(names[check]), zero, draw.randrange(2), draw.randrange(1, 4)


@pytest.mark.parametrize(("check", "name", "zero", "rank", "step"), list(one_element_sites()))
def test_one_element_off_by_1e_8_is_found(check, name, zero, rank, step):
    """A shard may lie on one rank only: the fault is then tried where it is."""
    inject = faults.one_element_of(check, name, rank=rank, step=step)
    if zero == 3 and check != "activations":
        inject = both(*(faults.one_element_of(check, name, rank=r, step=step) for r in range(2)))
    result = failing(inject, plan=f"zero={zero}")
    wrong = result.check(check).first_wrong
    assert wrong is not None, result.table()
    assert wrong.name == name
    assert "1 of" in wrong.place or "2 of" in wrong.place
    assert (wrong.step, result.first_wrong.check, result.first_wrong.name) == (step, check, name)


def both(*injections):
    def inject(rank):
        for injection in injections:
            injection(rank)

    return inject


def test_one_ranks_gradient_twice():
    first = failing(faults.twice_on_rank_1).first_wrong
    assert (first.check, first.step, first.name) == ("gradients", 1, "head.bias")
    assert first.cause.startswith("Rank 1's part is in the sum 2 times, and every other rank's once. ")
    assert "Loss right, gradients wrong" in first.cause


def test_a_constant_factor_is_named_by_the_mesh():
    result = failing(faults.all_twice, clip_norm=0.0)
    first = result.first_wrong
    assert (first.check, first.step, first.ratio) == ("gradients", 1, pytest.approx(2.0, rel=1e-12))
    assert "exactly 2.0000 x reference" in result.table()
    assert "2 = dp" in first.cause


def test_no_gradient_reduction():
    result = failing(faults.no_reduction, plan="zero=0")
    first = result.first_wrong
    assert (first.check, first.step) == ("gradients", 1)
    assert "not reduced over dp" in first.cause
    counts = result.check("counts").first_wrong
    assert (counts.name, counts.problem) == ("all_reduce", "1 issued, 2 declared")
    assert result.check("replicas").first_wrong.step == 1


def test_samples_that_were_not_read():
    first = failing(faults.skipped_last_micro_step).first_wrong
    assert (first.check, first.step, first.microbatch) == ("data", 1, 1)
    assert failing(faults.seed_per_rank).first_wrong.check == "data"


def test_a_fault_that_raises_is_a_worker_error_and_its_logs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def inject(rank):
        raise RuntimeError("injected")

    with pytest.raises(WorkerError, match="injected"):
        meshwright.verify(*SUBJECTS["net"], processes=2, inject=inject)
    (folder,) = tmp_path.glob("meshwright-verify-*")
    logs = [log.read_text() for log in (folder / "candidate/logs").glob("rank*.log")]
    assert any("injected" in log for log in logs)  # the first rank that raises ends the other
    assert not list(folder.glob("*.bin"))


# Bad input.


def test_a_build_that_differs_each_time():
    def build():
        model = Net()
        with torch.no_grad():
            model.head.bias.fill_(
                time.perf_counter_ns() % 10**6
            )  # seconds are alike in float32 for milliseconds
        return model

    with pytest.raises(ConfigError, match=r"E801 two builds .* first in 'head\.bias' \(1 of "):
        meshwright.verify(build, loss_of_labels, Rows(), processes=2)


def test_a_loss_that_differs_each_time():
    def loss(model, batch):
        total, count = loss_of_labels(model, batch)
        return total + random.SystemRandom().random(), count

    with pytest.raises(ConfigError, match="E802 the loss of one batch on equal models is"):
        meshwright.verify(Net, loss, Rows(), processes=2)


def test_a_bare_scalar_over_ignored_labels():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["label"])

    with pytest.raises(ConfigError, match=r"E112 .* Return \(sum, count\)"):
        meshwright.verify(Net, loss, Rows(), processes=2)


def test_a_bare_scalar_that_is_a_mean_over_samples():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["label"].clamp(min=0))

    assert meshwright.verify(Net, loss, Rows(), processes=2, steps=1, resume=False).ok


@pytest.mark.parametrize(
    ("plan", "options", "error", "text"),
    [
        ("dp=3", {}, PlanError, "E200 .*= 3, but 2 processes started"),
        ("zero=1,micro_batch=3", {"global_batch": 8}, PlanError, "E203 global_batch 8"),
        ("ep=2", {}, ConfigErrors, "E110 .*plan.ep = 2 is not built yet"),
        ("zerro=2", {}, ConfigErrors, "E101 .*Did you mean 'plan.zero'"),
        ("zero=1", {"precision": "fp8"}, ConfigErrors, "E109"),
        ("zero=1", {"steps": 0}, ConfigError, "E109 steps = 0"),
    ],
)
def test_plans_that_cannot_run_start_no_process(plan, options, error, text, monkeypatch):
    monkeypatch.setattr("meshwright.launching.verify.run_local", None)
    with pytest.raises(error, match=text):
        meshwright.verify(Net, loss_of_labels, Rows(), plan=plan, processes=2, **options)


@pytest.mark.parametrize(("build", "code"), [(lambda: "a model", "E111"), (lambda: None, "E111")])
def test_what_is_no_module(build, code):
    with pytest.raises(ConfigError, match=code):
        meshwright.verify(build, loss_of_labels, Rows(), processes=1)
