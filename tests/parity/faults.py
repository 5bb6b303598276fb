"""Every silent fault at several random sites through `verify`: is it caught, and is what is wrong named?

`python -m tests.parity.faults` (part of `make parity`) runs them all and writes docs/faults.md. Plans, models and
sites are drawn from a seed; a fault meets only plans and models that have what it breaks.
"""

from __future__ import annotations

import argparse
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.launching.verify import job_of
from meshwright.layout.plan import TransportName
from meshwright.layout.policy import POLICY_NAMES, find_policy
from meshwright.layout.recompute import parse_recompute
from meshwright.layout.sequence import CpKind
from meshwright.mesh import MeshSpec
from meshwright.models import GPT, GPTConfig, Llama, LlamaConfig, language_model_loss
from meshwright.models.hf_loss import causal_lm_loss
from meshwright.testing.faults.registry import SILENT, Injection
from meshwright.testing.faults.silent import SilentFault, Site
from meshwright.testing.ranks import RankError
from meshwright.verification.job import Functions
from meshwright.verification.rank import CandidateRank
from meshwright.verification.result import VerifyResult, Wrong
from tests.parity.verifying import Prepared, Verifier
from tests.pipeline.models import EncoderDecoder, Pairs, pair_loss
from tests.verification.models import Net, Noisy, Peculiar, Rows, loss_of_labels, two_losses

ROOT = Path(__file__).resolve().parents[2]
STEPS, GLOBAL_BATCH, SITES = 3, 20, 3
SAMPLES = 43  # so that steps differ in valid labels, and one or two samples of a step take the branch
BUCKET_BYTES = 4096  # so that small models have several
# A gradient below this part of its module's is mathematically zero: the key's bias of an attention.
NEGLIGIBLE = 1e-6


class Tokens:
    """Sequences of unequal numbers of valid labels."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[: index % 6] = -100
        return {"tokens": tokens[:-1], "labels": labels}


class Packed(Tokens):
    """Two documents in each sequence, as transformers takes them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        length, end = 11, 3 + index % 5
        tokens = torch.randint(31, (length,), generator=torch.Generator().manual_seed(index))
        return {
            "input_ids": tokens,
            "position_ids": torch.cat([torch.arange(end), torch.arange(length - end)]),
        }


