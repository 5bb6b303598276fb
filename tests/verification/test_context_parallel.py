"""plan.cp is one device: our models and those of transformers, with windows, packed documents and padding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright.errors import PlanError
from meshwright.launching.jobs import launch_config
from meshwright.launching.verify import job_of
from meshwright.layout.plan import TrainPlan
from meshwright.layout.sequence import factors
from meshwright.models import GPT, GPTConfig, Llama, LlamaConfig, language_model_loss
from meshwright.models.hf_loss import causal_lm_loss, same_place_loss
from meshwright.training.config import load_config
from meshwright.training.planning import local_world_size, plan_of
from meshwright.verification.job import Functions
from tests.parity.cover import as_cases, pairwise
from tests.parity.verifying import Prepared, Verifier
from tests.verification.checks import assert_one_device

VOCABULARY, SEQUENCE = 37, 13
STEPS, GLOBAL_BATCH, MICRO_STEPS = 2, 4, 2


class Samples:
    """Sequences of unequal numbers of valid labels.

    Args:
        form: `shifted` (tokens and labels), or transformers' own: `plain`, `packed` (documents that cross slices) or
            `padded`.
    """

    def __init__(self, form: str = "shifted") -> None:
        self.form = form

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCABULARY, (SEQUENCE + 1,), generator=generator)
        if self.form == "shifted":
            labels = tokens[1:].clone()
            labels[: index % 6] = -100
            return {"tokens": tokens[:-1], "labels": labels}
        ids = tokens[:-1]
        if self.form == "packed":
            end = 4 + index % 7  # no border of a slice
            return {
                "input_ids": ids,
                "position_ids": torch.cat([torch.arange(end), torch.arange(SEQUENCE - end)]),
            }
        if self.form == "padded":
            valid = torch.arange(SEQUENCE) < SEQUENCE - index % 5
            labels = ids.masked_fill(~valid, -100)
            return {"input_ids": ids.masked_fill(~valid, 0), "attention_mask": valid.long(), "labels": labels}
        return {"input_ids": ids}


def make_gpt(dropout: float = 0.0) -> GPT:
    sizes = {"num_layers": 2, "dim": 24, "num_heads": 6, "ffn_dim": 50, "dropout": dropout}
    return GPT(GPTConfig(vocab_size=VOCABULARY, max_seq_len=SEQUENCE, **sizes))


def make_llama() -> Llama:
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 50}
    return Llama(LlamaConfig(vocab_size=VOCABULARY, max_seq_len=SEQUENCE, **sizes))


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def make_mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=5, attention_dropout=0.2)
    )


def make_hf_llama() -> nn.Module:
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(Config(**_SIZES, num_key_value_heads=2))


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=SEQUENCE)
    )


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES))


class InPlace(Samples):
    """Labels of masked tokens, with padding that keys must not be."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = Samples("padded")[index]
        chosen = torch.arange(SEQUENCE) % 3 == index % 3
        return sample | {"labels": sample["labels"].masked_fill(~chosen, -100)}


SUBJECTS = {
    "gpt": (make_gpt, language_model_loss, Samples()),
    "dropout": (partial(make_gpt, 0.3), language_model_loss, Samples()),
    "llama": (make_llama, language_model_loss, Samples()),
    "window": (make_mistral, causal_lm_loss, Samples("plain")),
    "packed window": (make_mistral, causal_lm_loss, Samples("packed")),
    "packed": (make_hf_llama, causal_lm_loss, Samples("packed")),
    "padded": (make_hf_llama, causal_lm_loss, Samples("padded")),
    "gpt2": (make_gpt2, causal_lm_loss, Samples("plain")),
    "bert": (make_bert, same_place_loss, InPlace()),
}


@pytest.fixture(scope="module")
def verifier(ranks) -> Iterator[Verifier]:
    with Verifier(ranks) as verifier:
        yield verifier


def plan_for(subject: str, keys: str, processes: int, dp: int = 1) -> TrainPlan:
    return _job(subject, f"{keys},micro_batch={GLOBAL_BATCH // MICRO_STEPS // dp}", processes).plan


def _job(subject: str, keys: str, processes: int) -> Any:
    options = {"steps": STEPS, "global_batch": GLOBAL_BATCH}
    return job_of(Functions(*SUBJECTS[subject]), plan=keys, processes=processes, options=options)


@cache
def _prepared(verifier: Verifier, subject: str) -> Prepared:
    """The run on one device, which serves all plans."""
    return verifier.prepare(_job(subject, f"micro_batch={GLOBAL_BATCH // MICRO_STEPS}", 1))


def check(verifier: Verifier, subject: str, keys: str, processes: int, dp: int = 1) -> None:
    plan = plan_for(subject, keys, processes, dp)
    result = verifier.run(_prepared(verifier, subject), plan=plan, timeout=120.0)
    assert_one_device(result)


