"""plan.pp is one device: every schedule and policy, ties, skips, models of transformers, dropout, uneven tokens.

On warm ranks by `verify`'s own code; a few through real processes elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.launching.verify import job_of
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.models.hf_loss import causal_lm_loss
from meshwright.schedule.catalogue import SCHEDULE_NAMES
from meshwright.testing.ranks import RankError
from meshwright.verification.job import Functions
from meshwright.verification.rank import CandidateRank
from tests.parity.cover import as_cases, pairwise
from tests.parity.verifying import Verifier
from tests.pipeline.models import (
    EncoderDecoder,
    Images,
    Pairs,
    UNet,
    Uneven,
    make_gpt2,
    make_t5,
    pair_loss,
    pixel_loss,
    t5_loss,
)
from tests.verification.checks import assert_one_device
from tests.verification.models import Rows, Tokens, loss_of_labels
from tests.verification.test_tensor_parallel import make_llama

TOKENS = Tokens(101, 7)


def make_gpt(dropout: float = 0.3) -> GPT:
    sizes = {"num_layers": 4, "dim": 24, "num_heads": 6, "ffn_dim": 50}
    return GPT(GPTConfig(vocab_size=101, max_seq_len=7, dropout=dropout, **sizes))


SUBJECTS: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (make_gpt, language_model_loss, TOKENS),
    "llama": (make_llama, language_model_loss, TOKENS),
    "encoder-decoder": (lambda: EncoderDecoder(101), pair_loss, Pairs(101, 7)),
    "u-net": (UNet, pixel_loss, Images()),
    "mlp": (Uneven, loss_of_labels, Rows()),
    "gpt2": (make_gpt2, causal_lm_loss, TOKENS),
    "t5": (make_t5, t5_loss, Pairs(101, 7)),
}
FACTORS = {
    "subject": list(SUBJECTS),
    "pp": [2, 3, 4],
    "schedule": list(SCHEDULE_NAMES),
    "zero": [0, 1, 2, 3],
    "dp": [1, 2],
    "recompute": ["none", "full", "selective"],
    "transport": ["gloo", "shm"],
}
# Stages that a subject can be cut into.
PARTS = {"mlp": 4, "llama": 5}
CASES = as_cases(
    [
        {
            "subject": "gpt",
            "pp": 2,
            "schedule": "1f1b",
            "zero": 1,
            "dp": 2,
            "recompute": "none",
            "transport": "shm",
        },
        {
            "subject": "u-net",
            "pp": 3,
            "schedule": "gpipe",
            "zero": 0,
            "dp": 1,
            "recompute": "none",
            "transport": "gloo",
        },
        {
            "subject": "gpt",
            "pp": 2,
            "schedule": "zb-v",
            "zero": 0,
            "dp": 1,
            "recompute": "full",
            "transport": "gloo",
        },
        *pairwise(FACTORS),
    ],
    num_default=3,
)


@pytest.fixture(scope="module")
def verifier(ranks) -> Iterator[Verifier]:
    with Verifier(ranks) as made:
        yield made


def check(verifier: Verifier, subject: str, plan: str, processes: int, **options: Any) -> None:
    build, loss, data = SUBJECTS[subject]
    job = job_of(
        Functions(build, loss, data), plan=plan, processes=processes, options={"steps": 2, **options}
    )
    result = verifier.run(verifier.prepare(job), timeout=200)
    limit = {"fp64": 1e-11, "fp32": 1e-4, "bf16": 0.1}[options.get("precision", "fp64")]
    assert_one_device(result, limit=limit)


def is_possible(case: dict[str, Any]) -> bool:
    """Whether the model has so many parts, and blocks to run again."""
    chunks = {"interleaved": 2, "zb-v": 2}.get(case["schedule"], 1)
    if case["recompute"] != "none" and case["subject"] == "u-net":
        return False  # has no repeated blocks
    if case["schedule"] == "dualpipe" and case["subject"] == "u-net":
        return False  # refused: batch statistics
    return case["pp"] * chunks <= PARTS.get(case["subject"], 6)


@pytest.mark.parametrize("case", [case for case in CASES if is_possible(case.values[0])])
def test_a_pipeline_is_one_device(verifier, case):
    """With at most 4 processes, 3 micro-batches, which no number of stages but 3 divides."""
    dp = case["dp"] if case["pp"] * case["dp"] <= 4 else 1
    plan = ",".join(f"{key}={case[key]}" for key in ("pp", "schedule", "zero", "recompute", "transport"))
    plan += ",micro_batch=2,bucket_bytes=4096 bytes"
    check(verifier, case["subject"], plan, case["pp"] * dp, global_batch=6 * dp)


def test_running_statistics_of_a_stage_on_two_ranks_are_refused(verifier):
    """Each would count and average its own half of the micro-batches."""
    build, loss, data = SUBJECTS["u-net"]
    job = job_of(
        Functions(build, loss, data),
        plan="pp=2,schedule=dualpipe,micro_batch=2",
        processes=2,
        options={"steps": 1, "global_batch": 8},
    )
    with pytest.raises(RankError) as caught:
        verifier.run(verifier.prepare(job), timeout=100)
    assert 'E265 plan.schedule = "dualpipe" runs each stage on two ranks' in str(caught.value)
    assert "'first.norm' of UNet has running statistics" in str(caught.value)


def _one_more_over_tp(candidate: CandidateRank) -> None:
    if candidate.rank == 2:
        log = candidate.engine.group.log
        log.must_agree("tp", "what the other rank does not do")


def test_ranks_of_a_stage_agree_on_what_they_issue_over_tp(verifier):
    """Stages differ by right, the ranks of one do not."""
    build, loss, data = SUBJECTS["gpt"]
    options = {"steps": 1, "global_batch": 4}
    job = job_of(Functions(build, loss, data), plan="pp=2,tp=2,micro_batch=2", processes=4, options=options)
    with pytest.raises(RankError, match=r"E404 ranks of tp issued different collectives"):
        verifier.run(verifier.prepare(job), _one_more_over_tp, timeout=100)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("subject", "plan", "processes", "options"),
    [
        ("gpt", "pp=2,zero=1,offload=optimizer", 4, {}),
        ("gpt", "pp=2,zero=2,hsdp=2", 8, {}),
        ("gpt", "pp=2,zero=0,sync=ring", 4, {}),
        ("gpt", "pp=2,zero=1,schedule=zb-h1", 4, {"precision": "bf16"}),
        ("gpt", "pp=2,zero=3", 4, {"precision": "fp32"}),
        ("gpt", "pp=2,schedule=dualpipe,zero=2", 4, {}),
        ("llama", "pp=2,tp=2,zero=1", 8, {}),
        ("gpt", "pp=2,tp=2,schedule=zb-h1", 4, {}),
        ("gpt", "pp=2,tp=2,zero=3", 8, {}),
        ("gpt", "pp=2,tp=2,sequence_parallel=true,micro_batch=2", 8, {"global_batch": 8}),
        (
            "gpt",
            "pp=2,tp=2,sequence_parallel=true,micro_batch=3,zero=3,recompute=full",
            8,
            {"global_batch": 12},
        ),
        ("llama", "pp=2,tp=2,sequence_parallel=true,schedule=interleaved,recompute=selective", 4, {}),
        ("gpt", "pp=2,cp=2,tp=2", 8, {}),
        ("gpt", "pp=2,cp=2,zero=3", 8, {}),
        ("llama", "pp=2,cp=2,zero=3,schedule=interleaved", 4, {}),  # the first stage has no attention
    ],
)
def test_pipelines_compose(verifier, subject, plan, processes, options):
    check(verifier, subject, plan, processes, **options)
