"""A run that is stopped and goes on: through the loop, on warm ranks."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import folder
from meshwright.checkpoint.folder import ResumeFrom
from meshwright.comm.mesh import World
from meshwright.errors import MeshwrightError
from meshwright.training import loop
from meshwright.training.checkpoints import _Clock
from meshwright.training.config import load_config
from meshwright.training.console import Console
from meshwright.training.loop import Run

MODEL = {"source": "gpt-nano", "num_layers": 2, "dim": 32, "num_heads": 2, "ffn_dim": 48}
BUILT_IN = {
    "model": MODEL,
    "data": {"seq_len": 16},
    "train": {
        "global_batch": 12,
        "stop_at": "8 steps",
        "eval_every": "never",
        "optimizer": {"lr": 0.01},
    },
    "plan": {"precision": "fp64", "bucket_bytes": "16 KiB"},
}


class Stopped(Exception):
    """A crash."""


def train(mesh, run_dir, overrides=(), resume=None, stop=None, save="2 steps", asked=None) -> dict:
    """Train as one rank; `stop`: crash before this step. What was printed, returned, read, or the error."""
    built_in = BUILT_IN if save == "never" else {**BUILT_IN, "save": {"every": save}}
    config = load_config(None, [f"save.dir={run_dir}", *overrides], built_in=built_in).config
    stream, ids = io.StringIO(), []
    console = Console(stream if mesh.rank == 0 else None)
    world = World(rank=mesh.rank, size=mesh.world.size)
    given = loop.train_step

    def step(state, micro_batch, **arguments):
        if state.step == stop:
            raise Stopped
        number = state.step
        for k in range(arguments["num_microbatches"]):
            ids.append((number, *map(int, run.batches.sample_ids(number, k))))
        return given(state, micro_batch, **arguments)

    loop.train_step = step
    loop.device_peak = lambda *_: None  # measuring it takes longer than all else
    answer: dict = {}
    try:
        run = Run(
            config,
            world,
            run_dir=Path(run_dir),
            console=console,
            device=torch.device("cpu"),
            log=mesh.log,
        )
        # Only rank 1 hears of it.
        answer["result"] = run.train(resume, lambda: mesh.rank == 1 and run.state.step == asked)
    except Stopped:
        run.checkpoints.finish()  # a crash may leave it unfinished; here it must be there
    except MeshwrightError as error:
        answer["error"] = str(error)
    finally:
        loop.train_step = given
    return {**answer, "text": stream.getvalue(), "ids": ids}


def losses(run_dir) -> list[float]:
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [json.loads(line)["loss"] for line in lines]


def samples(*legs) -> dict[int, list[int]]:
    """Step to dataset indices of all ranks."""
    seen: dict[int, list[int]] = {}
    for ranks in legs:
        for rank in ranks:
            for step, *ids in rank["ids"]:
                seen.setdefault(step, []).extend(ids)
    return {step: sorted(ids) for step, ids in seen.items()}


def auto(run_dir) -> ResumeFrom:
    return ResumeFrom(Path(run_dir), required=False)


def test_stopped_twice_a_run_goes_on_as_if_it_never_had(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = ranks.run(train, 1, whole, ["save.every=end"])
    first = ranks.run(train, 4, parts, ["plan.zero=2", "plan.micro_batch=1"], None, 5)
    second = ranks.run(train, 2, parts, ["plan.zero=3"], auto(parts), 7)
    third = ranks.run(train, 3, parts, ["plan.zero=1", "save.background=false"], auto(parts))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-12)
    # Steps 4 and 6 were made twice: before the crash, and again from the checkpoint.
    assert samples(first, second, third).keys() == samples(expected).keys()
    for step, ids in samples(expected).items():
        legs = [leg for leg in (first, second, third) if step in samples(leg)]
        assert all(samples(leg)[step] == ids for leg in legs)
    assert [sorted(samples(leg)) for leg in (first, second, third)] == [[0, 1, 2, 3, 4], [4, 5, 6], [6, 7]]
    result = third[0]["result"]
    assert result["resumed_from"] == str(parts / "ckpt" / "step-00000006")
    assert result["checkpoint"] == str(parts / "ckpt" / "step-00000008")
    assert (result["steps"], result["tokens"]) == (8, expected[0]["result"]["tokens"])
    assert expected[0]["result"]["resumed_from"] is None
    text = second[0]["text"]
    assert (
        f"resume {parts}/ckpt/step-00000004: step 4, saved on 4 ranks (zero2x4 · micro 1 x accumulate 3 · fp64) → "
        f"2 ranks (zero3x2 · micro 6 x accumulate 1 · fp64)\n"
        f"kept   global batch 12 · next sample 48 · lr step 4 · rng     changed  accumulate 3 → 1\n"
    ) in text
    assert "MiB on 2 ranks, training stood still" in text
    stalls = [
        json.loads(line)["save_stall_seconds"] for line in (parts / "metrics.jsonl").read_text().splitlines()
    ]
    assert [stall is not None for stall in stalls] == [False, True] * 4
    names = [path.name for path in folder.list_checkpoints(parts / "ckpt")]
    assert names == ["step-00000008", "step-00000006", "step-00000004"]


def test_copies_and_whole_ownership_are_only_layouts_too(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(train, 1, whole, ["save.every=end"])
    ranks.run(train, 4, parts, ["plan.zero=3", "plan.hsdp=2"], None, 3)
    ranks.run(train, 3, parts, ["plan.zero=1", "plan.ownership=whole"], auto(parts), 5)
    ranks.run(train, 4, parts, ["plan.zero=2", "plan.hsdp=2", "plan.micro_batch=1"], auto(parts), 7)
    (last,) = ranks.run(train, 1, parts, ["save.background=false"], auto(parts))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-12)
    assert last["result"]["resumed_from"].endswith("step-00000006")


@pytest.mark.parametrize(
    "precision", [["plan.precision=bf16", "plan.offload=optimizer"], ["plan.precision=fp16"]], ids=str
)
def test_masters_and_loss_scale_go_on_to_the_bit(ranks, tmp_path, precision):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = [*precision, "plan.zero=3"]
    ranks.run(train, 2, whole, [*given, "save.every=end"])
    ranks.run(train, 2, parts, given, None, 5)
    ranks.run(train, 2, parts, given, auto(parts))
    assert losses(parts) == losses(whole)
    scales = [json.loads(line)["loss_scale"] for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert scales == [
        json.loads(line)["loss_scale"] for line in (whole / "metrics.jsonl").read_text().splitlines()
    ]
    saved = folder.read_manifest(parts / "ckpt" / "step-00000008")
    assert {tensor.dtype for tensor in saved.model.values()} == {"float32"}


def test_one_rank_asked_to_stop_stops_all_after_a_save(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(train, 1, whole, ["save.every=end"])
    answers = ranks.run(train, 3, parts, ["save.every=end"], None, None, "end", 4)
    assert [answer["result"]["steps"] for answer in answers] == [5, 5, 5]
    assert all(answer["result"]["interrupted"] for answer in answers)
    assert "stop   asked to, after step 5; go on with --resume auto" in answers[0]["text"]
    again = ranks.run(train, 2, parts, ["save.every=end"], auto(parts))
    assert not again[0]["result"]["interrupted"]
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-12)


def test_a_damaged_newest_is_named_and_the_previous_one_taken(ranks, tmp_path):
    ranks.run(train, 2, tmp_path, [], None, 4)
    newest = tmp_path / "ckpt" / "step-00000004"
    file = newest / "rank00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    refused = ranks.run(train, 3, tmp_path, [], ResumeFrom(newest, required=True))
    assert all(f"E502 {file} is damaged: checksum" in answer["error"] for answer in refused)
    answers = ranks.run(train, 3, tmp_path, [], auto(tmp_path))
    text = answers[0]["text"]
    assert f"resume E502 {file} is damaged: checksum" in text
    assert f"resume {tmp_path}/ckpt/step-00000002: step 2" in text
    assert "step-00000004.aside-1: of an earlier run beyond step 2, set aside" in text
    assert answers[0]["result"]["steps"] == 8


def test_nothing_to_resume_is_a_fresh_start_or_an_error(ranks, tmp_path):
    (fresh,) = ranks.run(train, 1, tmp_path, ["train.stop_at=1 step"], auto(tmp_path))
    assert f"resume no checkpoint in {tmp_path}: a fresh start at step 0" in fresh["text"]
    (tmp_path / "ckpt" / "step-00000001" / "manifest.json").write_text("{}")
    (answer,) = ranks.run(train, 1, tmp_path, [], ResumeFrom(tmp_path / "ckpt", required=True))
    assert answer["error"].startswith(
        f"E503 no valid checkpoint in '{tmp_path}/ckpt': none of 1 there is valid."
    )


def test_a_finished_run_has_nothing_left_to_do(ranks, tmp_path):
    short = ["train.stop_at=2 steps"]
    (first,) = ranks.run(train, 1, tmp_path, short)
    (again,) = ranks.run(train, 1, tmp_path, short, auto(tmp_path))
    assert "resume nothing is left to do: train.stop_at is 2 steps" in again["text"]
    assert "done   2 steps   none of them now" in again["text"]
    result = again["result"]
    assert (result["steps"], result["final_loss"], result["tokens_per_second"]) == (2, None, 0.0)
    assert losses(tmp_path) == [first["result"]["first_loss"], first["result"]["final_loss"]]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.ffn_dim=64"], "blocks.*.{expand.weight,expand.bias,contract.weight}"),
        (
            ["train.optimizer.name=sgd"],
            "holds optimizer state of adamw, the run has train.optimizer.name = 'sgd'",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(ranks, tmp_path, overrides, text):
    ranks.run(train, 1, tmp_path, ["train.stop_at=2 steps"])
    answers = ranks.run(train, 2, tmp_path, overrides, auto(tmp_path))
    for answer in answers:
        assert answer["error"][:4] == ("E501" if "model" in overrides[0] else "E505")
        assert "(model.ffn_dim)" in answer["error"] or "E505" in answer["error"]


def test_another_batch_goes_on_at_the_next_sample_and_changes_are_said(ranks, tmp_path):
    ranks.run(train, 1, tmp_path, ["train.stop_at=4 steps"])
    changes = ["train.global_batch=8", "train.stop_at=6 steps", "train.optimizer.lr=0.02"]
    answers = ranks.run(train, 2, tmp_path, changes, auto(tmp_path))
    (whole,) = ranks.run(train, 1, tmp_path / "other", ["train.stop_at=6 steps"])
    expected = [index for step in (4, 5) for _, *ids in [whole["ids"][step]] for index in ids]
    seen = samples(answers)
    assert sorted(seen[4] + seen[5]) == sorted(expected[:16])
    assert "global batch 12 → 8" in answers[0]["text"]
    assert "train.optimizer.lr 0.01 → 0.02" in answers[0]["text"]


def test_native_dropout_goes_on_on_as_many_ranks_only(ranks, tmp_path):
    native = ["train.dropout=native", "train.stop_at=2 steps"]
    ranks.run(train, 2, tmp_path, native)
    more = ["train.dropout=native", "train.stop_at=3 steps"]
    same = ranks.run(train, 2, tmp_path, more, auto(tmp_path))
    other = ranks.run(train, 3, tmp_path, ["train.dropout=native", "train.stop_at=4 steps"], auto(tmp_path))
    assert "W501" not in same[0]["text"]
    assert 'W501 train.dropout = "native": generator states are of 2 ranks, and 3 go on' in other[0]["text"]


def test_a_run_without_saves_leaves_no_folder(ranks, tmp_path):
    (answer,) = ranks.run(train, 1, tmp_path, ["train.stop_at=1 step"], None, None, "never")
    assert not (tmp_path / "ckpt").exists()
    assert answer["result"]["checkpoint"] is None


def test_saves_by_time_are_agreed_and_seldom_asked_for(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("meshwright.training.checkpoints.time.perf_counter", lambda: now[0])
    clock, asked, saved = _Clock(0.0, 0), [], []

    def agree(seconds):
        asked.append(seconds)
        return seconds

    for step in range(1, 401):
        now[0] += 1.0
        if clock.is_due(step, 100.0, agree=agree):
            saved.append(step)
    assert saved == [100, 200, 300, 400]
    assert len(asked) < 50
