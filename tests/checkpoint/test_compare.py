from pathlib import Path

import pytest

from meshwright.checkpoint.compare import check_same_model, group_names
from meshwright.checkpoint.manifest import LogicalTensor, Manifest, RunFacts
from meshwright.errors import CheckpointError


def llama(layers: int, dim: int, ffn: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (99, dim)}
    for i in range(layers):
        shapes[f"layers.{i}.attn.qkv.weight"] = (3 * dim, dim)
        shapes[f"layers.{i}.norm.weight"] = (dim,)
        shapes |= {f"layers.{i}.mlp.{w}.weight": (ffn, dim) for w in ("w1", "w3")}
        shapes[f"layers.{i}.mlp.w2.weight"] = (dim, ffn)
    return shapes


def saved(shapes, numbers=None, aliases=None) -> Manifest:
    tensors = tuple(
        LogicalTensor("parameter", name, "", shape, "float32", ()) for name, shape in shapes.items()
    )
    run = RunFacts(step=4, numbers=numbers or {}, aliases=aliases or {})
    return Manifest(run, 1, (), tensors)


def failing(manifest, now, numbers=None) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_same_model(Path("runs/a/ckpt/step-4000"), manifest, now, numbers=numbers or {})
    assert caught.value.code == "E501"
    return caught.value.message


def test_one_width_is_one_pattern_with_its_key():
    numbers = {"ffn_dim": 48, "dim": 16, "num_layers": 3}
    text = failing(saved(llama(3, 16, 48), numbers), llama(3, 16, 64), {**numbers, "ffn_dim": 64})
    assert text.startswith(
        "checkpoint runs/a/ckpt/step-4000 is another model: 9 of 16 tensors differ, all in one pattern\n"
        "     layers.*.mlp.{w1,w3,w2}.weight  saved 48, now 64   (model.ffn_dim)\n"
    )


def test_a_multiple_of_a_size_is_explained_by_it():
    numbers = {"dim": 16}
    text = failing(saved(llama(1, 16, 48), numbers), llama(1, 24, 48), {"dim": 24})
    assert "layers.*.attn.qkv.weight  saved 48 x 16, now 72 x 24   (model.dim)" in text
    assert "in 4 patterns" in text


def test_more_layers_are_only_in_the_checkpoint():
    text = failing(saved(llama(4, 8, 8), {"num_layers": 4}), llama(2, 8, 8), {"num_layers": 2})
    assert "10 of 21 tensors differ" in text
    assert "layers.*." in text
    assert "only in the checkpoint   (model.num_layers)" in text
    assert "only in the model" in failing(saved(llama(2, 8, 8)), llama(4, 8, 8))


def test_other_ranks_of_shape_and_many_patterns():
    now = {f"{letter}.weight": (4,) for letter in "abcdefgh"}
    text = failing(saved({name: (2, ord(name[0])) for name in now}), now)
    assert "a.weight  saved (2, 97), now (4,)" in text
    assert "in 8 patterns" in text
    assert "and 2 more" in text


def test_the_same_model_and_other_names_of_tied_tensors_pass():
    shapes = llama(2, 8, 8)
    check_same_model(Path("x"), saved(shapes), shapes, numbers={})
    tied = {**shapes, "head.weight": shapes["embed.weight"]}
    check_same_model(Path("x"), saved(shapes, aliases={"head.weight": "embed.weight"}), tied, numbers={})


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([], []),
        (["a.b"], ["a.b"]),
        (["l.0.w", "l.11.w"], ["l.*.w"]),
        (["l.0.a.w", "l.1.b.w"], ["l.*.{a,b}.w"]),
        (["l.0.a.w", "l.0.a.b", "l.1.c.w", "l.1.c.b"], ["l.*.{a,c}.{w,b}"]),
        (["x.w", "x.w.z"], ["x.w", "x.w.z"]),
        (["conv1.w", "conv2.w"], ["{conv1,conv2}.w"]),
    ],
)
def test_names_become_patterns(names, patterns):
    assert group_names(names) == patterns