def make_mistral() -> torch.nn.Module:
    """A window that reaches over the borders of slices."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    return MistralForCausalLM(
        MistralConfig(
            **sizes, vocab_size=31, num_key_value_heads=3, max_position_embeddings=16, sliding_window=3
        )
    )


def make_gpt(dropout: float, num_layers: int = 2) -> GPT:
    sizes = {"num_layers": num_layers, "dim": 24, "num_heads": 3, "ffn_dim": 53}
    return GPT(GPTConfig(vocab_size=31, max_seq_len=7, dropout=dropout, **sizes))


def make_grouped() -> Llama:
    """Fewer key/value heads than three ranks."""
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 41}
    return Llama(LlamaConfig(vocab_size=31, max_seq_len=7, **sizes))


@dataclass(frozen=True)
class Subject:
    """A model with loss and data, and which needs of faults it meets."""

    functions: Functions
    has: frozenset[str]


_LABELS = {"unequal labels", "2 samples"}
_LANGUAGE = {*_LABELS, "ties", "causal attention", "sequences"}
SUBJECTS = {
    "gpt": Subject(
        Functions(partial(make_gpt, 0.1), language_model_loss, Tokens()),
        frozenset({*_LANGUAGE, "dropout", "modes differ"}),
    ),
    "gpt without dropout": Subject(
        Functions(partial(make_gpt, 0.0), language_model_loss, Tokens()),
        frozenset({*_LANGUAGE, "no dropout"}),
    ),
    "net": Subject(
        Functions(Net, loss_of_labels, Rows(SAMPLES)),
        frozenset({*_LABELS, "ties", "frozen parameters", "buffers", "no dropout"}),
    ),
    "batch norm": Subject(
        Functions(partial(Noisy, normalises=True), loss_of_labels, Rows(SAMPLES)),
        frozenset({*_LABELS, "batch normalisation", "buffers", "dropout", "modes differ"}),
    ),
    "packed window": Subject(
        Functions(make_mistral, causal_lm_loss, Packed()),
        frozenset({*_LANGUAGE, "windows", "documents"} - {"ties"}),
    ),
    "grouped heads": Subject(
        Functions(make_grouped, language_model_loss, Tokens()), frozenset({*_LANGUAGE} - {"ties"})
    ),
    "deep gpt": Subject(
        Functions(partial(make_gpt, 0.0, 4), language_model_loss, Tokens()),
        frozenset({*_LANGUAGE, "no dropout", "shared weights"}),
    ),
    "skips": Subject(
        Functions(partial(EncoderDecoder, 31), pair_loss, Pairs(31, 7)),
        frozenset({*_LABELS, "dropout", "shared weights", "skip connections"}),
    ),
    "branches": Subject(
        Functions(partial(Peculiar, branch_above=1.5), two_losses, Rows(SAMPLES)),
        frozenset({"2 samples", "rare parameters", "no dropout"}),
    ),
}


@dataclass(frozen=True)
class Case:
    """A model and a plan."""

    subject: str
    policy: str
    ranks: int
    micro_steps: int
    optimizer: str
    tp: int = 1
    cp: int = 1
    kind: CpKind = "ring"
    cuts_tokens: bool = False
    pp: int = 1
    schedule: str = "serial"
    recompute: str = "none"

    def __str__(self) -> str:
        cut = f" tp {self.tp}" if self.tp > 1 else ""
        cut += " with sequence parallel" if self.cuts_tokens else ""
        cut += f" cp {self.cp} {self.kind}" if self.cp > 1 else ""
        cut += f" pp {self.pp} {self.schedule}" if self.pp > 1 else ""
        cut += f" recompute {self.recompute}" if self.recompute != "none" else ""
        return f"{self.subject}, {self.policy}x{self.ranks}{cut}, {self.micro_steps} micro-steps, {self.optimizer}"

    @property
    def offers(self) -> frozenset[str]:
        """The needs of faults that it meets; with a server, stages, tp or cp those of them only."""
        if self.policy == "parameter_server":
            return frozenset({"servers"})
        if self.pp > 1:
            return self._offers_of_stages()
        if self.tp > 1:
            return self._offers_of_cut_layers()
        if self.cp > 1:
            return self._offers_of_cut_sequences()
        sharded = self.policy != "ddp"
        by_plan = {
            "2 ranks": True,
            "3 ranks": self.ranks >= 3,
            "micro-steps": self.micro_steps >= 2,
            "ddp": not sharded,
            "optimizer shards": sharded,
            "gathered updates": self.policy in ("zero1", "zero2"),
            "gradient shards": self.policy in ("zero2", "zero3"),
            "whole gradients": self.policy in ("ddp", "zero1"),
            "weight shards": self.policy == "zero3",
            "whole weights": self.policy != "zero3",
            "adam": self.optimizer == "adamw",
            "decoupled decay": self.optimizer == "adamw",
            "clipping": True,
        }
        return SUBJECTS[self.subject].has | {need for need, met in by_plan.items() if met}

    def _offers_of_stages(self) -> frozenset[str]:
        """With stages those of them only."""
        splits = self.schedule in ("zb-h1", "zb-v") and self.policy in ("ddp", "zero1")
        by_plan = {
            "cut sequences": self.cp > 1,
            "several stages": self.schedule in CHUNKED,
            "split backward": splits,
            "layers that run again": self.recompute != "none",
        }
        kept = {"dropout", "shared weights", "skip connections", "documents", "unequal labels"}
        kept &= SUBJECTS[self.subject].has
        if self.schedule not in CHUNKED:
            kept -= {"skip connections"}  # too few stages for one that only hands values on
        if self.schedule == "zb-v":
            kept -= {"shared weights"}  # the first stage and the last are on one rank
        return frozenset({"stages", *kept, *(need for need, met in by_plan.items() if met)})

    def _offers_of_cut_layers(self) -> frozenset[str]:
        """With cut layers those of them only."""
        by_plan = {
            "cut tokens": self.cuts_tokens,
            "repeated heads": self.subject == "grouped heads" and self.tp == 3,
        }
        kept = {"dropout", "ties"} & SUBJECTS[self.subject].has
        return frozenset({"tensor parallelism", *kept, *(need for need, met in by_plan.items() if met)})

    def _offers_of_cut_sequences(self) -> frozenset[str]:
        """With cut sequences those of them only."""
        by_kind = {
            "ring": self.kind == "ring",
            "zigzag": self.kind in ("ring", "allgather"),
            "exchanged heads": self.kind == "ulysses" and self.cp == 3 and self.subject.startswith("gpt"),
            "padding": self.kind != "ulysses" or self.cp == 2,
            "our batches": self.subject.startswith("gpt"),
        }
        kept = {"dropout", "causal attention", "windows", "documents"} & SUBJECTS[self.subject].has
        return frozenset({"2 ranks", "cut sequences", *kept, *(need for need, met in by_kind.items() if met)})


# Schedules with two stages a rank.
CHUNKED = ("interleaved", "zb-v")
# Without those that only cut sequences or layers need.
UNCUT = tuple(s for s in SUBJECTS if s not in ("packed window", "grouped heads", "deep gpt", "skips"))
KINDS: tuple[CpKind, ...] = ("ring", "ulysses", "allgather")
CASES = (
    tuple(
        Case(subject, policy, ranks, micro_steps, optimizer)
        for subject in UNCUT
        for policy in POLICY_NAMES
        for ranks in (2, 3, 4)
        for micro_steps in (1, 2)
        for optimizer in ("adamw", "sgd")
    )
    + tuple(
        Case(subject, "parameter_server", ranks, micro_steps, "adamw")
        for subject in UNCUT
        for ranks in (3, 4)
        for micro_steps in (1, 2)
    )
    + tuple(
        Case(subject, policy, ranks, micro_steps, "adamw", tp)
        for subject in ("gpt", "gpt without dropout")
        for policy in POLICY_NAMES
        for ranks, tp in ((1, 2), (1, 3), (2, 2))
        for micro_steps in (1, 2)
    )
    + tuple(
        Case("grouped heads", policy, 1, micro_steps, "adamw", 3)
        for policy in POLICY_NAMES
        for micro_steps in (1, 2)
    )
    + tuple(
        Case(subject, policy, ranks, micro_steps, "adamw", tp, cuts_tokens=True)
        for subject in ("gpt", "gpt without dropout")
        for policy in POLICY_NAMES
        for ranks, tp in ((1, 2), (1, 3), (2, 2))
        for micro_steps in (1, 2)
    )
    + tuple(
        Case(subject, policy, ranks, 2, "adamw", cp=cp, kind=kind)
        for subject in ("gpt", "gpt without dropout", "packed window")
        for policy in ("ddp", "zero3")
        for ranks, cp in ((2, 2), (3, 3), (4, 2))
        for kind in KINDS
    )
    + tuple(
        Case(subject, policy, ranks, 5, "adamw", pp=pp, schedule=schedule)
        for subject in ("deep gpt", "skips")
        for policy in ("ddp", "zero1", "zero2", "zero3")
        for ranks, pp in ((1, 2), (2, 2), (1, 3))
        for schedule in ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v")
        if pp == 2 or schedule not in CHUNKED
    )
    + tuple(
        Case(
            "packed window", policy, 2, 5, "adamw", cp=2, kind=kind, pp=2, schedule=schedule, recompute="full"
        )
        for policy in ("ddp", "zero3")
        for kind in KINDS
        for schedule in ("1f1b", "gpipe")
    )
)


def cases_of(fault: SilentFault) -> list[Case]:
    """All cases that have what the fault breaks, in an order drawn from its name."""
    cases = [case for case in CASES if case.offers.issuperset(fault.needs)]
    for own in ("servers", "tensor parallelism", "cut tokens", "cut sequences", "stages"):
        cases = [case for case in cases if (own in case.offers) == (own in fault.needs)]
    random.Random(fault.name).shuffle(cases)
    return cases


@dataclass(frozen=True)
class Trial:
    """One fault at one site."""

    fault: str
    case: Case
    site: Site
    first: Wrong | None
    step_1_loss_unchanged: bool
    failed: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether the first wrong check is one of the fault's, and the tensor one of the place's."""
        tensors = self.site.place.tensors
        if self.first is None or self.first.check not in SILENT[self.fault].expected:
            return False
        return not tensors or self.first.name.partition(" ")[0] in tensors

    def describe(self) -> str:
        place = f" at {self.site.place.name}" if self.site.place.name else ""
        where = f"rank {self.site.rank}, step {self.site.step}{place}"
        found = f"{self.first.check}: {self.first.describe()}" if self.first else "NOT CAUGHT"
        return f"{self.fault} ({self.case}; {where}) -> {'' if self.is_right else 'WRONG '}{found}"


