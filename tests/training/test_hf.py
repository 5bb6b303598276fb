"""Models of transformers, unmodified: loss and gradients as the unwrapped class, for every family; what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import meshwright
from meshwright.adapt.float64 import float64_throughout
from meshwright.errors import ConfigError
from meshwright.launching.verify import job_of
from meshwright.layout.policy import find_policy
from meshwright.models.hf_loss import causal_lm_loss
from meshwright.sharding.engine import ShardingEngine
from meshwright.sharding.units import find_units
from meshwright.training.config import load_config
from meshwright.training.flops import count_flops, count_flops_without_memory
from meshwright.training.hf import HfBuild, hf
from meshwright.training.hf_source import find_source
from meshwright.training.optimizer import OptimizerSpec, ShardedOptimizer
from meshwright.training.state import TrainState
from meshwright.training.step import train_step
from meshwright.training.task import make_task
from meshwright.training.tree import cast_batch
from meshwright.verification.job import Functions
from tests.parity.verifying import Verifier
from tests.training.hf_models import FAMILIES, SIZES, Samples, save

NUM_SAMPLES = 8
# Blocks that zero3 gathers and frees as one.
BLOCKS = {
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
    "bert": "bert.encoder.layer",
    "vit": "vit.layers",
}


def _batch(family: str, start: int, count: int) -> Any:
    samples = Samples(family)
    return cast_batch(default_collate([samples[start + i] for i in range(count)]), torch.float64)


def _rank(mesh, family: str, policy: str) -> Any:
    """Loss and gradients of one step on this rank's part of the batch, without dropout."""
    build, loss = hf(family, **SIZES[family])
    model = build.skeleton().double()
    engine = ShardingEngine(
        model,
        policy=find_policy(policy, bucket_bytes=4096),
        groups=mesh.data_groups(),
        device=torch.device("cpu"),
        initialiser=build.first_values(model, 7),
    )
    model.eval()
    state = TrainState(engine, ShardedOptimizer(OptimizerSpec("sgd", 0.1, 0.0), engine.shards))
    part = NUM_SAMPLES // 2 // mesh.world.size

    batches = [_batch(family, (2 * mesh.rank + k) * part, part) for k in range(2)]
    with float64_throughout():  # norms and rotary tables ask for float32 whatever comes in
        result = train_step(state, batches.__getitem__, loss=loss, num_microbatches=2, lr=0.1, clip_norm=None)
    gradients = [
        (s.name, s.piece.start, s.gradient.flatten().clone(), s.parameter.grad is not None)
        for s in engine.shards
    ]
    return result.loss, result.count, gradients


@cache
def _unwrapped(family: str) -> tuple[float, dict[str, Tensor], float]:
    """Mean loss and gradients of the plain class on the whole batch; and the class's own loss."""
    torch.set_num_threads(1)
    build, _ = hf(family, **SIZES[family])
    torch.manual_seed(7)
    model = build().double().eval()
    batch = _batch(family, 0, NUM_SAMPLES)
    with float64_throughout():
        output = model(**batch)
        labels, logits = batch["labels"], output.logits
        if family not in ("bert", "vit"):
            labels, logits = labels[:, 1:], logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
    return (
        float(loss.detach()),
        {name: p.grad for name, p in model.named_parameters()},
        float(output.loss.detach()),
    )


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_unwrapped_class(family: str, policy: str, ranks) -> None:
    loss, gradients, own = _unwrapped(family)
    assert own == pytest.approx(loss, rel=1e-12)
    answers = ranks.run(_rank, 2, family, policy, timeout=300.0)
    norm = float(torch.stack([g.square().sum() for g in gradients.values() if g is not None]).sum().sqrt())
    covered = dict.fromkeys(gradients, 0)
    for value, count, pieces in answers:
        assert value == pytest.approx(loss, rel=1e-12)
        assert count == answers[0][1] > 0
        for name, start, values, used in pieces:
            expected = gradients[name]
            assert used == (expected is not None), name
            if expected is not None:
                part = expected.flatten()[start : start + len(values)]
                assert float((values - part).norm()) <= 1e-12 * norm, name
            covered[name] += len(values)
    assert covered == {
        name: p.numel() for name, p in hf(family, **SIZES[family])[0].skeleton().named_parameters()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_gets_what_the_constructor_gives(family: str) -> None:
    build = HfBuild(family, sizes=SIZES[family])
    source = build.source()
    model, plain = build(), source.model_class(source.config)
    assert type(model) is type(plain)
    for (name, value), (wanted_name, wanted) in zip(
        model.named_buffers(), plain.named_buffers(), strict=True
    ):
        assert name == wanted_name
        assert torch.equal(value, wanted), name
    for (name, value), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if bool((wanted == wanted.flatten()[0]).all()):
            assert torch.equal(value, wanted), name  # norms and biases
        elif value.numel() >= 1000:
            assert float(value.detach().std()) == pytest.approx(float(wanted.detach().std()), rel=0.15), name
    other = HfBuild(family, sizes=SIZES[family])()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert list(find_units(model)) == [f"{BLOCKS[family]}.{layer}" for layer in range(2)]
    assert count_flops_without_memory(
        build.skeleton, hf(family, **SIZES[family])[1], Samples(family)[0]
    ) == count_flops(model, hf(family, **SIZES[family])[1], [Samples(family)[0]])


def test_labels_are_shifted_once_and_padding_does_not_count() -> None:
    build, loss = hf("llama", **SIZES["llama"])
    model = build().double().eval()
    ids = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(1))
    ours = loss(model, {"tokens": ids[:, :-1], "labels": ids[:, 1:]})
    mask = torch.ones_like(ids)
    theirs = causal_lm_loss(model, {"input_ids": ids, "attention_mask": mask})
    assert ours[1] == theirs[1] == 16
    assert torch.allclose(ours[0], theirs[0], rtol=1e-12)
    mask[1, 6:] = 0
    padded = causal_lm_loss(model, {"input_ids": ids, "attention_mask": mask})
    parts = [causal_lm_loss(model, {"input_ids": ids[:1]}), causal_lm_loss(model, {"input_ids": ids[1:, :6]})]
    assert padded[1] == 8 + 5
    assert torch.allclose(padded[0], parts[0][0] + parts[1][0], rtol=1e-12)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_verify_passes_with_pretrained_weights(family: str, ranks, tmp_path) -> None:
    save(family, tmp_path)
    build, loss = meshwright.hf(str(tmp_path), init="pretrained")
    jobs = [
        job_of(
            Functions(build, loss, Samples(family)),
            plan=f"zero={zero},micro_batch=2",
            processes=2,
            options={"steps": 2},
        )
        for zero in (1, 3)
    ]
    with Verifier(ranks) as verifier:
        prepared = verifier.prepare(jobs[0])
        for job in jobs:
            result = verifier.run(prepared, plan=job.plan)
            assert result.ok, result.table()
            assert result.check("parameters").compared >= 2 * len(list(build.skeleton().parameters()))


