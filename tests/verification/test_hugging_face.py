"""Models of transformers, unmodified and with dropout on, under every policy: our code knows nothing of them."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.adapt.dropout import stateless
from meshwright.comm.rng import MicroStep
from meshwright.errors import ConfigError
from meshwright.launching.verify import job_of
from meshwright.training.normaliser import sum_and_count
from meshwright.verification.job import Functions
from tests.parity.verifying import Verifier

VOCAB_SIZE, LENGTH = 64, 12


def gpt2(**changes):
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **changes))


def llama(**changes):
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 56,
        "max_position_embeddings": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, **heads, **changes))


class Tokens:
    """Sequences; with `ignores`, unequal numbers of labels are ignored."""

    def __init__(self, *, ignores):
        self.ignores = ignores

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        if self.ignores:
            labels[: index % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def sum_over_labels(model, batch):
    """What a user writes over logits."""
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def its_own_loss(model, batch):
    return model(**batch).loss


SUBJECTS = {
    "gpt2": (gpt2, sum_over_labels, Tokens(ignores=True)),
    "gpt2-eager": (
        functools.partial(gpt2, attn_implementation="eager"),
        sum_over_labels,
        Tokens(ignores=True),
    ),
    "gpt2-own-loss": (gpt2, its_own_loss, Tokens(ignores=False)),
    "llama": (llama, sum_over_labels, Tokens(ignores=True)),
    "llama-own-loss": (llama, its_own_loss, Tokens(ignores=False)),
}


@pytest.fixture(scope="module")
def verifier():
    with Verifier() as verifier:
        yield verifier


# One of each attention and each loss; all of them run with `make parity`.
@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(name, marks=() if name in ("gpt2-eager", "llama-own-loss") else pytest.mark.parity)
        for name in SUBJECTS
    ],
)
def test_every_policy_computes_what_one_process_does(subject, verifier):
    options = {"global_batch": 12, "steps": 2}
    jobs = {
        zero: job_of(
            Functions(*SUBJECTS[subject]),
            plan=f"zero={zero},micro_batch=3,bucket_bytes=4096 bytes",
            processes=2,
            options=options,
        )
        for zero in range(4)
    }
    prepared = verifier.prepare(jobs[0])
    assert prepared.reference.asks_for_float32 == (subject not in ("gpt2", "gpt2-eager"))
    for job in jobs.values():
        result = verifier.run(prepared, plan=job.plan)
        assert result.ok, result.table()
        assert result.check("gradients").compared > 40
        assert max(check.worst_relative for check in result.checks) < 1e-13
        assert result.check("ties").compared == subject.startswith("gpt2")
    verifier.forget(prepared)


@pytest.mark.parametrize(("build", "seen"), [(gpt2, 7), (llama, 2)])
def test_attention_dropout_is_found(build, seen):
    """GPT-2: embedding, and in each of two layers attention, its output and the MLP; Llama: attention."""
    calls = []
    batch = torch.utils.data.default_collate([Tokens(ignores=False)[index] for index in range(4)])
    with stateless(MicroStep(0, 0, 0, 4, 8), must_agree=calls.append):
        its_own_loss(build().train(), batch).backward()
    attention = [call for call in calls if call.startswith("scaled_dot_product_attention(dropout_p=0.1)")]
    assert (len(calls), len(attention)) == (seen, 2)


def test_gradient_checkpointing_as_the_model_offers_it(verifier):
    def build():
        model = llama()
        model.gradient_checkpointing_enable()
        return model

    job = job_of(
        Functions(build, sum_over_labels, Tokens(ignores=True)),
        plan="zero=3",
        processes=2,
        options={"steps": 1},
    )
    result = verifier.run(verifier.prepare(job))
    assert result.ok, result.table()


@pytest.mark.parametrize("build", [gpt2, llama])
def test_its_own_loss_over_ignored_labels_is_refused(build):
    """That is a mean over valid labels of this part of the batch, not over samples."""
    samples = [Tokens(ignores=True)[index] for index in range(8)]
    with pytest.raises(ConfigError, match=r"E112 .* Return \(sum, count\)"):
        sum_and_count(build(), its_own_loss, samples)


def test_a_fault_inside_is_named_by_its_path(verifier):
    """Where the model has float32 parts, one part in 10^8 is still seen: they run in float64."""

    def inject(rank):
        norm = rank.engine.model.get_submodule("model.layers.1.input_layernorm")
        if rank.rank == 1:
            norm.register_forward_hook(lambda _module, _args, output: output * (1 + 1e-8))

    job = job_of(
        Functions(*SUBJECTS["llama"]), plan="zero=1", processes=2, options={"global_batch": 8, "steps": 1}
    )
    result = verifier.run(verifier.prepare(job), inject)
    assert result.first_wrong is not None
    assert result.first_wrong.name == "model.layers.1.input_layernorm"
    assert result.first_wrong.ranks == (1,)
    assert isinstance(llama().get_submodule(result.first_wrong.name), nn.Module)
