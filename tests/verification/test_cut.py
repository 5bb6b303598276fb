import pytest

from meshwright.presets import MODELS
from meshwright.training.config import load_config
from meshwright.verification.cut import cut_overrides, eps_override


def cut(*overrides, processes=2):
    config = load_config(None, overrides).config
    return load_config(None, [*overrides, *cut_overrides(config, processes=processes)]).config


@pytest.mark.parametrize("name", [m.name for m in MODELS if m.family in ("gpt", "llama")])
def test_every_language_model_is_cut_and_keeps_its_shape(name):
    preset = next(model for model in MODELS if model.name == name)
    config = cut(f"model.source=preset:{name}", "data.seq_len=128")
    model = config.model
    assert model.num_layers <= 2
    assert model.vocab_size <= 512
    assert (config.data.seq_len, model.max_seq_len) == (32, 32)
    assert model.num_heads // model.num_kv_heads == preset.num_heads // preset.num_kv_heads
    assert model.dim == model.num_heads * (model.dim // model.num_heads) <= 128
    assert model.ffn_dim / model.dim == pytest.approx(preset.ffn_dim / preset.dim, rel=0.02)


def test_what_is_small_already_stays():
    config = cut("model.num_layers=1", "model.vocab_size=300", "data.seq_len=16")
    assert (config.model.num_layers, config.model.vocab_size, config.data.seq_len) == (1, 300, 16)


def test_files_of_ids_keep_the_vocabulary():
    assert cut("model.source=gpt2-124m", "data.train=nanogpt:x.bin").model.vocab_size == 50257


def test_documents_are_truncated_rather_than_refused():
    assert cut("data.packing=false", 'data.overlong="error"').data.overlong == "truncate"


def test_a_classifier_loses_width_and_depth():
    config = cut("model.source=mlp-digits", "data.train=digits")
    assert (config.model.num_layers, config.model.dim) == (2, 32)
    assert config.model.vocab_size is None


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "expected"),
    [
        (512, 4, 2, (12, 2)),  # 64 micro-steps: three are enough
        (16, 4, 2, (8, 2)),
        (32, None, 4, (8, 2)),  # one micro-step
        (2, 1, 2, (2, 1)),
    ],
)
def test_the_batch_keeps_up_to_three_micro_steps(batch, micro, processes, expected):
    given = [f"train.global_batch={batch}", *([f"plan.micro_batch={micro}"] if micro else [])]
    config = cut(*given, processes=processes)
    assert (config.train.global_batch, config.plan.micro_batch) == expected


def test_a_users_module_is_not_cut():
    config = load_config(None, ["model.source=py:module:function"]).config
    assert cut_overrides(config, processes=2) == ["plan.micro_batch=2", "train.global_batch=4"]


def test_adam_must_not_magnify_rounding():
    assert eps_override(load_config(None).config) == ["train.optimizer.eps=1e-06"]
    assert eps_override(load_config(None, ["train.optimizer.eps=1e-4"]).config) == []
    assert eps_override(load_config(None, ['train.optimizer.name="sgd"']).config) == []
