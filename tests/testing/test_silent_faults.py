"""The registry of silent faults: consistent, refused where they cannot be committed, and found by `verify`."""

import itertools
import re

import pytest

import meshwright
from meshwright.comm.ops import DataGroups
from meshwright.errors import ConfigError
from meshwright.launching.verify import job_of
from meshwright.layout.policy import POLICY_NAMES
from meshwright.testing.faults.registry import SILENT, Injection
from meshwright.testing.faults.silent import NEEDS
from meshwright.testing.ranks import local_mesh
from meshwright.verification.build import build_rank
from meshwright.verification.result import CHECK_NAMES
from meshwright.verification.subject import make_subject
from tests.parity.cover import pairwise
from tests.parity.faults import CASES, SUBJECTS, Case, Runner, cases_of
from tests.parity.verifying import Verifier
from tests.verification.models import Net, Rows, loss_of_labels


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Tiny models wait for threads longer than they compute."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("name", SILENT)
def test_every_fault_says_what_it_is(name):
    fault = SILENT[name]
    assert fault.name == name
    assert fault.theme
    assert fault.description
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.source)
    assert fault.expected
    assert set(fault.expected) <= set(CHECK_NAMES)
    assert set(fault.needs) <= set(NEEDS)


def test_there_are_as_many_as_the_table_promises():
    assert len(SILENT) >= 36
    assert {need for fault in SILENT.values() for need in fault.needs} == set(NEEDS)
    assert all(len(cases_of(fault)) >= 3 for fault in SILENT.values())


def module_of(name):
    return SILENT[name].inject.__module__.rpartition(".")[2]


def chosen():
    """A fault of each file under each policy and two numbers of ranks, each time another, on cheap models."""
    names = list(SILENT)
    factors = {"file": sorted(set(map(module_of, names))), "policy": POLICY_NAMES, "ranks": [2, 3]}
    for row in pairwise(factors):
        for name, case in itertools.product(list(names), CASES):
            if (
                (module_of(name), case.policy, case.ranks) == tuple(row.values())
                and (case.micro_steps, case.optimizer) == (2, "adamw")
                and case.subject in ("net", "batch norm", "branches")
                and case.offers.issuperset(SILENT[name].needs)
            ):
                names.append(names.pop(names.index(name)))
                yield pytest.param(name, case, id=f"{name}-{case.policy}x{case.ranks}")
                break


def of_cut_sequences():
    """What no cheap model above can have."""
    for name, kind in (("gradients_not_sent_home", "ring"), ("order_mistaken", "allgather")):
        yield pytest.param(name, Case("gpt without dropout", "ddp", 2, 2, "adamw", cp=2, kind=kind), id=name)


@pytest.fixture(scope="module")
def runner(ranks, tmp_path_factory):
    with Verifier(ranks) as verifier:
        yield Runner(verifier, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(("name", "case"), [*chosen(), *of_cut_sequences()])
def test_a_fault_is_caught_and_named(runner, name, case):
    trial = runner.trial(name, case, seed=1)
    assert trial.is_right, trial.describe()


@pytest.mark.parametrize("name", ["push_dropped", "push_twice"])
def test_a_fault_of_a_server_is_caught_and_the_worker_is_named(runner, name):
    trial = runner.trial(name, case_of("net", "parameter_server"), seed=1)
    assert trial.is_right, trial.describe()
    worker = trial.site.other % 2
    assert trial.first.source_rank in (worker, None)
    assert trial.first.step == trial.site.step


def test_a_site_is_drawn_from_its_seed(runner):
    """Other ranks draw the same; another seed is another place or time."""
    trials = [runner.trial("update_skipped", case_of("net", "ddp"), seed) for seed in (0, 0, 1, 2, 3)]
    assert trials[0].site == trials[1].site
    assert len({trial.site for trial in trials}) > 1
    for trial in trials:
        assert (trial.first.step, trial.first.ranks) == (trial.site.step, (trial.site.rank,))


def case_of(subject, policy):
    return next(case for case in CASES if (case.subject, case.policy) == (subject, policy))


def test_no_gradient_reduction_lets_replicas_drift_from_step_1():
    injection = Injection("no_gradient_reduction")
    result = meshwright.verify(Net, loss_of_labels, Rows(), plan="zero=0", processes=2, inject=injection)
    first = result.first_wrong
    assert first is not None
    assert (first.check, first.step) == ("gradients", 1)
    assert "not reduced over dp" in first.cause
    assert result.check("replicas").first_wrong.step == 1


# What is refused.


def candidate_of(subject, plan="zero=1"):
    """One rank in this process, before training."""
    job = job_of(SUBJECTS[subject].functions, plan=plan, processes=1, options={})
    return build_rank(job, make_subject(job), DataGroups.of(local_mesh().group("dp")), clip_norm=1.0)


def test_an_unknown_fault():
    with pytest.raises(ConfigError, match=r"E803 .*'no_reduction'\. Did you mean 'no_gradient_reduction'\?"):
        Injection("no_reduction")


def test_a_fault_whose_needs_are_not_met():
    text = (
        r"E803 fault 'no_gradient_reduction' cannot be committed in Net under zero1 on 1 ranks with 2 micro-steps "
        r"and 3 steps: it needs 2 ranks and policy ddp\."
    )
    with pytest.raises(ConfigError, match=text):
        Injection("no_gradient_reduction").site(candidate_of("net"))


def test_a_fault_that_needs_more_steps():
    with pytest.raises(ConfigError, match=r"E803 .* and 1 steps: it needs 2 steps\."):
        Injection("gradients_not_cleared", steps=1).site(candidate_of("net"))


def test_a_layout_that_places_are_not_drawn_for():
    with pytest.raises(ConfigError, match=r"E803 .* it needs one copy of the model in flat shards\."):
        Injection("update_skipped").site(candidate_of("net", "zero=1,ownership=whole"))


def test_a_fault_without_a_place():
    with pytest.raises(
        ConfigError, match=r"E803 .* finds no place in Peculiar under zero1\. It needs a buffer"
    ):
        Injection("buffer_lost").site(candidate_of("branches"))


def test_a_fault_of_tensor_parallelism_is_caught_and_named(runner):
    case = Case("gpt without dropout", "zero1", 1, 1, "adamw", tp=2)
    trial = runner.trial("row_bias_on_each_rank", case, seed=1)
    assert trial.is_right, trial.describe()


def test_a_fault_of_a_pipeline_is_caught_and_named(runner):
    # pitfall: stages' gradients of a tied weight that are never summed.
    case = Case("deep gpt", "zero1", 1, 5, "adamw", pp=2, schedule="1f1b")
    trial = runner.trial("tie_not_summed_over_stages", case, seed=1)
    assert trial.is_right, trial.describe()


def test_a_fault_of_sequence_parallelism_is_caught_and_named(runner):
    case = Case("gpt without dropout", "zero1", 1, 1, "adamw", tp=2, cuts_tokens=True)
    # pitfall: gradients of norms that nobody sums over the ranks of the sequence.
    trial = runner.trial("partial_gradients_not_summed", case, seed=1)
    assert trial.is_right, trial.describe()