@dataclass(frozen=True)
class Noted:
    """An injection whose first rank writes its site to a file."""

    injection: Injection
    path: Path

    def __call__(self, candidate: CandidateRank) -> None:
        if candidate.rank == 0:
            self.path.write_bytes(pickle.dumps(self.injection.site(candidate)))
        self.injection(candidate)


@dataclass
class Runner:
    """Runs faults on warm ranks; one reference serves all plans of the same micro-steps and optimizer."""

    verifier: Verifier
    folder: Path
    transport: TransportName = "gloo"
    prepared: dict[tuple[str, int, str], Prepared] = field(default_factory=dict)

    def trial(self, fault: str, case: Case, seed: int) -> Trial:
        """One fault in one case, at the site of the seed; raises `RankError` where a rank raises."""
        prepared = self._prepare(case)
        path = self.folder / "site"
        injection = Injection(fault, seed=seed, steps=STEPS, inert=_inert(prepared))
        result = self.verifier.run(
            prepared, Noted(injection, path), plan=self._plan(prepared, case), timeout=180.0
        )
        return _trial(fault, case, pickle.loads(path.read_bytes()), result)

    def _plan(self, prepared: Prepared, case: Case) -> Any:
        servers = int(case.policy == "parameter_server")
        workers = (case.ranks - servers) // case.cp
        return replace(
            prepared.job.plan,
            mesh=MeshSpec.of(pp=case.pp, dp_shard=workers, cp=case.cp, tp=case.tp),
            schedule=case.schedule,
            chunks=2 if case.schedule in CHUNKED else 1,
            recompute=parse_recompute(case.recompute),
            cp_kind=case.kind,
            sequence_parallel=case.cuts_tokens,
            policy=find_policy(case.policy, bucket_bytes=BUCKET_BYTES),
            transport=self.transport,
            micro_batch=-(-GLOBAL_BATCH // (case.micro_steps * workers)),
            sync="parameter_server" if servers else "native",
            servers=servers,
        )

    def _prepare(self, case: Case) -> Prepared:
        key = (case.subject, case.micro_steps, case.optimizer)
        if key not in self.prepared:
            micro_batch = GLOBAL_BATCH // case.micro_steps
            job = job_of(
                SUBJECTS[case.subject].functions,
                plan=f"micro_batch={micro_batch}",
                processes=1,
                options={"steps": STEPS, "global_batch": GLOBAL_BATCH, "optimizer": case.optimizer},
            )
            self.prepared[key] = self.verifier.prepare(job)
        return self.prepared[key]


def _inert(prepared: Prepared) -> frozenset[str]:
    """Parameters without a gradient in some step, or with one that is mathematically zero."""
    gradients = [item for item in prepared.reference.recorded if item.check == "gradients"]
    live = Counter(item.name for item in gradients if item.scale.norm > NEGLIGIBLE * item.scale.module_norm)
    functions = prepared.job.functions
    assert functions is not None, "subjects are Python objects"
    named = functions.build().named_parameters()
    return frozenset(name for name, parameter in named if parameter.requires_grad and live[name] < STEPS)


def _trial(fault: str, case: Case, site: Site, result: VerifyResult) -> Trial:
    loss = result.check("loss").first_wrong
    return Trial(
        fault,
        case,
        site,
        first=result.first_wrong,
        step_1_loss_unchanged=loss is None or loss.step > 1,
        failed=tuple(check.name for check in result.checks if not check.ok),
    )


def run(names: Sequence[str], sites: int, transport: TransportName = "gloo") -> Iterator[Trial]:
    """`sites` trials of each fault, each in another case where there are enough."""
    with Verifier() as verifier, tempfile.TemporaryDirectory() as folder:
        runner = Runner(verifier, Path(folder), transport)
        for name in names:
            done = 0
            for seed, case in enumerate(cases_of(SILENT[name])):
                if done == sites:
                    break
                try:
                    yield runner.trial(name, case, seed)
                except RankError as error:
                    if "E803" not in str(error):  # no place for it in this model
                        raise
                    continue
                done += 1


def table(trials: Sequence[Trial], seconds: float) -> str:
    """docs/faults.md."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    caught = [trial for trial in trials if trial.first is not None]
    right = [trial for trial in trials if trial.is_right]
    by_fault = {name: [trial for trial in trials if trial.fault == name] for name in SILENT}
    silent = [name for name, mine in by_fault.items() if all(trial.step_1_loss_unchanged for trial in mine)]
    lines = [
        "# Silent faults",
        "",
        f"Written by `python -m tests.parity.faults` on commit {commit} ({seconds:.0f} s): {len(SILENT)} faults, each",
        f"a kind of public bug, at {len(trials)} random sites (model, plan, rank, step, place). Caught by `verify`:",
        f"{len(caught)} of {len(trials)}. Named right: {len(right)} of {len(trials)}: the first failing check is one",
        "that the fault allows, and for a fault at a parameter, bucket or module the first wrong tensor belongs to it.",
        f"{len(silent)} faults leave the loss of step 1 unchanged at every site.",
        "",
        "| fault | kind | what happens | public report | caught | named right | named first | loss of step 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, mine in by_fault.items():
        fault = SILENT[name]
        named = Counter(trial.first.check for trial in mine if trial.first is not None)
        unchanged = sum(trial.step_1_loss_unchanged for trial in mine)
        loss = {len(mine): "unchanged", 0: "wrong"}.get(unchanged, f"unchanged at {unchanged} sites")
        repository, _, number = fault.source.partition("#")
        lines.append(
            f"| {name} | {fault.theme} | {fault.description} | "
            f"[{fault.source}](https://github.com/{repository}/issues/{number}) | "
            f"{sum(trial.first is not None for trial in mine)} of {len(mine)} | "
            f"{sum(trial.is_right for trial in mine)} of {len(mine)} | {', '.join(named)} | {loss} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="faults; all without")
    parser.add_argument("--sites", type=int, default=SITES)
    parser.add_argument("--transport", choices=("gloo", "shm"), default="gloo")
    arguments = parser.parse_args()
    names, started = arguments.names or list(SILENT), time.monotonic()
    trials = []
    for trial in run(names, arguments.sites, arguments.transport):
        trials.append(trial)
        print(f"{time.monotonic() - started:4.0f} s {trial.describe()}", flush=True)
    caught, right = (
        sum(test) for test in zip(*((t.first is not None, t.is_right) for t in trials), strict=True)
    )
    print(f"{caught} caught and {right} named right of {len(trials)}")
    if not arguments.names and arguments.transport == "gloo":
        (ROOT / "docs" / "faults.md").write_text(table(trials, time.monotonic() - started))
    return 0 if caught == len(trials) and right >= 0.9 * len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