OVERRIDES = [f"model.{name}={value}" for name, value in SIZES["llama"].items() if name != "vocab_size"]


def _task(tmp_path, *overrides: str) -> Any:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 60)
    base = [
        f'data.train="text:{tmp_path}/text.txt"',
        "data.seq_len=16",
        f'data.cache_dir="{tmp_path}"',
        'model.source="hf:llama"',
    ]
    return make_task(load_config(None, [*base, *OVERRIDES, *overrides]).config)


def test_a_run_file_names_a_model(tmp_path) -> None:
    task = _task(tmp_path, "model.vocab_size=256", 'plan.precision="fp64"')
    assert task.name == "LlamaForCausalLM hf:llama"
    assert task.shape == {"layer": 2, "channel": 32, "sequence": 16}
    assert {p.dtype for p in task.model.parameters()} == {torch.float64}
    assert all(p.is_meta for p in task.model.parameters())
    assert task.model.config.num_key_value_heads == 2
    assert task.flops.full > 6 * 16 * 2 * (4 * 32 * 32 - 2 * 32 * 16)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.seq_len=17"], r"E106 data.seq_len = 17 exceeds the 16 positions of hf:llama"),
        (["model.vocab_size=100"], r"E103 .*has id 104 in sample 0, the model's vocabulary is 100"),
        (
            ['model.task="masked_lm"'],
            r'E120 model.task = "masked_lm": hf:llama \(llama\) can be causal_lm, sequence',
        ),
        (["model.num_heads=5"], r"E106 model hf:llama: .*multiple of the number of attention heads \(5\)"),
        (
            ['model.source="hf:vit"', "model.num_kv_heads=2"],
            r"E106 model.num_kv_heads = 2: hf:vit .*has no such size",
        ),
        (['model.source="hf:t5"'], r"E106 model.num_kv_heads|E120 hf:t5 is an encoder-decoder model"),
        (
            ['model.source="hf:org/unknown"'],
            r"E120 hf:org/unknown .*not in the local cache; .*: hf download org/unknown",
        ),
        (['model.source="hf:./nowhere"'], r"E120 hf:./nowhere: /.*/nowhere does not exist; give a folder"),
        (['model.source="hf:."'], r"E120 hf:.: /.* holds no config.json"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _task(tmp_path, *overrides)


def test_config_files_that_say_nothing_usable_are_named(tmp_path) -> None:
    for content, text in (
        ("{}", "transformers cannot use its config.json: Unrecognized model"),
        (
            '{"model_type": "llama", "architectures": ["LlamaModel"]}',
            r"names architectures = \['LlamaModel'\]",
        ),
        ('{"model_type": "vit", "problem_type": "regression"}', "has problem_type = 'regression'"),
        (
            '{"model_type": "wav2vec2"}',
            "transformers has no class of 'wav2vec2' for image_classification, masked_lm",
        ),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"^E120 hf:.*{text}"):
            find_source(str(tmp_path))


def test_sizes_that_follow_from_others_follow() -> None:
    config = find_source("llama", sizes={"dim": 64, "num_heads": 4}).config
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    config = find_source("qwen3", sizes={"num_layers": 3}).config
    assert len(config.layer_types) == 3
    assert find_source("gpt2", sizes={"ffn_dim": 100}).config.n_inner == 100


def test_a_reset_that_leaves_memory_as_it_is_is_named() -> None:
    class Forgetful(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                nn.init.zeros_(self.weight)

    with torch.device("meta"):
        model = nn.Sequential(Forgetful(2, 2))
    from meshwright.training.initialise import reset_initialiser

    initialiser = reset_initialiser(model, 0)
    with pytest.raises(
        ConfigError, match=r"E111 the reset of '0' \(Forgetful\) leaves 'bias' of shape \(2,\)"
    ):
        initialiser("0.weight", 0, 4, torch.float32)