FACTORS = {
    "subject": list(SUBJECTS),
    "cp": [1, 2, 3, 4],
    "kind": ["ring", "ulysses", "allgather", "2d"],
    "zero": [0, 1, 2, 3],
    "transport": ["gloo", "shm"],
}
CASES = as_cases(
    [
        {"subject": "packed window", "cp": 2, "kind": "ring", "zero": 1, "transport": "shm"},
        {"subject": "dropout", "cp": 3, "kind": "ulysses", "zero": 3, "transport": "gloo"},
        {"subject": "padded", "cp": 2, "kind": "allgather", "zero": 0, "transport": "gloo"},
        {"subject": "llama", "cp": 4, "kind": "2d", "zero": 2, "transport": "shm"},
        {"subject": "bert", "cp": 2, "kind": "ring", "zero": 1, "transport": "gloo"},
        *pairwise(FACTORS),
    ],
    num_default=3,
)


@pytest.mark.parity
@pytest.mark.parametrize("subject", ["window", "packed", "padded", "bert"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_know_masks_of_their_micro_batch(verifier, subject, recompute):
    """pitfall: a backward that runs layers again takes the documents of the newest micro-batch."""
    keys = f"pp=2,cp=2,recompute={recompute}"
    check(verifier, subject, keys, 4)


@pytest.mark.parametrize("case", CASES)
def test_context_parallel_is_one_device(verifier, case):
    kind = case["kind"] if case["kind"] != "2d" or factors(case["cp"])[0] > 1 else "ring"
    keys = f"cp={case['cp']},cp_kind={kind},zero={case['zero']},transport={case['transport']},bucket_bytes=4096 bytes"
    check(verifier, case["subject"], keys, case["cp"])


@pytest.mark.parity
def test_training_prints_the_same_numbers_whatever_cp_is(tmp_path, monkeypatch, capfd):
    """Loss, norm and held-out loss of `train`, over dp x cp, of sequences with padding."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = []
    for cp, dp in ((1, 1), (2, 1)):
        overrides = [
            "model.source=gpt-nano", "plan.precision=fp64", "train.global_batch=4", "train.stop_at=2 steps",
            f"plan.cp={cp}", f"plan.dp={dp}", f"plan.zero={cp}", f"save.dir={tmp_path / str(cp)}", "data.seq_len=15",
            "train.eval_samples=8",
        ]  # fmt: skip
        resolved = load_config(None, overrides)
        assert local_world_size(resolved.config, num_gpus=0) == cp * dp
        result = launch_config(resolved, json_output=True)
        assert result["mesh"] == {"pp": 1, "dp": dp, "cp": cp, "tp": 1}
        lines = [json.loads(line) for line in (tmp_path / str(cp) / "metrics.jsonl").read_text().splitlines()]
        assert [line["tokens"] for line in lines] == [60, 120]
        found.append([number for line in lines for number in (line["loss"], line["grad_norm"])])
        found[-1].append(result["eval_loss"])
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-11, atol=0)
    assert "W204 cp=2 pads seq_len 15 to 16 (1 padded tokens a sequence" in capfd.readouterr().err


@pytest.mark.parity
@pytest.mark.parametrize("plan", ["cp=2,zero=3", "cp=4,zero=1,cp_kind=2d"])
def test_a_checkpoint_of_cut_sequences_goes_on_on_other_ranks(plan):
    """Nothing that is saved is cut by positions."""
    processes = int(plan[3])
    result = meshwright.verify(*SUBJECTS["llama"], plan=plan, processes=processes, steps=3)
    assert result.ok, result.table()
    assert result.check("resume").compared > 0


def test_what_is_not_built_with_cp_is_refused_before_anything_starts():
    refused = {
        "plan.recompute=budget:1 MiB": 'E255 plan.recompute = "budget:1 MiB" with plan.cp = 2 is not built',
        "plan.cp_kind=ulysses": 'E252 plan.cp_kind = "ulysses" with plan.cp = 8 gives each of 8 ranks some heads',
    }
    for override, text in refused.items():
        number = 8 if "ulysses" in override else 2
        config = load_config(None, ["model.source=gpt-nano", f"plan.cp={number}", override]).config
        with pytest.raises(PlanError) as caught:
            plan_of(config, world_size=number)
        assert f"{caught.value.code} {caught.value.message}".startswith(text)


@pytest.mark.parity
@pytest.mark.parametrize("subject", ["gpt", "dropout", "llama", "packed window"])
@pytest.mark.parametrize(
    ("keys", "processes", "dp"),
    [
        ("cp=2,tp=2,zero=3", 8, 2),
        ("cp=2,tp=2,zero=1,cp_kind=ulysses", 8, 2),
        ("cp=4,cp_kind=2d,zero=2", 8, 2),
        ("cp=2,zero=3,hsdp=1", 4, 2),
        ("cp=2,zero=2,ownership=whole", 4, 2),
        ("cp=2,zero=3,recompute=full", 2, 1),
        ("cp=2,zero=1,recompute=full,cp_kind=allgather", 4, 2),
        ("cp=2,zero=1,recompute=selective,cp_kind=ulysses", 2, 1),
        ("cp=2,zero=1,recompute=every:2", 2, 1),
        ("cp=2,zero=1,offload=optimizer", 2, 1),
        ("cp=2,zero=1,sync=ring,transport=gloo", 4, 2),
    ],
)
def test_context_parallel_with_everything_else(verifier, subject, keys, processes, dp):
    if subject == "packed window" and "tp=" in keys:
        keys += ",precision=fp64"
    check(verifier, subject, keys, processes, dp)
